"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import end_ranks


@pytest.fixture(autouse=True, scope="session")
def _as_on_a_fresh_machine() -> Iterator[None]:
    """Algorithms are chosen by rule, whatever ``flagcx tune`` has left for this user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAGCX_TUNING", "0")
        yield


@pytest.fixture(autouse=True, scope="session")
def _started_ranks() -> Iterator[None]:
    """The processes that ``run_ranks`` starts serve all tests of the session."""
    yield
    end_ranks()
