"""flagcx run where its stdout is full, closed, has no reader or does not block: no job ends for it."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.bootstrap.processes import bare_environment
from tests.cli.launching import lead_a_session, read_until, running

BODY = """
for number in range(200):
    tell(number, "x" * 1000)
open(sys.argv[1] + environment()["FLAGCX_RANK"], "w").close()
"""


def are_done(tmp_path):
    return [(tmp_path / f"done{rank}").exists() for rank in range(2)] == [True, True]


def test_a_full_disk_ends_no_job(script, tmp_path):
    with (
        open("/dev/full", "wb") as full,
        running("-n", "2", script(BODY), tmp_path / "done", stdout=full) as process,
    ):
        _, err = process.communicate(timeout=30)
    assert (process.returncode, are_done(tmp_path)) == (0, True)
    assert err == (
        "\nflagcx run: stdout takes no more output (No space left on device); the ranks go on without it\n"
    )


def test_a_reader_that_goes_away_ends_no_job(script, tmp_path):
    with running("-n", "2", script(BODY), tmp_path / "done") as process:
        assert process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=30) == 0
    assert are_done(tmp_path)
    assert err == "\nflagcx run: stdout takes no more output (Broken pipe); the ranks go on without it\n"


def test_a_stream_that_does_not_block_is_waited_for(script, tmp_path):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with running("-n", "2", script(BODY), tmp_path / "done", stdout=writing) as process:
        os.close(writing)
        with open(reading, "rb") as stdout:
            lines = stdout.read().splitlines()
        assert (process.wait(timeout=30), process.stderr.read()) == (0, "")
    assert are_done(tmp_path)
    for rank in (b"[0] ", b"[1] "):
        own = [line for line in lines if line.startswith(rank)]
        assert own == [rank + b"%d " % number + b"x" * 1000 for number in range(200)]


@pytest.mark.parametrize("closed", [(1,), (0,), (0, 1, 2)])
def test_a_closed_stream_ends_no_job(script, tmp_path, closed):
    def close():
        for stream in closed:
            os.close(stream)

    with running("-n", "2", script(BODY), tmp_path / "done", preexec_fn=close) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err, are_done(tmp_path)) == (0, "", True)
    assert len(out.splitlines()) == (0 if 1 in closed else 400)


def test_a_launch_goes_on_where_its_programs_stdout_is_full():
    body = """
import os, sys
import flagcx as fc
sys.stderr.write(f"{fc.launch(lambda: print('words' * 10000) or 7, 2)} all")
sys.stderr.flush()
os._exit(0)  # Python would complain of its full stdout
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", body],
            env=bare_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stderr.endswith("\n[7, 7] all")
    told = "the ranks go on, but output of theirs is lost: [Errno 28] No space left on device"
    assert set(done.stderr.splitlines()[:-1]) == {told}


def test_a_terminal_that_goes_away_ends_no_job_under_nohup(script, tmp_path):
    ours, theirs = os.openpty()

    def under_nohup():
        lead_a_session()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    body = """
    tell("ready")
    while os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    """
    waits = tmp_path / "waits"
    waits.touch()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "preexec_fn": under_nohup}
    body = textwrap.dedent(body) + BODY
    with running("-n", "2", script(body), tmp_path / "done", waits, **streams) as process:
        os.close(theirs)
        assert read_until(ours, rb"(?s)ready.*ready")
        os.close(ours)
        waits.unlink()
        assert process.wait(timeout=30) == 0
    assert are_done(tmp_path)
