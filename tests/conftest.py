"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import hosts
from tests.bootstrap.forked import end_server
from tests.leftovers import check_nothing_is_left
from tests.ranks import end_ranks

PROCESSES = min(4, len(os.sched_getaffinity(0)) + 1)
"""One more than cores: while tests wait for processes to start or for a time-out, others compute."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run what is marked exhaustive too")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads it
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Some processes share a run of all tests; ``-n 0``: one."""
    given = getattr(config.option, "numprocesses", 0)  # 0 without pytest-xdist too
    whole = config.args_source is config.ArgsSource.TESTPATHS
    watched = config.option.usepdb or config.option.capture == "no"
    in_worker = hasattr(config, "workerinput")
    if given is None and whole and not watched and not in_worker and not os.path.exists("/dev/nvidiactl"):
        config.option.numprocesses, config.option.dist = PROCESSES, "worksteal"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out exhaustive tests unless ``--all``, ``-m exhaustive`` or the name of a test asks for them."""
    by_mark, by_name = "exhaustive" in config.option.markexpr, any("::" in name for name in config.args)
    if config.option.all or by_mark or by_name:
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def pytest_collection_finish() -> None:
    """Keeps all tests and what they have imported from being walked again and again for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _as_on_a_fresh_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Algorithms are chosen by rule, whatever ``flagcx tune`` has left for this user; nothing is left behind.

    All that tests start has a directory of this run for its temporary files, and for the shared memory of
    Open MPI, which leaves the segments of ranks that were killed. The processes that ``run_ranks`` starts
    serve all tests. At the end no other process may live, and no file be left.
    """
    state = tmp_path_factory.mktemp("state")
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:  # as in what a script starts in the background
            signal.signal(number, handler)
    with tempfile.TemporaryDirectory(prefix="fx") as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", place)
        for name in ("TMPDIR", "OMPI_MCA_btl_sm_backing_directory"):
            patch.setenv(name, place)
        # Or else each of a thousand processes compiles flagcx anew, which takes longer than all its imports.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        patch.setenv("FLAGCX_TUNING", "0")
        patch.setenv("XDG_STATE_HOME", str(state))
        yield
        end_ranks()
        end_server()
        check_nothing_is_left(Path(place))


@pytest.fixture(scope="session")
def test_hosts() -> Iterator[tuple[str, ...]]:
    """The names of four hosts that are joined by a fast network; see ``tests.hosts``."""
    if hosts.missing():
        pytest.skip(hosts.missing())
    with hosts.hosts(4) as names:
        yield names
