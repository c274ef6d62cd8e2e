"""No descriptor of the library has the number of a standard stream that the program has closed."""

from __future__ import annotations

import ast
import os
import time
from importlib.util import find_spec

import numpy as np
import pytest

import flagcx as fc
from tests.ranks import run_ranks
from tests.sources import PACKAGE

MAKERS = {
    "os.dup",
    "os.eventfd",
    "os.memfd_create",
    "os.open",
    "os.pidfd_open",
    "os.pipe",
    "select.epoll",
    "selectors.DefaultSelector",
    "self._listener.accept",
    "socket.create_connection",
    "socket.create_server",
    "socket.recv_fds",
    "socket.socket",
    "socket.socketpair",
    "tempfile.TemporaryFile",
}
LEFT_OUT = {
    "_launch/far_rank.py": "main calls it",
    "_launch/far_ranks.py": "Terminal has called it",
    "_launch/process_groups.py": "as ranks.py",
    "_launch/ranks.py": "Terminal, or the maker of memory files for fc.launch, has called it",
    "_launch/terminal.py": "__init__ calls it",
    "bootstrap/announcement.py": "a probe sends nothing, and is closed at once",
    "bootstrap/rank_page.py": "__init__ calls it; what is read once is opened to be read",
    "bootstrap/store_server.py": "listen, before it, calls it",
    "bootstrap/sockets.py": "a probe sends nothing, and is closed at once",
    "descriptors.py": "defines it",
    "transport/shared_memory/peek.py": "is opened to be read, and closed at once",
    "transport/shared_memory/segment.py": "create calls it before _unnamed_file",
}


def without(text: str) -> list[str]:
    """The functions that make a descriptor and do not call ``occupy_standard_streams``."""
    found = []
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef):
            called = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
            if called & MAKERS and "occupy_standard_streams" not in called:
                found.append(function.name)
    return found


def test_functions_that_make_descriptors_keep_them_off_the_standard_streams():
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    makes = {path: text for path, text in texts.items() if any(f"{maker}(" in text for maker in MAKERS)}
    found = {path: names for path, text in makes.items() if (names := without(text))}
    assert found.keys() == LEFT_OUT.keys(), found


def test_a_function_that_does_not_is_found():
    text = "def f():\n    return os.pipe()\ndef g():\n    occupy_standard_streams()\n    return os.pipe()"
    assert without(text) == ["f"]


def _without_streams(transport: str, before: bool) -> list[str]:
    """Works with standard streams that are closed; returns what has their numbers then."""

    def close_all() -> None:
        for stream in (0, 1, 2):
            os.close(stream)

    if before:
        close_all()
    comm = fc.init(timeout_s=20, transport=transport)
    if not before:
        close_all()
    for turn in range(3):
        x = comm.empty(100_000)
        x[...] = turn
        half = comm.split(0)
        for stream in (1, 2):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(stream, b"printed" * 1000)
        comm.barrier()
        assert (x == turn).all()
        for one in (comm, half):
            assert (one.allreduce(np.full(5000, turn)) == 2 * turn).all()
        assert comm.broadcast_object(turn) == turn
        half.close()
    shown = [os.readlink(f"/proc/self/fd/{stream}") for stream in (0, 1, 2)]
    comm.close()
    assert fc.init(transport=transport).allreduce(np.ones(1)) == 2
    return shown


@pytest.mark.parametrize("before", [True, False], ids=["started without", "closed later"])
@pytest.mark.parametrize("transport", ["", pytest.param("ucx", marks=pytest.mark.slow)])
def test_what_is_printed_to_a_closed_stream_reaches_no_file_of_the_library(transport, before):
    if transport == "ucx" and not find_spec("ucxx"):
        pytest.skip("the extra 'ucx' is not installed")
    shown = run_ranks(_without_streams, 2, transport, before, fresh=True, timeout_s=60)
    assert shown == [["/"] * 3] * 2


def _takes_all_numbers() -> tuple[list[float], list[int]]:
    """On rank 1: puts files of the program's own under all numbers of the library's descriptors."""
    comm = fc.init(timeout_s=20)
    files: list[int] = []
    sums = []
    if comm.rank == 1:
        paths = [f"/proc/self/fd/{number}" for number in range(3, 40)]
        open_ones = [path for path in paths if os.path.lexists(path)]
        for path in open_ones:
            if "flagcx-launch" not in os.readlink(path):  # where the result goes
                files.append(os.memfd_create("the program's"))
                os.dup2(files[-1], int(path.rpartition("/")[2]))
    for call in (comm, comm.split(0)):
        if comm.rank == 0:
            time.sleep(0.1)  # so that rank 1 looks whether rank 0 lives
        sums.append(float(call.allreduce(np.ones(3))[0]))
    comm.close()
    return sums, [os.fstat(file).st_size for file in files]


def test_numbers_that_the_program_has_taken_for_files_of_its_own_are_let_be():
    """Nothing is written to its files, and no rank is taken for dead."""
    for sums, sizes in run_ranks(_takes_all_numbers, 2, fresh=True, timeout_s=60):
        assert sums == [2, 2] and not any(sizes)
