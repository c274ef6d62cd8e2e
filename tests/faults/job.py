"""Runs jobs of the fault suite side by side, and sees how each of their ranks ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.hosts import address_of, hosts, inside, mpirun_line, places
from flagcx._launch.share_gpu import shared_gpu
from tests.bootstrap.processes import REPOSITORY, bare_environment, is_alive, mpirun_environment
from tests.communicator.jobs import shared_memory_files
from tests.faults.plan import Plan
from tests.faults.verdict import Verdict, judge
from tests.hosts import KEY
from tests.mpi import MPIRUN

_MARK = "FLAGCX_FAULTS_JOB"
_FIRST_PORT = 29500
_STUCK = 75
"""What a rank ends with whose thread NCCL does not give back."""
_START_S, _END_S = 300.0, 15.0
"""How long ranks may take to start, and what is left of a job to end after its ranks have ended."""


class Runner:
    """What jobs are started with. A context manager.

    Args:
        hosts: The names of two test hosts, or None.
    """

    def __init__(self, hosts: tuple[str, ...] | None) -> None:
        self.hosts = hosts
        self._starter = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.start"],
            stdin=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=bare_environment(OMP_NUM_THREADS="1", FLAGCX_TUNING="0"),
        )

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._starter.stdin is not None
        self._starter.stdin.close()
        self._starter.wait(30)

    def start(self, plan: Plan, directory: Path, stack: contextlib.ExitStack) -> list[subprocess.Popen]:
        """Starts a job, and returns its mpirun, or its ranks; nothing where it has neither.

        Args:
            plan: The job.
            directory: For its logs.
            stack: Ends with the job.
        """
        program = [sys.executable, "-m", "tests.faults.rank", json.dumps(plan), str(directory)]
        if plan.on_gpu:
            return self._start_on_gpu(plan, program, directory, stack)
        if "UCX" in plan.transport:
            return self._start_for_ucx(plan, program, directory)
        if "MPI" not in plan.transport:
            assert self._starter.stdin is not None
            self._starter.stdin.write(json.dumps([json.dumps(plan), str(directory)]) + "\n")
            self._starter.stdin.flush()
            return []
        options = ("--with-ft", "ulfm", "-x", _MARK, "-x", "FLAGCX_TRANSPORT", "-x", "FLAGCX_RECORD")
        # Open MPI leaves the segments of ranks that are killed.
        options += ("--mca", "btl_sm_backing_directory", str(directory))
        if self.hosts is not None and plan.on_hosts:
            command = mpirun_line(self.hosts, [plan.size // 2] * 2, program, directory, options)
        else:
            line = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", *options]
            command = [*line, "-n", str(plan.size), *program]
        more = {_MARK: str(directory), "FLAGCX_TRANSPORT": "mpi", "FLAGCX_RECORD": "0"}
        environ = bare_environment(TMPDIR=str(directory), FLAGCX_TUNING="0", OMP_NUM_THREADS="1", **more)
        return [_started(command, environ, directory / "output")]

    def _start_on_gpu(
        self, plan: Plan, program: list[str], directory: Path, stack: contextlib.ExitStack
    ) -> list[subprocess.Popen]:
        """Starts ranks that share a GPU: in turns, or by an MPS daemon of their own, which a kill may end."""
        more = {"FLAGCX_SHARE_GPU": "1", _MARK: str(directory), "FLAGCX_RECORD": "0", "FLAGCX_TUNING": "0"}
        more["FLAGCX_PEER_MEMORY"] = str(plan.seed // 2 % 2)
        if plan.transport == "GPU, MPS":
            more |= stack.enter_context(shared_gpu(bare_environment(**{_MARK: str(directory)})))
        return [
            _started(
                program,
                mpirun_environment(rank, plan.size, f"job{plan.seed}", directory, **more),
                directory / f"output{rank}",
            )
            for rank in range(plan.size)
        ]

    def _start_for_ucx(self, plan: Plan, program: list[str], directory: Path) -> list[subprocess.Popen]:
        """Starts ranks on the hosts with torchrun's variables, and keeps memory that hosts share from UCX."""
        assert self.hosts is not None
        local_size = plan.size // len(self.hosts)
        more = {_MARK: str(directory), "FLAGCX_RECORD": "0", "FLAGCX_STORE_KEY": KEY, "UCX_TLS": "tcp,self"}
        more |= {"MASTER_ADDR": address_of(0), "MASTER_PORT": str(_FIRST_PORT + plan.seed % 1000)}
        more |= {"WORLD_SIZE": str(plan.size), "LOCAL_WORLD_SIZE": str(local_size), "OMP_NUM_THREADS": "1"}
        environ = bare_environment(TMPDIR=str(directory), **more)
        return [
            _started(
                inside(self.hosts[host], program),
                {**environ, "RANK": str(rank), "LOCAL_RANK": str(place)},
                directory / f"output{rank}",
            )
            for rank, (host, place) in enumerate(places([local_size] * len(self.hosts)))
        ]

    def mend_link(self) -> None:
        """Joins the hosts again."""
        for host in self.hosts or ():
            subprocess.run(["ip", "-n", host, "link", "set", f"{host}v", "up"], check=True)


