"""flagcx run: prefixes, exit codes, the first traceback last, Ctrl-C, and nothing left behind."""

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from flagcx._launch.job import check_size, job_environment
from flagcx._launch.share_gpu import DRIVER
from flagcx.cli import run_script as plain
from flagcx.cli.run_script import run_script
from flagcx.errors import LaunchError
from tests.bootstrap.processes import bare_environment, is_alive, is_listened_on, wait_until
from tests.cli.launching import flagcx_run, lead_a_session, read_until, running


def test_ranks_meet_and_their_lines_begin_with_their_rank(script):
    done = flagcx_run("-n", "3", script("store = start()\ntell(store.exchange('x', b'%d' % store.rank, 30))"))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] [b'0', b'1', b'2']" for rank in range(3)]


def test_the_scripts_own_arguments_are_its_own(script):
    path = script("print(sys.argv[1:], __name__, os.path.basename(sys.path[0]) != '')")
    done = flagcx_run("-n", "1", path, "-n", "3", "--timeout", "x", "--", "-m", "--help")
    assert done.stdout == "['-n', '3', '--timeout', 'x', '--', '-m', '--help'] __main__ True\n"


def test_a_module_is_run_by_its_name():
    done = flagcx_run("-n", "2", "-m", "platform", "--terse")
    assert done.returncode == 0
    assert re.fullmatch(r"(\[[01]\] Linux-.*\n){2}", done.stdout)


def test_without_prefix_lines_are_as_they_are(script):
    done = flagcx_run("-n", "2", "--no-prefix", script("print('hello')"))
    assert done.stdout == "hello\nhello\n"


def test_lines_are_never_mixed(script):
    body = """
    for _ in range(300):
        for piece in ("a" * 50, "b" * 50):
            os.write(1, piece.encode())
        os.write(1, b"\\n")
    """
    done = flagcx_run("-n", "3", script(body))
    assert len(done.stdout.splitlines()) == 900
    assert set(re.sub(r"\[\d\] ", "", done.stdout).splitlines()) == {"a" * 50 + "b" * 50}


def test_stdin_goes_to_rank_0_alone(script):
    done = flagcx_run("-n", "2", script("print(repr(sys.stdin.read()))"), stdin="typed")
    assert sorted(done.stdout.splitlines()) == ["[0] 'typed'", "[1] ''"]


def test_the_first_traceback_is_shown_last_and_its_exit_code_returned(script):
    body = """
    store = start()
    store.exchange("init", b"", 30)
    if store.rank == 1:
        try:
            {}["missing"]
        except KeyError:
            raise ValueError("the cause")
    store.barrier("never", 30)
    """
    start = time.monotonic()
    done = flagcx_run("-n", "3", script(body))
    assert time.monotonic() - start < 20
    assert done.returncode == 1
    before, heading, report = done.stderr.partition("\nflagcx run: rank 1 of 3 failed first: exit code 1\n")
    assert heading
    assert "[0] flagcx.errors.PeerDiedError: rank 1 died (it raised ValueError: the cause)" in before
    assert "[2] flagcx.errors.PeerDiedError: rank 1 died (it raised ValueError: the cause)" in before
    assert re.match(r"=+ Its traceback \(rank 1\) =+\nTraceback \(most recent call last\):\n", report)
    assert "KeyError: 'missing'" in report
    assert report.endswith("ValueError: the cause\n")
    assert "PeerDiedError" not in report


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by SIGSEGV"),
        ("sys.exit('no data')", 1, "exit code 1\n=+ The end of its error output .rank 0. =+\nno data\n"),
        ("sys.exit(0)", 0, None),
    ],
)
def test_exit_codes(script, body, code, words):
    done = flagcx_run("-n", "2", script(f"if environment()['FLAGCX_RANK'] == '0':\n    {body}"))
    assert done.returncode == code
    if words is not None:
        assert re.search(f"rank 0 of 2 failed first: {words}", done.stderr)


def test_an_exception_beside_a_thread_that_goes_on_is_what_ends_the_job(script):
    body = """
    import threading
    import flagcx as fc
    comm = fc.init()
    if comm.rank == 1:
        threading.Thread(target=time.sleep, args=(50,)).start()
        raise KeyError("mine")
    comm.barrier()
    """
    done = flagcx_run("-n", "2", script(body))
    assert done.returncode == 1
    assert re.search(r"rank 1 of 2 failed first: exit code 1.*KeyError: 'mine'", done.stderr, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True])
