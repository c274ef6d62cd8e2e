"""``flagcx run --hosts``: ranks on test hosts, which an agent in place of ssh starts."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from bench.hosts import inside, write_agent
from flagcx._launch.far_ranks import FarHost, parse_hosts
from flagcx.errors import ArgumentError
from tests.bootstrap.processes import bare_environment
from tests.cli.launching import command, flagcx_run
from tests.hosts import ROOT

WHERE = """
import os, socket, sys
names = ("FLAGCX_RANK", "FLAGCX_SIZE", "FLAGCX_LOCAL_RANK", "FLAGCX_LOCAL_SIZE")
print(*(os.environ[name] for name in names), socket.gethostname(), sys.argv[1:])
"""
WAIT = """
import os, pathlib, sys, time
place = pathlib.Path(sys.argv[1]) / ("pid" + os.environ["FLAGCX_RANK"])
place.write_text(str(os.getpid()))
time.sleep(60)
"""
MEET = """
import flagcx as fc, numpy as np
comm = fc.init()
print(comm.allgather_object(comm.rank), len(set(comm.hosts)))
"""


@pytest.fixture
def agent(tmp_path):
    return str(write_agent(tmp_path))


def far_run(names, agent, counts, *arguments, **options):
    """``flagcx run --hosts`` inside the first host."""
    hosts = ",".join(f"{name}:{count}" for name, count in zip(names, counts, strict=False))
    line = command("--hosts", hosts, "--agent", agent, *arguments)
    options = {"env": bare_environment(UCX_TLS="tcp,self"), "cwd": ROOT, "text": True} | options
    return subprocess.Popen(inside(names[0], line), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_each_rank_is_told_its_place(test_hosts, agent, tmp_path):
    script = tmp_path / "where.py"
    script.write_text(WHERE)
    with far_run(test_hosts, agent, (1, 2), str(script), "a b", "$c") as job:
        printed, errors = job.communicate(timeout=30)
    assert job.returncode == 0, errors
    a, b = test_hosts[:2]
    assert sorted(printed.splitlines()) == [
        f"[0] 0 3 0 1 {a} ['a b', '$c']",
        f"[1] 1 3 0 2 {b} ['a b', '$c']",
        f"[2] 2 3 1 2 {b} ['a b', '$c']",
    ], errors


@pytest.mark.slow
def test_ranks_of_several_hosts_meet(test_hosts, agent, tmp_path):
    pytest.importorskip("ucxx", reason="the extra 'ucx' is not installed")
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    with far_run(test_hosts, agent, (1, 1, 1), str(script)) as job:
        printed, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert sorted(printed.splitlines()) == [f"[{rank}] [0, 1, 2] 3" for rank in range(3)], errors


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("import sys; sys.exit(3 * (R == '1'))", 3, "failed first: exit code 3"),
        pytest.param(
            "import os, time; os.kill(os.getpid(), 9) if R == '1' else time.sleep(60)",
            137,
            "failed first: killed by SIGKILL",
            marks=pytest.mark.slow,  # rank 0 has three seconds to notice
        ),
    ],
)
def test_a_failure_ends_all_and_is_reported(program, code, said, test_hosts, agent, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(f"import os; R = os.environ['FLAGCX_RANK']; {program}")
    with far_run(test_hosts, agent, (1, 1), str(script)) as job:
        _, errors = job.communicate(timeout=30)
    assert job.returncode == code, errors
    assert f"rank 1 of 2 on {test_hosts[1]} failed first" in errors and said in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_ranks_end_with_the_launcher(number, test_hosts, agent, tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(WAIT)
    with far_run(test_hosts, agent, (1, 1), str(script), str(tmp_path)) as job:
        places = [tmp_path / f"pid{rank}" for rank in range(2)]
        end = time.monotonic() + 20
        while not all(place.exists() and place.read_text() for place in places):
            assert time.monotonic() < end and job.poll() is None
            time.sleep(0.01)
        pids = [int(place.read_text()) for place in places]
        job.send_signal(number)
        job.communicate(timeout=30)
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_an_agent_that_cannot_reach_its_host(tmp_path):
    script = tmp_path / "none.py"
    script.touch()
    done = flagcx_run("--hosts", "a,b", "--agent", "sh -c 'echo no route to $0 >&2; exit 255'", str(script))
    assert done.returncode == 255 and "on a failed first" in done.stderr
    assert "no route to a" in done.stderr


def test_lists_of_hosts():
    assert parse_hosts("a:4, b") == (FarHost("a", 4), FarHost("b", 1))
    wrong = {"a:0": "'a:0' is no host", "a,,b": "'' is no host", "-x": "no host", "a,a:2": "a twice"}
    for text, said in wrong.items():
        with pytest.raises(ArgumentError, match=said):
            parse_hosts(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--hosts", "a:2", "--elastic"), "--elastic has no meaning with --hosts"),
        (("--hosts", "a:2", "-n", "2"), "--ranks has no meaning with --hosts"),
        (("--agent", "ssh"), "--agent has no meaning without --hosts"),
        (("--hosts", "a:x"), "'a:x' is no host with a number of ranks"),
    ],
)
def test_options_that_do_not_fit(options, said, tmp_path):
    script = tmp_path / "none.py"
    script.touch()
    done = flagcx_run(*options, str(script))
    assert done.returncode != 0 and said in done.stderr.replace("\n", " "), done.stderr
