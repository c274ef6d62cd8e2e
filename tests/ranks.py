"""Runs a function on several ranks, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flagcx as fc


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Calls ``function(*args)`` on every rank; raises the first rank's error."""
    try:
        return fc.launch(function, ranks, args, timeout_s=timeout_s)
    except fc.LaunchError as error:
        raise AssertionError(str(error)) from None