def test_a_thread_that_goes_on_after_an_exception_keeps_no_job(script, elastic):
    """Though the other ranks go on without the one that failed, or wait until it comes back."""
    body = """
    import threading
    import flagcx as fc
    comm = fc.init()
    comm.barrier()
    if comm.rank == 1 and "FLAGCX_RESTARTS" not in os.environ:
        threading.Thread(target=time.sleep, args=(50,)).start()
        raise KeyError("mine")
    try:
        comm.barrier()
    except CommunicationError:
        pass
    if "--elastic" in sys.argv:
        fc.init().barrier()
    """
    begun = time.monotonic()
    options = ("--elastic", "--max-restarts", "1") if elastic else ()
    done = flagcx_run(*options, "-n", "2", script(body), *options[:1])
    assert time.monotonic() - begun < 30
    if elastic:
        assert (done.returncode, "rank 1 is started again" in done.stderr) == (0, True), done
    else:
        assert done.returncode == 1
        assert re.search(r"rank 1 of 2 failed first: exit code 1.*KeyError: 'mine'", done.stderr, re.DOTALL)


def test_a_rank_killed_before_init_is_told_to_the_others(script):
    body = """
    if environment()["FLAGCX_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        start().exchange("init", b"", 60)
    except PeerDiedError as error:
        tell(error.peer, time.monotonic() - began < 2, error)
    """
    done = flagcx_run("-n", "3", script(body))
    assert done.returncode == 137
    lines = sorted(done.stdout.splitlines())
    for rank, text in zip((0, 2), lines, strict=True):
        assert text.startswith(f"[{rank}] 1 True rank 1 died (its process ended: killed by SIGKILL)")


def test_a_rank_that_never_inits_does_not_keep_the_others_waiting(script):
    done = flagcx_run(
        "-n", "2", script("if environment()['FLAGCX_RANK'] == '0':\n    start().barrier('b', 60)")
    )
    assert done.returncode == 1
    assert "CommunicationError: rank 1 has left the job" in done.stderr


@pytest.mark.slow
def test_ranks_that_go_on_after_a_failure_are_ended(script):
    body = """
    if environment()["FLAGCX_RANK"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell("deaf")
        time.sleep(600)
    sys.exit(5)
    """
    start = time.monotonic()
    done = flagcx_run("-n", "2", "--kill-after", "1", script(body))
    assert done.returncode == 5
    assert time.monotonic() - start < 20


def test_a_job_that_takes_too_long_is_ended(script):
    done = flagcx_run("-n", "2", "--timeout", "0.5", script("time.sleep(600)"))
    assert done.returncode == 124
    assert done.stderr == "\nflagcx run: ranks 0, 1 were ended: not done after 0.5 s (--timeout)\n"
    body = "time.sleep(600 if environment()['FLAGCX_RANK'] == '1' else 0)"
    done = flagcx_run("-n", "2", "--timeout", "4", script(body))  # in which rank 0 starts and ends
    assert done.stderr == "\nflagcx run: rank 1 was ended: not done after 4 s (--timeout)\n"


SLEEPERS = """
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
try:
    tell(os.getpid(), child.pid, environment()["FLAGCX_STORE_ADDRESS"])
    time.sleep(600)
finally:
    tell("cleared up")
"""


def sleepers(process):
    words = [process.stdout.readline().split() for _ in range(2)]
    return [int(word) for line in words for word in line[1:3]], words[0][3]


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "\nflagcx run: interrupted; all ranks have ended\n"), (signal.SIGTERM, 143, "")],
)
def test_a_signal_ends_all_without_noise(script, number, code, words):
    with running("-n", "2", script("import subprocess\n" + SLEEPERS)) as process:
        processes, address = sleepers(process)
        assert all(map(is_alive, processes))
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        assert process.returncode == code
        assert err == words
        if number == signal.SIGINT:
            assert sorted(out.splitlines()) == ["[0] cleared up", "[1] cleared up"]
        assert not any(map(is_alive, processes))
        assert not is_listened_on(address)


def test_a_second_ctrl_c_does_not_wait_for_the_deaf(script):
    body = """
    signal.signal(signal.SIGINT, lambda *_: os.write(1, b"deaf\\n"))
    os.write(1, b"ready\\n")
    while True:
        signal.pause()
    """
    with running("-n", "1", script(body)) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "deaf\n"
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 130
        assert time.monotonic() - start < 8, "it waited for --kill-after"


def test_kill_9_of_the_launcher_ends_all_ranks_and_what_they_started(script):
    with running("-n", "2", script("import subprocess\n" + SLEEPERS)) as process:
        processes, address = sleepers(process)
        assert all(map(is_alive, processes))
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(is_alive, processes)), timeout_s=5)
        assert not is_listened_on(address)


def test_what_a_rank_left_behind_is_ended_with_the_job(script):
    body = "import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid)"
    done = flagcx_run("-n", "1", script(body))
    assert done.returncode == 0
    assert not is_alive(int(done.stdout))


