"""Jobs that hang: ``flagcx status`` and the flight record say why, while they hang and afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flagcx.cli import application
from tests.bootstrap.processes import line, stop, wait_until
from tests.communicator.jobs import job, outcome_of

_START = """
import threading
comm = fc.init()
rank, x = comm.rank, np.ones(6)
comm.barrier()
tell("ready")
"""
_CASES = {
    "receive": "comm.recv(x, 1) if rank == 0 else time.sleep(1000)",
    "receives": "comm.recv(x, 1 - rank) if rank < 2 else time.sleep(1000)",
    "different": "comm.recv(x, 1) if rank == 0 else comm.allreduce(x)",
    "loop": """
def spin_for_ever():
    while True:
        pass
comm.broadcast(x) if rank else spin_for_ever()""",
    "stopped": "time.sleep(1000) if rank == 1 else comm.allreduce(x)",
    "communicators": """
child = comm.split(0)
for one in (child, comm) if rank else (comm, child):
    one.allreduce(x)""",
    "locks": """
first, second = threading.Lock(), threading.Lock()
def take_both():
    with second:
        time.sleep(0.2)
        with first:
            comm.barrier()
if rank == 1:
    other = threading.Thread(target=take_both, name="feeder", daemon=True)
    with first:
        other.start()
        time.sleep(0.2)
        with second:
            comm.barrier()
comm.barrier()""",
}
_ENDLESS = "\ntime.sleep(1000)"


def run(*arguments: str) -> str:
    """What the command line prints."""
    result = CliRunner().invoke(application(arguments[0]), list(arguments))
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def _status(processes, wanted: str) -> tuple[str, dict]:
    """What ``flagcx status`` says once it says ``wanted``: as text, and from JSON."""
    said: dict = {}

    def is_said() -> bool:
        said.update(json.loads(run("status", str(processes[0].pid), "--json")))
        return re.search(wanted, " ".join(said["words"])) is not None

    try:
        wait_until(is_said)
    except AssertionError:
        raise AssertionError(f"expected {wanted!r}, got {said['words']}") from None
    return run("status", str(processes[0].pid)), said


def _record(processes, directory: Path, ranks: int) -> tuple[str, dict]:
    """What ``flagcx doctor`` says of the record that rank 0 makes at SIGUSR2: as text, and from JSON."""
    processes[0].send_signal(signal.SIGUSR2)

    wait_until(lambda: any(_recorded(path) >= ranks for path in directory.glob("*.json")))
    (path,) = directory.glob("*.json")
    return run("doctor", str(path)), json.loads(run("doctor", str(path), "--json"))


def _recorded(path: Path) -> int:
    """How many records a flight record has."""
    return len(re.findall(rb'^{"rank": ', path.read_bytes(), re.MULTILINE))


_EXPECTED = {
    "receive": (r"rank 0 waits for rank 1 in a receive of 48 bytes of communicator world", [1], []),
    "receives": (r"rank 0 waits for rank 1 in a receive.*receives before it sends", [], [[0, 1]]),
    "different": (r"in a receive.*in allreduce of 6 float64.*different calls of commun", [], [[0, 1]]),
    "loop": (r"ranks? 1.* wait.* for rank 0 in broadcast of 6 float64", [0], []),
    "stopped": (r"ranks 0 and 2 wait for rank 1 in allreduce.*rank 1 \(process \d+ .*is stopped", [1], []),
    "communicators": (
        r"communicator world; rank 1 waits for rank 0 .*split 1 of world.*in different orders",
        [],
        [[0, 1, 2]],
    ),
    "locks": (r"ranks 0 and 2 wait for rank 1 in barrier.*waits for a lock", [1], []),
}
_PLACES = {
    "receive": r"rank 1 stands at <string>:\d+ in <module>",
    "loop": r"rank 0 stands at <string>:\d+ in spin_for_ever",
    "locks": r"rank 1 stands at <string>:\d+ in <module>.*its thread feeder at <string>:\d+ in take_both",
}


@pytest.mark.parametrize("case", sorted(_CASES))
def test_a_job_that_hangs_is_explained(case, tmp_path):
    wanted, culprits, circles = _EXPECTED[case]
    with job(3, _START + _CASES[case] + _ENDLESS, FLAGCX_RECORD=str(tmp_path)) as processes:
        for process in processes:
            assert line(process) == "ready"
        if case == "stopped":
            stop(processes[1])
        text, said = _status(processes, wanted)
        assert (said["culprits"], said["circles"]) == (culprits, circles), said
        assert re.search(wanted, text.replace("\n", " ")), text
        assert {row["rank"]: row["process"] for row in said["ranks"]} == {
            rank: process.pid for rank, process in enumerate(processes)
        }
        text, said = _record(processes, tmp_path, 2 if case == "stopped" else 3)
        assert (said["culprits"], said["circles"]) == (culprits, circles), said
        told = " ".join(said["words"])
        assert re.search(wanted, told) and "There was no error" in told, told
        assert re.search(_PLACES.get(case, ""), told), told
        assert ("rank 1 has left no record" in told) == (case == "stopped"), told


def test_a_time_out_says_where_the_record_is(tmp_path):
    body = _START + "outcome(lambda: comm.barrier()) if rank else time.sleep(1000)\ntime.sleep(1000)"
    with job(3, body, FLAGCX_RECORD=str(tmp_path), FLAGCX_TIMEOUT_S="1") as processes:
        for process in processes:
            assert line(process) == "ready"
        name, culprit, _, text = outcome_of(line(processes[1]))
        assert (name, culprit) in (("PeerTimeoutError", 0), ("AbortedError", 0)), text
        (path,) = tmp_path.glob("*.json")
        assert text.endswith(f"(the last calls and stacks of all ranks: flagcx doctor {path})")
        assert path.stat().st_mode & 0o077 == 0
        wait_until(lambda: _recorded(path) == 3)
        told = run("doctor", str(path))
    assert re.search(r"rank \d failed first, at .*: PeerTimeoutError: rank 0 did not take part", told)
    assert re.search(r"ranks 1 and 2 wait for rank 0 in barrier", told)
    assert re.search(r"rank 0 stands at <string>:\d+ in <module>", told)
    settings = json.loads(path.read_text())["records"][0]
    assert settings["settings"]["timeout_s"] == 1.0 and "numpy" in settings["versions"]
    assert not [name for name in settings["variables"] if "KEY" in name]
    calls = settings["communicators"][0]
    assert calls["calls"][-1][1].startswith("barrier")
    assert calls["records"][-1][1] == "barrier"


def test_where_ranks_part_ways(tmp_path):
    body = _START + "comm.allreduce(x)\noutcome(lambda: comm.allreduce(x if rank else x[:2]))\n"
    with job(3, body, FLAGCX_RECORD=str(tmp_path)) as processes:
        for process in processes:
            assert line(process) == "ready"
            assert outcome_of(line(process))[0] in ("MismatchError", "AbortedError")
        (path,) = tmp_path.glob("*.json")
        told = run("doctor", str(path))
    assert re.search(
        r"Ranks part ways at call 2 of communicator world: rank 0 called allreduce of 2 float64 .*; "
        r"ranks? 1.* called allreduce of 6 float64",
        told,
    ), told


def test_an_exception_and_a_crash(tmp_path):
    body = """
