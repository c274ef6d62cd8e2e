"""One communicator over a fake of CuPy's binding: groups that fail, calls that hang, codes it lacks."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from flagcx.errors import CommunicationError, MissingDependencyError, PeerTimeoutError
from flagcx.transport.nccl import binding
from flagcx.transport.nccl.binding import NcclCommunicator, bounded, load_nccl, make_unique_id, message_of

RIGHT = (True, 0, 0, 64, 1)


class FakeNccl(ModuleType):
    """Does with groups what NCCL does: a refused operation drops its group."""

    available = True

    def __init__(self) -> None:
        super().__init__("cupy.cuda.nccl")
        self.launched: list[list] = []
        self.group: list | None = None
        self.spoilt = False
        self.hang = threading.Event()
        self.NcclCommunicator = lambda size, unique_id, rank: FakeComm(self, size, unique_id)

    def get_unique_id(self):
        return tuple(range(-64, 64))

    def groupStart(self):
        self.group, self.spoilt = [], False

    def groupEnd(self):
        if self.group is None:
            raise RuntimeError("NCCL_ERROR_INVALID_USAGE")
        group, self.group = self.group, None
        if self.spoilt:
            raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT")
        self.launched.append(group)


class FakeComm:
    def __init__(self, library: FakeNccl, size: int, unique_id) -> None:
        self.library, self.size, self.unique_id = library, size, unique_id

    def send(self, at, nbytes, kind, peer, stream):
        if peer >= self.size:
            self.library.spoilt = True
            raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT")
        self.library.group.append(("send", at, nbytes, peer))

    def recv(self, at, nbytes, kind, peer, stream):
        self.library.group.append(("recv", at, nbytes, peer))


@pytest.fixture
def library(monkeypatch) -> FakeNccl:
    fake = FakeNccl()
    monkeypatch.setattr(binding, "load_nccl", lambda cupy: fake)
    return fake


def cupy(version="14.2.0"):
    runtime = SimpleNamespace(getDevice=lambda: 0, setDevice=lambda d: None, runtimeGetVersion=lambda: 12080)
    return SimpleNamespace(__version__=version, cuda=SimpleNamespace(runtime=runtime))


@pytest.fixture
def communicator(library) -> NcclCommunicator:
    return NcclCommunicator(cupy(), 0, 2, make_unique_id(cupy()), 5.0)


def test_a_group_is_enqueued_whole(library, communicator):
    communicator.group([RIGHT, (False, 1, 8, 16, 1)], (1000, 2000, 0, 0), 7)
    assert library.launched == [[("send", 1000, 64, 1), ("recv", 2008, 16, 1)]]


def test_a_group_in_which_an_operation_is_refused_is_dropped_and_closed(library, communicator):
    with pytest.raises(RuntimeError, match="INVALID_ARGUMENT"):
        communicator.group([RIGHT, (True, 0, 0, 64, 5)], (1000, 2000, 0, 0), 7)
    assert library.launched == []
    assert library.group is None


def test_an_interrupt_between_two_operations_drops_the_group_too(library, communicator):
    def moves():
        yield RIGHT
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        communicator.group(moves(), (1000, 2000, 0, 0), 7)
    assert library.launched == []
    assert library.group is None


@pytest.mark.parametrize(("version", "kind"), [("13.6.0", tuple), ("14.2.0", bytes)])
def test_the_unique_id_travels_as_bytes_and_arrives_as_the_binding_wants_it(library, version, kind):
    made = NcclCommunicator(cupy(version), 0, 2, make_unique_id(cupy(version)), 5.0)
    assert isinstance(made._comm.unique_id, kind)
    assert [v & 255 for v in made._comm.unique_id] == [v & 255 for v in range(-64, 64)]


def test_a_call_that_hangs_is_given_up():
    with pytest.raises(PeerTimeoutError, match=r"NCCL did not connect within 0.05 s; .*NCCL_DEBUG=WARN"):
        bounded(lambda: threading.Event().wait(5.0), 0.05, "NCCL did not connect")


def test_a_call_that_fails_says_why():
    def fail():
        raise KeyError(7)

    with pytest.raises(CommunicationError, match="NCCL did not connect: NCCL's result code 7"):
        bounded(fail, 5.0, "NCCL did not connect")


def test_errors_of_the_binding_in_words():
    assert message_of(KeyError(8)) == "NCCL's result code 8"
    assert message_of(RuntimeError("NCCL_ERROR_SYSTEM_ERROR: x")) == "NCCL_ERROR_SYSTEM_ERROR: x"


def test_no_nccl_gives_the_command_for_cupys_cuda(monkeypatch):
    missing = SimpleNamespace(available=False)
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=missing))
    with pytest.raises(MissingDependencyError, match="pip install nvidia-nccl-cu12"):
        load_nccl(cupy())
