"""Call queues: the order of tasks on the host's thread, and on streams that only log their calls."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch==2.13.0)")

import torch

import flagcx as fc
from flagcx.interop import call_queue, work
from flagcx.interop.call_queue import DeviceQueue, HostQueue
from flagcx.interop.work import CallWork, CoalescedWork


@pytest.fixture
def host():
    queue = HostQueue(comm=None)  # type: ignore[arg-type]
    yield queue
    queue.close()


def test_calls_run_in_the_order_in_which_they_were_made(host):
    order: list[int] = []
    gate = threading.Event()
    first = host.run(lambda: (gate.wait(5), order.append(0)), (), False)
    second = host.run(lambda: order.append(1), (), False)
    assert not first.is_completed() and not second.is_completed()
    threading.Timer(0.05, gate.set).start()
    host.run(lambda: order.append(2), (), True)
    assert order == [0, 1, 2]
    assert first.is_completed() and second.is_success()


def test_a_call_that_is_waited_for_runs_on_the_callers_thread(host):
    names: list[str] = []
    host.run(lambda: names.append(threading.current_thread().name), (), True)
    host.run(lambda: names.append(threading.current_thread().name), (), False).wait()
    assert names[0] == threading.current_thread().name and names[1].startswith("flagcx-torch")


def test_waiting_has_a_limit_and_may_be_done_again(host):
    gate = threading.Event()
    work = host.run(lambda: gate.wait(5), (), False)
    with pytest.raises(fc.PeerTimeoutError, match=r"still runs after 0\.01 s; wait again"):
        work.wait(timedelta(seconds=0.01))
    gate.set()
    assert work.wait(timedelta(0))


def test_an_error_belongs_to_its_work_alone(host):
    def fails() -> None:
        raise fc.CommunicatorError("closed")

    work = host.run(fails, (), False)
    host.run(lambda: None, (), True)
    with pytest.raises(fc.CommunicatorError, match="closed"):
        work.wait()
    assert isinstance(work.exception(), fc.CommunicatorError) and not work.is_success()
    with pytest.raises(fc.CommunicatorError, match="closed"):
        host.run(fails, (), True)


def test_futures_that_call_back_do_not_hold_the_thread_up(host):
    x = torch.ones(2)

    def again(done: Any) -> Any:
        host.run(lambda: x.add_(1), [x], True)
        return host.run(lambda: x.add_(1), [x], False).get_future().wait()

    futures = [host.run(lambda: x.add_(1), [x], False).get_future().then(again) for _ in range(20)]
    torch.futures.wait_all(futures)
    assert x.tolist() == [61.0, 61.0]


def test_scratch_is_used_again_and_grows(host):
    small = host.scratch("joined", torch.zeros(1), 10)
    assert small.shape == (10,) and small.dtype == torch.float32 and small.device.type == "cpu"
    same = host.scratch("joined", torch.zeros(1, dtype=torch.int16), 20)
    assert same.data_ptr() == small.data_ptr()
    assert host.scratch("spread", torch.zeros(1), 10).data_ptr() != small.data_ptr()
    assert host.scratch("joined", torch.zeros(1), 11).numel() == 11


def test_several_works_are_one():
    assert CoalescedWork([CallWork([1]), CallWork([2])]).result() == [[1], [2]]
    assert CoalescedWork([]).wait() and CoalescedWork([CallWork([1])]).is_completed()


# -- streams ------------------------------------------------------------------------------------------


class Stream:
    """Writes down what is asked of it."""

    def __init__(self, log: list, name: str, pointer: int) -> None:
        self.log, self.name, self.cuda_stream, self.device = log, name, pointer, "cuda:0"

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Tensor:
    """Writes down which streams use it."""

    def __init__(self, log: list) -> None:
        self.log = log

    def record_stream(self, stream: Stream) -> None:
        self.log.append(f"kept for {stream.name}")


@pytest.fixture
def device(monkeypatch):
    """A queue over streams that keep a log, with the means to change the current stream and to capture."""
    log: list[str] = []
    made = SimpleNamespace(log=log, captures=False, current=Stream(log, "current", 7))

    @contextlib.contextmanager
    def use(stream: Stream):
        before, made.current = made.current, stream
        yield
        made.current = before

    @contextlib.contextmanager
    def mode(kind: int):
        log.append("relaxed" if kind == call_queue.RELAXED else "?")
        yield

    cuda = torch.cuda
    monkeypatch.setattr(cuda, "Stream", lambda device: Stream(log, "side", 8))
    monkeypatch.setattr(cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: made.captures)
    monkeypatch.setattr(cuda, "stream", use)
    monkeypatch.setattr(cuda, "set_stream", partial(setattr, made, "current"))
    monkeypatch.setattr(call_queue, "capture_mode", mode)
    monkeypatch.setattr(call_queue, "_raw_stream", lambda device: made.current.cuda_stream)
    runtime = SimpleNamespace(getDevice=lambda: 0)

    class External:
        def __init__(self, pointer: int, number: int) -> None:
            self.pointer = pointer

        def __enter__(self) -> None:
            log.append(f"CuPy on {self.pointer}")

        def __exit__(self, *_: object) -> None:
            pass

        def wait_event(self, event: Event) -> None:
            log.append(f"{self.pointer} waits for {event.at}")

    class Event:
        done = False

        def __init__(self, disable_timing: bool) -> None:
            assert disable_timing

        def record(self, stream: External) -> None:
            self.at = stream.pointer
            log.append(f"event on {self.at}")

    streams = SimpleNamespace(null=External(0, 0))
    names = {"runtime": runtime, "ExternalStream": External, "Stream": streams, "Event": Event}
    cupy = SimpleNamespace(cuda=SimpleNamespace(**names))
    made.queue = DeviceQueue(comm=None, cupy=cupy, device=0)  # type: ignore[arg-type]
    return made


def test_a_call_that_is_waited_for_goes_onto_the_current_stream(device):
    work = device.queue.run(lambda: device.log.append("call"), [Tensor(device.log)], True)
    work.wait()
    assert device.log == ["CuPy on 7", "call"], "what follows on that stream is behind it anyway"
    assert work.is_completed()


def test_an_asynchronous_call_has_a_stream_of_its_own(device):
    def task() -> None:
        device.log.append(f"call on {device.current.name}")

    work = device.queue.run(task, [Tensor(device.log)], False)
    assert device.log == [
        "event on 7",
        "8 waits for 7",
        "CuPy on 8",
        "call on side",
        "kept for side",
        "event on 8",
    ]
    assert device.current.name == "current"
    assert not work.is_completed()
    work.wait()
    assert device.log[6:] == ["7 waits for 8"]


def test_a_capture_gets_everything_on_its_stream(device):
    device.captures = True
    for waits in (False, True):
        device.log.clear()
        work = device.queue.run(lambda: device.log.append("call"), [Tensor(device.log)], waits)
        work.wait()
        assert device.log == ["relaxed", "CuPy on 7", "call"]


def test_a_future_is_set_on_the_stream_of_its_call(device, monkeypatch):
    class Future:
        def __init__(self, devices: list) -> None:
            self.devices = devices

        def set_result(self, value: Any) -> None:
            self.value, self.stream = value, device.current.name

    monkeypatch.setattr(work.torch.futures, "Future", Future)
    future = device.queue.run(lambda: None, [Tensor(device.log)], False, "value").get_future()
    assert (future.stream, future.value, future.devices) == ("side", "value", ["cuda:0"])
