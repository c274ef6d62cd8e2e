"""Tests of the selection look for tables; none lies where they look but their own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLAGCX_TUNING", raising=False)
