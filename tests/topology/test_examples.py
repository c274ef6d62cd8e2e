"""The examples in the docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import flagcx.topology

MODULES = sorted(module.name for module in pkgutil.iter_modules(flagcx.topology.__path__))


@pytest.mark.parametrize("name", ["", *MODULES])
def test_examples(name):
    module = importlib.import_module(f"flagcx.topology.{name}".rstrip("."))
    assert doctest.testmod(module).failed == 0


def test_public_names_exist_and_are_documented():
    for name in flagcx.topology.__all__:
        assert getattr(flagcx.topology, name).__doc__, name