import ctypes
comm = fc.init()
comm.barrier()
tell("ready")
if comm.rank == 1 and "CRASH" in os.environ:
    ctypes.string_at(0)
if comm.rank == 1:
    raise ValueError("no such file")
outcome(lambda: comm.barrier())
"""
    for crash in ({}, {"CRASH": "1"}):
        directory = tmp_path / str(len(crash))
        with job(3, body, FLAGCX_RECORD=str(directory), **crash) as processes:
            for process in processes:
                assert line(process) == "ready"
            for rank in (0, 2):
                assert outcome_of(line(processes[rank]))[1] == 1
        (path,) = directory.glob("*.json")
        told = run("doctor", str(path))
        if crash:
            assert "rank 1 was ended by a signal: Fatal Python error: Segmentation fault" in told
            assert re.search(r'File "<string>", line \d+ in <module>', told)
        else:
            assert re.search(r"rank 1 failed first, at .*: ValueError: no such file", told)
            assert re.search(r"\n +File \"<string>\", line \d+, in <module>", told)


def test_a_handler_of_the_application_is_left_alone(tmp_path):
    body = r"""
signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b"mine\n"))  # print may be in the middle of a line
comm = fc.init()
tell("ready")
signal.pause()
comm.barrier()
"""
    with job(2, body, FLAGCX_RECORD=str(tmp_path)) as processes:
        for process in processes:
            assert line(process) == "ready"
            process.send_signal(signal.SIGUSR2)
            assert line(process) == "mine"
    assert not [*tmp_path.iterdir()]


def test_a_handler_that_comes_later_outlives_the_communicator():
    body = r"""
with fc.init() as comm:
    signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b"mine\n"))
child = os.fork()
os.kill(os.getpid(), signal.SIGUSR2)
if child:
    os.waitpid(child, 0)
"""
    with job(2, body) as processes:
        for process in processes:
            assert [line(process), line(process)] == ["mine", "mine"]


def test_a_rank_that_has_not_come_to_init():
    with job(3, "if os.environ['FLAGCX_RANK'] == '1': time.sleep(1000)\nfc.init()") as processes:
        told = ""

        def is_said() -> bool:
            nonlocal told
            result = CliRunner().invoke(application("status"), ["status", str(processes[0].pid)])
            told = result.stdout
            return "ranks 0 and 2 are in fc.init()." in told

        wait_until(is_said)
        assert "rank 1 has not called fc.init()" in told


def test_ranks_that_are_threads():
    body = """
def call():
    comm = fc.init()
    comm.barrier()
    if comm.rank == 1:
        time.sleep(1000)
    comm.allreduce(np.ones(6))
fc.launch(call, ranks=3, threads=True)
"""
    with job(1, body) as processes:
        said: dict = {}

        def is_said() -> bool:
            result = CliRunner().invoke(application("status"), ["status", str(processes[0].pid), "--json"])
            said.update(json.loads(result.stdout) if result.exit_code == 0 else {"words": []})
            return "ranks 0 and 2 wait for rank 1 in allreduce of 6 float64" in " ".join(said["words"])

        wait_until(is_said)
        assert [row["rank"] for row in said["ranks"]] == [0, 1, 2] and said["culprits"] == [1]


def test_jobs_are_listed_and_leave_nothing():
    with job(2, _START + _ENDLESS) as processes:
        for process in processes:
            assert line(process) == "ready"
        listed = [each for each in json.loads(run("status", "--json")) if each["processes"].get("0")]
        own = [each for each in listed if each["processes"]["0"] == processes[0].pid]
        assert own[0]["processes"] == {"0": processes[0].pid, "1": processes[1].pid}
        assert own[0]["job"] in run("status")
        processes[1].kill()
        processes[1].wait()
        told = run("status", own[0]["job"])
        assert "rank 1 is gone" in told
    assert own[0]["job"] not in run("status")
    assert not os.path.exists(f"/proc/{processes[0].pid}")
