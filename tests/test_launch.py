"""fc.launch: results, errors, output and the end of every process."""

import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from flagcx import launch
from flagcx.config import Config, environment
from flagcx.errors import ArgumentError, LaunchError
from tests.bootstrap.processes import bare_environment, is_alive, is_listened_on, wait_until


def connected():
    """This rank's store, as init would get it."""
    from flagcx.bootstrap.environment import identify
    from flagcx.bootstrap.rendezvous import connect

    environ = environment()
    return connect(identify(environ), Config.from_environment(environ), environ)


def gathered(word, again=1):
    with connected() as store:
        return store.rank, store.exchange("init", word * again, 30)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_ranks_result_comes_back_in_order(ranks):
    assert launch(gathered, ranks, (b"w",), {"again": 2}) == [
        (rank, [b"ww"] * ranks) for rank in range(ranks)
    ]


def test_lambdas_and_what_they_close_over_travel():
    factor = 3
    assert launch(lambda x: x * factor, 2, (7,)) == [21, 21]


def test_large_arguments_and_results_travel():
    data = os.urandom(30 << 20)
    assert [found == data[::-1] for found in launch(lambda d: d[::-1], 2, (data,))] == [True, True]


def test_the_first_error_is_raised_with_its_rank_traceback_and_cause():
    def fail():
        with connected() as store:
            store.exchange("init", b"", 30)
            if store.rank == 2:
                raise KeyError("the cause")
            store.barrier("never", 30)

    start = time.monotonic()
    with pytest.raises(LaunchError, match="rank 2 raised KeyError: 'the cause'") as caught:
        launch(fail, 3)
    assert time.monotonic() - start < 20
    assert (caught.value.rank, caught.value.exit_code) == (2, 1)
    assert isinstance(caught.value.__cause__, KeyError)
    assert 'raise KeyError("the cause")' in caught.value.traceback
    assert __file__ in caught.value.traceback
    assert "rank_main.py" not in caught.value.traceback


def test_a_rank_that_blames_another_is_not_blamed_itself():
    """Rank 0 says first that rank 1 is gone, because rank 1's own words come late."""

    def fail():
        store = connected()
        store.exchange("init", b"", 30)
        if store.rank == 0:
            store.barrier("never", 30)
        store.abort("it will raise")
        time.sleep(0.5)
        raise ValueError("the cause")

    with pytest.raises(LaunchError, match="rank 1 raised ValueError: the cause"):
        launch(fail, 2)


@pytest.mark.parametrize("moment", ["before init", "after init"])
def test_a_killed_rank_is_named_and_the_others_are_told(moment):
    def die():
        if moment == "before init" and environment()["FLAGCX_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        store = connected()
        store.exchange("init", b"", 30)
        if store.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            store.barrier("never", 30)
        finally:
            print("told after", time.monotonic() - start, flush=True)

    start = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 ended without a result: killed by SIGKILL") as caught:
        launch(die, 3)
    assert time.monotonic() - start < 20
    assert (caught.value.rank, caught.value.exit_code) == (1, -signal.SIGKILL)


def test_survivors_get_an_exception_of_our_own_within_two_seconds():
    done = run_program("""
        from flagcx import launch
        from flagcx.errors import PeerDiedError
        from tests.test_launch import connected, os, signal
        def survive():
            store = connected()
            store.exchange("init", b"", 30)
            if store.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                store.barrier("never", 30)
            except PeerDiedError as error:
                print(f"rank {store.rank} was told of {error.peer}", flush=True)
        launch(survive, 3)
    """)
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0 was told of 1", "[2] rank 2 was told of 1"]
    assert "LaunchError: rank 1 ended without a result: killed by SIGKILL" in done.stderr


def test_a_result_that_cannot_be_pickled_is_an_error_that_says_so():
    with pytest.raises(
        LaunchError, match="rank 0 raised TypeError: the function returned a generator, which cannot"
    ):
        launch(lambda: (x for x in ()), 1)


def test_an_exception_that_cannot_be_pickled_still_has_its_text():
    def fail():
        class Odd(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a} and {b}")

        raise Odd(1, 2)

    with pytest.raises(LaunchError, match="Odd: 1 and 2") as caught:
        launch(fail, 1)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(("code", "expected"), [(0, [None, None]), (None, [None, None])])
def test_a_function_that_exits_well_returns_none(code, expected):
    assert launch(lambda: sys.exit(code), 2) == expected


def test_a_function_that_exits_badly_is_named_with_its_code():
    with pytest.raises(LaunchError, match="rank 0 ended without a result: exit code 3") as caught:
        launch(lambda: sys.exit(3), 1)
    assert caught.value.exit_code == 3


def test_a_launch_that_takes_too_long_is_ended():
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"rank 1 was ended: not done within 4 s; allow more by timeout_s"):
        launch(lambda: environment()["FLAGCX_RANK"] == "1" and time.sleep(60), 2, timeout_s=4)
    assert time.monotonic() - start < 20