def _started(command: list[str], environ: dict[str, str], output: Path) -> subprocess.Popen:
    with open(output, "wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=REPOSITORY,
            env=environ,
            start_new_session=True,
        )


class Job:
    """A job that runs. ``step`` has to be called again and again until it gives the verdict."""

    def __init__(self, runner: Runner, plan: Plan) -> None:
        self.plan, self._runner = plan, runner
        self.directory = Path(tempfile.mkdtemp(prefix="ff"))
        self._before = shared_memory_files()
        self._begun, self._ended_at, self._late = time.monotonic(), 0.0, set[int]()
        self._given_up_at = self._begun + _START_S
        self._stack = contextlib.ExitStack()
        self._started = runner.start(plan, self.directory, self._stack)

    def step(self) -> Verdict | None:
        """Looks at the job; its verdict, once it has ended."""
        now = time.monotonic()
        if not self._ended_at:
            waits = [rank for rank in range(self.plan.size) if not self._has_ended(rank)]
            if len(waits) == self.plan.size and now < self._given_up_at and not self._all_started():
                self._begun = now  # on a busy machine interpreters take long to start
            if waits and now < self._begun + self.plan.bound_s:
                return None
            self._late, self._ended_at = set(waits), now
            if self.plan.fault == "cut link":
                self._runner.mend_link()
            self._end_victim()
            if waits:
                self._end(self._processes())
            self._stack.close()
        left = self._processes()
        if left and now < self._ended_at + _END_S:
            return None
        leaks = [f"process {pid}: {_command(pid)}" for pid in left]
        self._end(left)
        for process in self._started:
            process.wait(10)
        if self.plan.fault == "cut link":
            self._runner.mend_link()  # the victim's child may have cut it after all ranks had ended
        leaks += [f"/dev/shm/{name}" for name in self._left_in_shared_memory()]
        verdict = judge(self.plan, self._events(), self._late, leaks)
        if not verdict.good or verdict.unclear or verdict.tardy:
            return replace(verdict, logs=str(self.directory))
        shutil.rmtree(self.directory)
        return verdict

    def end(self) -> None:
        """Ends the job, whatever it does, and forgets it."""
        self._end(self._processes())
        self._stack.close()
        shutil.rmtree(self.directory)

    def _has_ended(self, rank: int) -> bool:
        events = self._read(f"rank{rank}")
        stopped = rank == self.plan.victim and self.plan.fault == "stop"
        if stopped and any(event["event"] == "fault" for event in events):
            return True  # it lies still until it is killed
        if not events:
            launcher = self._read("launcher")
            gone = bool(launcher) and not is_alive(launcher[0]["pid"])
            own = self._started[rank:] if len(self._started) == self.plan.size else self._started
            return gone or any(process.poll() is not None for process in own[:1])
        stays = self.plan.transport == "threads" or "MPI" in self.plan.transport
        if stays and any(event["event"] in ("end", "raised") for event in events):
            return True  # a thread; or in MPI_Finalize, which is collective and waits for a stopped rank
        return not is_alive(events[0]["pid"])

    def _all_started(self) -> bool:
        return all(self._read(f"rank{rank}") for rank in range(self.plan.size))

    def _read(self, name: str) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.directory / name).read_text().splitlines()]
        return []

    def _events(self) -> dict[str, list[dict[str, Any]]]:
        names = ["launcher", *(f"rank{rank}" for rank in range(self.plan.size))]
        events = {name: self._read(name) for name in names}
        for rank, process in enumerate(self._started if self.plan.on_gpu else ()):
            if process.poll() == _STUCK:  # the rank has said why
                said = (self.directory / f"output{rank}").read_text(errors="replace")[-600:]
                last = {
                    "event": "error",
                    "kind": "exit",
                    "peer": None,
                    "text": said,
                    "time": time.monotonic(),
                }
                events[f"rank{rank}"] += [last, {**last, "event": "raised"}]
        return events

    def _end_victim(self) -> None:
        events = self._read(f"rank{self.plan.victim}")
        if events and self.plan.transport != "threads" and self.plan.fault == "stop":
            self._end([events[0]["pid"]])

    def _processes(self) -> list[int]:
        """All processes of the job that live: of its session, or with its mark."""
        leader = self._read("launcher")
        session = leader[0]["pid"] if leader else self._started[0].pid if self._started else -1
        mark = f"{_MARK}={self.directory}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and is_alive(int(folder.name)):
                with contextlib.suppress(OSError):
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) == session or mark in (folder / "environ").read_bytes():
                        found.append(int(folder.name))
        return found

    def _end(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left_in_shared_memory(self) -> set[str]:
        left = shared_memory_files() - self._before
        if left:  # names live for microseconds in jobs of others
            time.sleep(0.5)
        return left & shared_memory_files()


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    return "?"


def run(plans: Sequence[Plan], most: int, until: float = float("inf")) -> Iterator[Verdict]:
    """Runs jobs, some at once, and yields their verdicts as they come.

    Args:
        plans: The jobs.
        most: How many run at once; of those between hosts, whose link may be cut, one. (Those whose fault is
            "two jobs" have another beside them in any case.)
        until: A time of ``time.monotonic`` after which none begins.
    """
    between = any(plan.on_hosts for plan in plans)
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(hosts(2, "10gbit")) if between else None
        _retry_soon(names or ())
        runner = stack.enter_context(Runner(names))
        waiting, running = list(plans), list[Job]()
        stack.callback(lambda: [job.end() for job in running])
        while waiting or running:
            if time.monotonic() > until:
                waiting.clear()
            while len(running) < most and (plan := _next(waiting, running)) is not None:
                running.append(Job(runner, plan))
                if plan.fault == "two jobs":
                    running.append(Job(runner, plan._replace(seed=plan.seed + 10**6)))
            time.sleep(0.03)
            for job in list(running):
                verdict = job.step()
                if verdict is not None:
                    running.remove(job)
                    yield verdict


def _retry_soon(names: Sequence[str]) -> None:
    """Has TCP between hosts send again within a second once their link is mended, and not give up before.

    Its pauses double, so that after a cut mpirun would hear of the ranks' ends only when as much time has
    passed again. Kernels before 6.15 cannot be told.
    """
    for name in names:
        for setting, value in (("tcp_retries2", 200), ("tcp_rto_max_ms", 1000)):
            write = f"echo {value} > /proc/sys/net/ipv4/{setting}"
            subprocess.run(inside(name, ["sh", "-c", write]), stderr=subprocess.DEVNULL)


def _next(waiting: list[Plan], running: list[Job]) -> Plan | None:
    """Takes the next job that may begin, if there is one."""
    taken = any(job.plan.on_hosts for job in running)
    for number, plan in enumerate(waiting):
        if not (taken and plan.on_hosts):
            return waiting.pop(number)
    return None
