"""flagcx run and signals: nohup, SIGUSR1, Ctrl-Z, time for a checkpoint, an ignored SIGCHLD."""

import os
import re
import signal
import subprocess
import time

import pytest

from tests.bootstrap.processes import bare_environment, is_alive, wait_until
from tests.cli.launching import flagcx_run, lead_a_session, read_until, running


def state_and_parent(pid):
    """A process's state, which is "T" where it is stopped, and its parent."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[:2]


def is_stopped(pid):
    return state_and_parent(pid)[0] == "T"


def ignoring(number):
    """For ``preexec_fn``: what a shell's ``trap "" SIGNAL`` does to the programs that it starts."""
    return lambda: signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize(("code", "expected"), [("3", 3), ("300", 300 % 256), ("'no data'", 1), ("-9", 247)])
def test_a_failed_job_fails_where_sigchld_is_ignored(script, code, expected):
    body = f"""
    import subprocess
    child = subprocess.run(["sh", "-c", "exit 5"]).returncode
    sys.exit({code} if environment()["FLAGCX_RANK"] == "1" and child == 5 else 0)
    """
    with running("-n", "2", script(body), preexec_fn=ignoring(signal.SIGCHLD)) as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == expected
    assert f"rank 1 of 2 failed first: exit code {expected}" in err


def test_a_hang_up_that_is_ignored_stays_ignored(script):
    body = """
    tell(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
    sys.stdin.readline()
    tell("done")
    """
    with running(
        "-n", "1", script(body), stdin=subprocess.PIPE, preexec_fn=ignoring(signal.SIGHUP)
    ) as process:
        assert process.stdout.readline() == "True\n"
        process.send_signal(signal.SIGHUP)
        out, err = process.communicate("\n", timeout=30)
    assert (process.returncode, out, err) == (0, "done\n", "")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_hang_up_that_is_not_ignored_ends_all(script, number):
    with running("-n", "2", script("tell(os.getpid())\ntime.sleep(600)")) as process:
        pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        process.send_signal(number)
        assert process.wait(timeout=20) == 128 + number
        assert not any(map(is_alive, pids))


def test_sigusr1_and_2_go_to_the_ranks_and_not_to_what_they_started(script):
    body = """
    import subprocess
    child, got = subprocess.Popen(["sleep", "600"]), []
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: got.append(tell(signal.Signals(number).name)))
    tell("ready")
    while len(got) < 2:
        time.sleep(0.01)
    tell(child.poll())
    child.kill()
    """
    with running("-n", "2", "--no-prefix", script(body)) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(signal.SIGUSR1)
        assert [process.stdout.readline() for _ in range(2)] == ["SIGUSR1\n"] * 2
        process.send_signal(signal.SIGUSR2)
        out = process.stdout.read()  # not communicate(), which misses what readline() has read ahead
        assert (process.wait(timeout=20), sorted(out.split())) == (0, ["None"] * 2 + ["SIGUSR2"] * 2)


@pytest.mark.parametrize(
    ("options", "changes", "seconds", "saved"),
    [
        ((), {}, 2.5, True),
        (("--kill-after", "0.1"), {}, 4, False),
        ((), {"FLAGCX_KILL_AFTER_S": "0.1"}, 4, False),
        (("--kill-after", "20"), {"FLAGCX_KILL_AFTER_S": "0.1"}, 0.5, True),
    ],
)
def test_the_time_for_a_checkpoint_can_be_set(script, options, changes, seconds, saved):
    body = f"""
    def save(*_):
        time.sleep({seconds})
        tell("saved")
        sys.exit(3)

    signal.signal(signal.SIGTERM, save)
    tell("ready")
    time.sleep(600)
    """
    with running("-n", "1", *options, script(body), env=bare_environment(**changes)) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, "saved\n" if saved else "")


def test_endless_times_are_fine(script):
    body = "if environment()['FLAGCX_RANK'] == '0':\n    time.sleep(0.3)\nelse:\n    sys.exit(4)"
    done = flagcx_run("-n", "2", "--timeout", "inf", "--kill-after", "inf", script(body))
    assert done.returncode == 4


