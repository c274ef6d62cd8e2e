"""The API reference, which pdoc makes of the docstrings: what they refer to is there."""

from __future__ import annotations

import builtins
import importlib
import re
import shutil
import subprocess

import pytest

import flagcx as fc
from tests.sources import modules

REFERENCE = re.compile(r"``((?:flagcx|fc|comm)(?:\.\w+)+)(\(.*?\))?``|See ``(\w+(?:\.\w+)*)``")
PAGES = (
    "flagcx",
    "flagcx.migration",
    "flagcx.schedule.compose",
    "flagcx.profiler",
    "flagcx.topology",
    "flagcx.errors",
)


def _docstrings():
    """Module, place and text of every docstring of the package; the place of a module's own is ""."""
    return ((one.name, place, text) for one in modules() for place, text in one.docstrings)


def _found(path: str, module: str, place: str) -> bool:
    """Whether a dotted name leads somewhere: from the package, a communicator, or where it stands."""
    head, *rest = path.split(".")
    if head == "comm":
        return _leads(fc.Communicator, rest) or rest[0] in (
            "rank",
            "size",
            "hosts",
            "config",
            "profiler",
            "lost",
        )
    if head in ("fc", "flagcx"):
        return _leads(fc, rest)
    here = importlib.import_module(module)
    owners = [here, fc, fc.Communicator, builtins, *(v for v in vars(here).values() if isinstance(v, type))]
    return any(_leads(owner, [head, *rest]) for owner in owners)


def _leads(owner, names) -> bool:
    for number, name in enumerate(names):
        value = getattr(owner, name, None)
        if value is None and name in getattr(owner, "__annotations__", ()):
            return True
        if value is None and getattr(owner, "__path__", None):
            try:
                value = importlib.import_module(f"{owner.__name__}.{name}")
            except ImportError:
                return False
        if value is None:
            fields = getattr(owner, "__doc__", None) or ""
            return number == len(names) - 1 and re.search(rf"^\s+{name}:", fields, re.M) is not None
        owner = value
    return True


def _optional(module: str) -> bool:
    return module.startswith("flagcx.interop.") or module.endswith("__main__")


def test_references_lead_somewhere():
    broken = []
    for module, place, text in _docstrings():
        if _optional(module):
            continue
        for match in REFERENCE.finditer(text):
            path = match.group(1) or match.group(3)
            if not _found(path, module, place):
                broken.append(f"{module} {place}: {path}")
    assert not broken, "\n".join(broken)


def test_a_broken_reference_is_found():
    assert _found("fc.launch", "flagcx.world", "") and _found("flagcx.cost.model.Model", "flagcx.world", "")
    assert not _found("fc.lunch", "flagcx.world", "") and not _found("comm.all_reduce", "flagcx.world", "")
    assert not _found("Communicater", "flagcx.world", "")


def test_every_module_says_what_it_is():
    silent = [one.name for one in modules() if one.lines and not dict(one.docstrings).get("")]
    assert not silent, silent


@pytest.mark.slow
def test_the_reference_is_made_by_one_command(tmp_path):
    pdoc = shutil.which("pdoc")
    if pdoc is None:
        pytest.skip("pdoc is not installed (pip install 'flagcx[docs]')")
    ended = subprocess.run(
        [pdoc, "-d", "google", *PAGES, "-o", str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    page = (tmp_path / "flagcx.html").read_text()
    assert 'id="Communicator.allreduce"' in page and 'id="simulate"' in page
    assert "comm.Get_rank()" in (tmp_path / "flagcx" / "migration.html").read_text()