def test_output_comes_through_line_by_line(capsys):
    def talk():
        rank = environment()["FLAGCX_RANK"]
        for word in ("one", "two"):
            sys.stdout.write(f"{word} of {rank}\n")
        sys.stderr.write("ä complaint")

    launch(talk, 2)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[0] one of 0", "[0] two of 0", "[1] one of 1", "[1] two of 1"]
    assert sorted(err.splitlines()) == ["[0] ä complaint", "[1] ä complaint"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"function": 3}, "launch needs a function to call, got int"),
        ({"function": len, "ranks": 0}, "ranks must be an integer from 1 up, got 0"),
        ({"function": len, "ranks": 2.0}, "ranks must be an integer from 1 up, got 2.0"),
        ({"function": len, "timeout_s": 0}, "timeout_s must be a number of seconds above 0, or None, got 0"),
        (
            {"function": len, "timeout_s": "soon"},
            "a number of seconds above 0, or None, got 'soon'",
        ),
        ({"function": len, "args": 5}, "args must be the arguments of one call, such as args=(10,), got 5"),
        (
            {"function": len, "args": "ab"},
            "args must be the arguments of one call, such as args=(10,), got 'ab'",
        ),
        ({"function": len, "kwargs": 5}, "kwargs must be a dict of names and values, got 5"),
        ({"function": len, "args": 5, "threads": True}, "args must be the arguments of one call"),
        ({"function": len, "args": (threading.Lock(),)}, "len or its arguments cannot be sent to the ranks"),
    ],
)
def test_a_wrong_call_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        launch(**arguments)


def test_a_launch_error_can_be_pickled():
    error = LaunchError("text", rank=2, exit_code=-9, traceback="t")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.exit_code, copy.traceback) == ("text", 2, -9, "t")


def run_program(text, **options):
    """Runs a program of its own, as a script or notebook would be."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env=bare_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def test_functions_of_main_and_of_a_notebooks_cell_work_and_their_source_is_shown():
    done = run_program("""
        import linecache
        from flagcx import launch
        class Point:
            def __init__(self, x): self.x = x
        helper = lambda x: Point(x + 1)
        source = "def cell():\\n    return helper(1)\\n\\ndef bad():\\n    raise ValueError('in a cell')\\n"
        linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(True), "<cell 1>")
        exec(compile(source, "<cell 1>", "exec"))
        print([point.x for point in launch(cell, 2)])
        try:
            launch(bad, 1)
        except Exception as error:
            print(error)
    """)
    assert done.stderr == ""
    assert done.stdout.startswith("[2, 2]\nrank 0 raised ValueError: in a cell")
    assert "File \"<cell 1>\", line 5, in bad\n    raise ValueError('in a cell')" in done.stdout


SLEEPERS = """
    import os, subprocess, sys, time
    from flagcx import launch
    def sleep():
        from flagcx.config import environment
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        print(os.getpid(), child.pid, environment()["FLAGCX_STORE_ADDRESS"], flush=True)
        time.sleep(600)
    try:
        launch(sleep, 2)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def sleepers():
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLEEPERS)],
        env=bare_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    words = [launcher.stdout.readline().split() for _ in range(2)]
    return launcher, [int(word) for line in words for word in line[1:3]], words[0][3]


def test_an_interrupt_ends_all_ranks_and_what_they_started():
    launcher, processes, address = sleepers()
    assert all(map(is_alive, processes))
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=20)
    assert out == "interrupted\n"
    assert launcher.returncode == 0
    assert not any(map(is_alive, processes))
    assert not is_listened_on(address)


def test_kill_9_of_the_launcher_ends_all_ranks_and_what_they_started():
    launcher, processes, address = sleepers()
    assert all(map(is_alive, processes))
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not any(map(is_alive, processes)), timeout_s=5)
    assert not is_listened_on(address)


@pytest.mark.slow
def test_many_launches_in_a_row_leave_no_process_thread_or_descriptor():
    launch(lambda: None, 2)
    descriptors, children = Path("/proc/self/fd"), Path(f"/proc/self/task/{os.getpid()}/children")
    before = sorted(os.listdir(descriptors)), children.read_text()
    for _ in range(15):
        launch(lambda: None, 2)
    assert (sorted(os.listdir(descriptors)), children.read_text()) == before
