"""``flagcx run --elastic``: what becomes of a job whose ranks are lost."""

from __future__ import annotations

import pytest

from flagcx.cli import main
from tests.cli.launching import flagcx_run
from tests.ranges import exhaustive

SCRIPT = """
import os, sys, time
import numpy as np
import flagcx as fc

slot, restarts = int(os.environ["FLAGCX_RANK"]), int(os.environ.get("FLAGCX_RESTARTS", 0))
step = 0
while True:
    comm = fc.init()
    try:
        step = max(comm.allgather_object(step))
        while step < 40:
            if slot == 1 and step == 20 and restarts < {failures}:
                print("last words", end="", flush=True)
                {end}
            comm.allreduce(np.ones(100))
            step += 1
        break
    except (fc.PeerDiedError, fc.AbortedError):
        pass
print("done with", comm.size, "after", restarts, flush=True)
"""
ENDS = {
    "exception": ("raise ValueError('no such file')", "exit code 1"),
    "exit": ("sys.exit(3)", "exit code 3"),
    "child": ("os.fork() or time.sleep(60); os.kill(os.getpid(), 9)", "killed by SIGKILL"),
}


def elastic(tmp_path, failures: int, end: str, *options: str):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.replace("{failures}", str(failures)).replace("{end}", ENDS[end][0]))
    return flagcx_run("-n", "3", "--elastic", *options, str(script))


@pytest.mark.parametrize("end", ["child", *exhaustive(["exception"])])
def test_a_lost_rank_is_started_again(tmp_path, end):
    """Also where a process that it forked still lives and holds its output and its connections."""
    done = elastic(tmp_path, 1, end)
    assert done.returncode == 0, done
    assert done.stdout.count("done with 3") == 3 and "[1] done with 3 after 1" in done.stdout, done
    assert "[1] last words\n" in done.stdout, done
    assert f"rank 1 is started again ({ENDS[end][1]}; restart 1 of 3)" in done.stderr, done


@pytest.mark.exhaustive
def test_the_others_go_on_where_no_restart_is_left(tmp_path):
    done = elastic(tmp_path, 9, "exit", "--max-restarts", "1", "--min-ranks", "2")
    assert done.returncode == 0, done
    assert done.stdout.count("done with 2 after 0") == 2, done
    assert "rank 1 is started again (exit code 3; restart 1 of 1)" in done.stderr, done
    assert "rank 1 is lost (exit code 3), and the other 2 go on: no restart is left" in done.stderr, done


def test_the_job_fails_with_too_few_ranks(tmp_path):
    done = elastic(tmp_path, 9, "exception", "--max-restarts", "0", "--min-ranks", "3")
    assert done.returncode == 1 and "done" not in done.stdout, done
    assert "rank 1 of 3 failed first: exit code 1" in done.stderr, done
    assert done.stderr.rstrip().endswith("ValueError: no such file"), done


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-ranks", "2"], "--min-ranks has no meaning without --elastic"),
        (["--elastic", "--min-ranks", "4"], "--min-ranks 4 is more than the 3 ranks of -n"),
    ],
)
def test_bounds_need_elastic_and_must_be_possible(options, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["flagcx", "run", "-n", "3", *options, __file__])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
