"""Ranges of which the default run takes a part, and ``pytest --all`` everything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive(values: Iterable[Any]) -> list[Any]:
    """Values of a parameter for ``pytest --all`` alone.

    Example:
        >>> @pytest.mark.parametrize("size", [1, 2, 3, 8, *exhaustive(range(4, 8))])  # doctest: +SKIP
    """
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]