def test_a_time_out_that_is_none_is_refused(script):
    done = flagcx_run("-n", "1", "--timeout", "nan", script("tell('ran')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "--timeout" in done.stderr


@pytest.mark.parametrize("seconds", ["-1", "nan", "soon"])
def test_a_time_that_is_none_is_refused(script, seconds):
    done = flagcx_run("-n", "1", script("tell('ran')"), FLAGCX_KILL_AFTER_S=seconds)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(r"flagcx: (FLAGCX_KILL_AFTER_S|kill_after_s)", done.stderr)


def test_a_stopped_rank_is_told_to_end_too(script):
    body = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(tell("told")))
    tell("ready", os.getpid())
    time.sleep(600)
    """
    with running("-n", "1", script(body)) as process:
        pid = int(process.stdout.readline().split()[1])
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(pid))
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=8)
    assert out == "told\n"


def test_a_rank_that_is_stopped_when_the_others_are_done_holds_nobody_up(script):
    body = """
    if environment()["FLAGCX_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
        tell("goes on")
    """
    done = flagcx_run("-n", "2", "--kill-after", "0.1", script(body))
    assert (done.returncode, done.stdout) == (0, "[1] goes on\n")
    assert done.stderr == (
        "\nflagcx run: rank 1 was stopped by a signal, and all other ranks have ended; continued\n"
    )


def test_a_rank_that_stops_again_and_again_is_ended(script):
    body = """
    while environment()["FLAGCX_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    """
    done = flagcx_run("-n", "2", "--kill-after", "0.1", script(body))
    assert done.returncode == 143
    assert "rank 1 was stopped by a signal, and all other ranks have ended; ended\n" in done.stderr


@pytest.mark.exhaustive
def test_a_pause_by_ctrl_z_lets_no_time_out_pass(script):
    body = """
    import flagcx as fc, numpy as np

    comm = fc.init()
    pair = comm.split(comm.rank > 1)
    asked = comm._store.scoped("asked/", [1, 3]) if comm.rank % 2 else None
    x = np.ones(3)
    comm.barrier()
    before = now = time.monotonic()  # the pause may begin as soon as this rank has told that it is ready
    tell("ready", os.getpid())
    if comm.rank == 3:
        while now - before < 2:  # until there has been a pause
            before = now
            time.sleep(0.01)
            now = time.monotonic()
        comm.send(x, 0)
        asked.barrier("asked", 4)
    elif comm.rank == 1:
        asked.barrier("asked", 4)
    elif comm.rank == 0:
        comm.recv(x, 3)
    if comm.rank > 1:
        pair.allreduce(x)
    """
    with running("-n", "4", script(body), env=bare_environment(FLAGCX_TIMEOUT_S="4")) as process:
        pids = [int(process.stdout.readline().split()[2]) for _ in range(4)]
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: all(map(is_stopped, [process.pid, *pids])))
        time.sleep(4.5)  # longer than any of the ranks may wait
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


def test_ctrl_z_stops_all_and_fg_continues_all(script):
    ours, theirs = os.openpty()
    body = """
    store = start()
    tell("ready", os.getpid())
    if store.rank == 0:
        print("typed", input())
    store.barrier("typed", 60)
    """
    with running(
        "-n", "2", script(body), stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=as_a_shell_does
    ) as shell:
        os.close(theirs)
        found = read_until(ours, rb"(?s)ready \d+\r\n.*ready \d+\r\n")
        pids = [int(pid) for pid in re.findall(rb"ready (\d+)", found)]
        os.write(ours, b"\x1a")
        wait_until(lambda: all(map(is_stopped, pids)))
        launcher = int(state_and_parent(pids[1])[1])
        wait_until(lambda: is_stopped(launcher))
        os.kill(launcher, signal.SIGCONT)
        wait_until(lambda: not any(map(is_stopped, pids)))
        os.write(ours, b"words\n")
        found = read_until(ours, rb"typed words\r\n")
        assert b"typed words" in found
        assert shell.wait(timeout=20) == 0
    os.close(ours)


def as_a_shell_does():
    """For ``preexec_fn``: a session with a shell in it, without which Ctrl-Z has no effect."""
    lead_a_session()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(0, os.getpgrp())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        return
    os.closerange(3, 1024)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
