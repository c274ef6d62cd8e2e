"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import end_ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run what is marked exhaustive too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out exhaustive tests unless ``--all``, ``-m exhaustive`` or the name of a test asks for them."""
    by_mark, by_name = "exhaustive" in config.option.markexpr, any("::" in name for name in config.args)
    if config.option.all or by_mark or by_name:
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


@pytest.fixture(autouse=True, scope="session")
def _as_on_a_fresh_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Algorithms are chosen by rule, whatever ``flagcx tune`` has left for this user; no record is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAGCX_TUNING", "0")
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _started_ranks() -> Iterator[None]:
    """The processes that ``run_ranks`` starts serve all tests of the session."""
    yield
    end_ranks()