def test_a_script_that_is_not_there_is_named():
    done = flagcx_run("-n", "2", "missing.py")
    assert done.returncode == 2
    assert done.stderr == "flagcx: there is no script 'missing.py'; to run a module, put -m before its name\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-np", "2", "script.py"), "flagcx run takes -n, not -np"),
        (("-n", "two", "script.py"), "'two' is not a number of ranks"),
        (("-n", "-1", "script.py"), "'-1' is not a number of ranks"),
        (("-n", "2.5", "script.py"), "'2.5' is not a number of ranks"),
    ],
)
def test_what_is_no_number_of_ranks_is_refused(arguments, said):
    done = flagcx_run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in re.sub(r"[\s│]+", " ", done.stderr)


def test_far_more_ranks_than_cores_are_refused_before_any_is_started(script):
    done = flagcx_run("-n", "100000", script("tell('started')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(r"flagcx: 100000 ranks are too many for \d+ cores", done.stderr)


@pytest.mark.parametrize(("a_core", "words"), [(1, False), (16, False), (17, True), (64, True)])
def test_many_more_ranks_than_cores_are_told(a_core, words):
    cores = len(os.sched_getaffinity(0))
    told = f"{a_core * cores} ranks share {cores} cores: they start slowly, and wait for each other's turns"
    assert check_size(a_core * cores) == (told if words else "")


def test_another_launcher_that_starts_flagcx_run_several_times_is_told_to_start_the_script(script):
    environ = {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
    }
    done = flagcx_run("-n", "2", script("tell('started')"), **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "flagcx: openmpi started this as rank 1 of 2; each flagcx run would be a job"
    )


@pytest.mark.parametrize("name", ["python", "python3", "python3.99", sys.executable])
def test_an_interpreter_in_place_of_the_script_is_to_be_left_out(name):
    done = flagcx_run("-n", "2", name, "script.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"flagcx: {name!r} is a Python interpreter, which flagcx run starts itself; leave it out: "
        f"flagcx run -n 2 script.py\n"
    )


def test_a_script_may_be_called_python(script, tmp_path):
    os.rename(script("print('ours')"), tmp_path / "python")
    assert flagcx_run("-n", "1", str(tmp_path / "python")).stdout == "ours\n"


@pytest.mark.skipif(os.path.exists(DRIVER), reason="there is a GPU to share")
def test_sharing_a_gpu_that_is_not_there_is_told_once(script):
    done = flagcx_run("-n", "2", "--share-gpu", script("print('done')"))
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["[0]", "[1]", "done", "done"])
    assert done.stderr == (
        "there is no NVIDIA GPU here to share (no /dev/nvidiactl): the ranks have NumPy arrays only\n"
    )


def test_an_unknown_option_is_not_taken_for_the_script():
    done = flagcx_run("--bogus", "script.py")
    assert done.returncode == 2
    assert "No such option" in done.stderr


@pytest.mark.parametrize(
    ("environ", "size", "expected"),
    [
        ({}, 1, None),
        ({}, 10_000, "1"),
        ({"OMP_NUM_THREADS": "3"}, 10_000, "3"),
        ({"MKL_NUM_THREADS": ""}, 9, ""),
    ],
)
def test_ranks_share_the_cores_unless_the_user_says_otherwise(environ, size, expected):
    values = job_environment(environ, size)
    for name in environ or ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        assert values.get(name) == expected


def test_the_key_is_on_no_command_line(script):
    body = """
    key = environment()["FLAGCX_STORE_KEY"]
    for pid in (os.getpid(), os.getppid()):
        tell(key in open(f"/proc/{pid}/cmdline").read())
    """
    done = flagcx_run("-n", "2", script(body))
    assert re.sub(r"\[\d\] ", "", done.stdout) == "False\n" * 4


def test_on_a_terminal_rank_0_has_one_too_and_its_bar_stays_whole(script):
    body = """
    store = start()
    if store.rank == 0:
        tell(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns, input())
        sys.stderr.write("\\r10%")
        input()
        store.barrier("drawn", 30)
        input()
        sys.stderr.write("\\r20%\\n")
    else:
        store.barrier("drawn", 30)
        tell("hello", sys.stdout.isatty())
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 77, 0, 0))

    with running(
        "-n", "2", script(body), stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=lead_a_session
    ) as process:
        os.write(ours, b"typed\n")
        os.close(theirs)
        found = read_until(ours, rb"10%")
        os.write(ours, b"drawn\n")
        found += read_until(ours, rb"hello False\r\n(.|\r)+")
        os.write(ours, b"said\n")
        found += read_until(ours, rb"20%\r\n")
        assert process.wait(timeout=20) == 0
    os.close(ours)
    assert b"True True 77 typed\r\n" in found
    assert b"\r\x1b[K[1] hello False\r\n10%" in found
    assert b"[0]" not in found


def test_ctrl_c_on_a_terminal_ends_all(script):
    ours, theirs = os.openpty()

    body = "tell('ready', os.getpid())\ntime.sleep(600)"
    with running(
        "-n", "2", script(body), stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=lead_a_session
    ) as process:
        os.close(theirs)
        found = read_until(ours, rb"(?s)ready \d+\r\n.*ready \d+\r\n")
        os.write(ours, b"\x03")
        found += read_until(ours, rb"all ranks have ended\r\n")
        assert process.wait(timeout=20) == 130
    os.close(ours)
    assert b"Traceback" not in found
    assert not any(is_alive(int(pid)) for pid in re.findall(rb"ready (\d+)", found))


@pytest.mark.slow
def test_starts_and_ends_in_a_row_leave_nothing(script, tmp_path, capfd, monkeypatch):
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    for name, value in bare_environment(XDG_RUNTIME_DIR=str(runtime), TMPDIR=str(runtime)).items():
        monkeypatch.setenv(name, value)
    body = """
    store = start()
    store.exchange("init", b"", 30)
    print(os.getpid(), environment()["FLAGCX_STORE_ADDRESS"])
    """
    path, before = script(body), set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert run_script(path, [], ranks=2) == 0
        out, err = capfd.readouterr()
        assert (len(out.splitlines()), err) == (2, "")
        for line in out.splitlines():
            _, pid, address = line.split()
            assert not is_alive(int(pid))
            assert not is_listened_on(address)
    assert list(runtime.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_takes_a_peers_failure_as_its_own_end_is_not_blamed(script):
    body = """
    import flagcx as fc, numpy as np
    comm = fc.init()
    comm.barrier()
    half = comm.split(comm.rank % 2 == 0)
    if comm.rank == 1:
        import atexit
        atexit._clear()  # the process ends long after its rank has left
        comm.close()
        time.sleep(1)
        os._exit(6)
    try:
        comm.allreduce(np.ones(3))
    except fc.FlagcxError:
        sys.exit(9)
    """
    done = flagcx_run("-n", "3", script(body))
    assert done.returncode == 6
    assert "rank 1 of 3 failed first: exit code 6" in done.stderr


def test_a_program_may_be_given_as_text_or_on_stdin():
    code = "import sys, flagcx as fc; comm = fc.init(); print(comm.size, sys.argv)"
    done = flagcx_run("-n", "2", "-c", code, "x", "-n")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] 2 ['-c', 'x', '-n']" for rank in range(2)]
    done = flagcx_run("-n", "2", "-", "y", stdin=code + "\n1 / comm.rank\n")
    assert "[0] 2 ['-c', 'y']" in done.stdout.splitlines()
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": True, "code": True}, "-m and -c exclude each other"),
        ({"script": "#" * (128 << 10), "code": True}, "131,072 bytes is too long .* save it to a file"),
    ],
)
def test_programs_that_cannot_be_run(options, message):
    with pytest.raises(LaunchError, match=message):
        run_script(**{"script": "x", "arguments": [], "ranks": 1, **options})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "-n", "3", "train.py", "-n", "8", "-m"], ("train.py", ["-n", "8", "-m"], 3, False)),
        (["run", "-m", "package.train", "--help"], ("package.train", ["--help"], 0, True)),
        (["run", "-m", "-n", "2", "package.train"], ("package.train", [], 2, True)),
        (["run", "train.py"], ("train.py", [], 0, False)),
        (["run", "-n", "two", "train.py"], None),
        (["run", "-n", "2", "-n", "3", "train.py"], None),
        (["run", "--timeout", "3", "train.py"], None),
        (["run", "-n", "2"], None),
        (["run", "--", "train.py"], None),
        (["status"], None),
        ([], None),
    ],
)
def test_the_usual_form_of_run_is_read_without_typer(monkeypatch, arguments, expected):
    seen = []
    monkeypatch.setattr(plain, "run_script", lambda *given: seen.append(given) or 7)
    assert plain.run_plainly(arguments) == (None if expected is None else 7)
    assert seen == ([] if expected is None else [expected])


def test_the_usual_form_of_run_imports_no_typer(tmp_path):
    script = tmp_path / "nothing.py"
    script.write_text("")
    code = (
        "import sys\nfrom flagcx.cli import main\n"
        f"sys.argv = ['flagcx', 'run', '-n', '1', {str(script)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, 'typer' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.split() == ["0", "False"], found.stderr
