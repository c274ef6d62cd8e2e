"""Waits for what never comes: soon a warning says who waits for whom, and at the time-out the error does."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

import flagcx as fc
from flagcx.errors import CommunicationError, MismatchError
from tests.ranks import run_ranks

WAIT_S, LIMIT_S = 0.4, 1.5


def _told(case: str) -> tuple[list[str], str, int | None]:
    """What this rank is warned of, and the error that ends its wait with the rank at fault."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flagcx")
    logger.addHandler(handler)
    comm = fc.init(timeout_s=LIMIT_S, explain_wait_s=WAIT_S)
    first, second = comm.split(0), comm.split(None if comm.rank == 0 else 7)
    error: CommunicationError | None = None
    try:
        _wait(case, comm, first, second)
    except CommunicationError as caught:
        error = caught
    finally:
        logger.removeHandler(handler)
    time.sleep(0.3)  # what this rank has left is not what ends the others' waits
    return warned, "" if error is None else f"{type(error).__name__}: {error}", error and error.peer


def _waits_for_itself() -> tuple[list[str], str]:
    """What a rank is warned of that receives from itself, and the error."""
    comm = fc.init(timeout_s=0.5, explain_wait_s=0.1)
    with pytest.MonkeyPatch.context() as patch:
        warned: list[str] = []
        patch.setattr(
            logging.getLogger("flagcx"), "warning", lambda text, *given: warned.append(text % given)
        )
        with pytest.raises(fc.PeerTimeoutError) as caught:
            comm.recv(np.ones(4), comm.rank)
    assert caught.value.peer == comm.rank
    return warned, str(caught.value)


def _wait(case: str, comm, first, second) -> None:
    rank, x = comm.rank, np.ones(4)
    if case == "a receive without a send":
        if rank == 0:
            comm.recv(x, 1)
        else:
            time.sleep(LIMIT_S + 0.5)
    elif case == "two receives":
        if rank < 2:
            comm.recv(x, 1 - rank)
    elif case == "a receive from a rank that waits":
        time.sleep((0.0, 0.3, LIMIT_S + 0.5)[rank])  # rank 0 is the first to give up
        if rank < 2:
            comm.recv(x, rank + 1)
    elif case == "a communicator and its child":
        (comm if rank else first).allreduce(x)
    elif case == "opposite order":
        for one in (first, comm) if rank else (comm, first):
            one.allreduce(x)
    elif case == "a lone barrier":
        if rank == 1:
            comm.barrier()
        else:
            time.sleep(LIMIT_S + 0.5)
    elif case == "in a child":
        if rank == 1:
            second.recv(x, 1)
        else:
            time.sleep(LIMIT_S + 0.5)
    elif case == "late":
        if rank == 1:
            time.sleep(2.5 * WAIT_S)
        comm.allreduce(x)


def test_a_receive_without_a_send():
    (warned, error, peer), _, _ = run_ranks(_told, 3, "a receive without a send")
    (warning,) = warned
    assert warning.endswith(
        "for rank 1 in a receive of 32 bytes of communicator world; rank 1 itself waits for no rank"
    ), warning
    assert error.startswith("PeerTimeoutError: rank 1 did not take part") and peer == 1


def test_a_receive_from_itself_for_which_there_is_no_send():
    warned, error = run_ranks(_waits_for_itself, 2)[1]
    assert [text.rpartition("; ")[2] for text in warned] == ["rank 1 waits for itself"]
    assert "s in a receive of a message to itself, and has made no send for it" in error


def test_a_receive_from_a_rank_that_waits_itself_blames_the_one_that_both_wait_for():
    (_, error, peer), (_, _, next_peer), _ = run_ranks(_told, 3, "a receive from a rank that waits")
    assert error.startswith("PeerTimeoutError: rank 2 did not take part"), error
    assert (peer, next_peer) == (2, 2)


def test_two_receives_that_wait_for_each_other():
    told = run_ranks(_told, 2, "two receives")
    for rank, (warned, error, peer) in enumerate(told):
        (warning,) = warned
        call = "in a receive of 32 bytes of communicator world, so none of them"
        other = f"rank {1 - rank} waits for rank {rank} {call}"
        assert f"rank {rank} has waited" in warning and other in warning, warning
        assert error and peer in (0, 1)
    assert any("so none of them can go on" in error for _, error, _ in told)


@pytest.mark.parametrize("case", ["a communicator and its child", "opposite order"])
def test_calls_of_two_communicators(case):
    told = run_ranks(_told, 2, case)
    texts = [warned[0] for warned, _, _ in told]
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank} has waited"), text
        assert "of communicator world" in text and "of communicator split 1 of world" in text
        assert text.endswith("so none of them can go on")
    for rank, (_, error, peer) in enumerate(told):
        assert error and peer == 1 - rank, error


def test_a_lone_barrier():
    _, (warned, error, _), _ = run_ranks(_told, 3, "a lone barrier")
    (warning,) = warned
    assert "barrier" in warning and "rank 1 has waited" in warning, warning
    assert error.startswith("PeerTimeoutError: ranks 0, 2 did not take part"), error


def test_ranks_of_a_child_have_their_numbers_in_the_job():
    _, (warned, error, peer), _ = run_ranks(_told, 3, "in a child")
    (warning,) = warned
    assert warning.startswith("rank 1 of the job has waited")
    assert "for rank 2 of the job in a receive of 32 bytes of communicator split 2 of world" in warning
    assert error.startswith("PeerTimeoutError: rank 1 did not") and peer == 1


def test_a_late_rank_is_waited_for():
    told = run_ranks(_told, 2, "late")
    assert [len(warned) for warned, _, _ in told] == [1, 0]
    assert [error for _, error, _ in told] == ["", ""]


def _numpy_and_gpu(wait_s: float = WAIT_S) -> tuple[str, str, float]:
    """One rank's first array is on a GPU, as far as joining goes: it needs none to wait for the others."""
    comm = fc.init(timeout_s=60.0, explain_wait_s=wait_s)
    begin = time.monotonic()
    try:
        if comm.rank == 1:
            comm.device_executor()
        else:
            comm.allreduce(np.ones(4, np.float32))
    except CommunicationError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


def test_numpy_on_one_rank_and_a_gpu_on_another():
    for name, text, seconds in run_ranks(_numpy_and_gpu, 2):
        assert name in (MismatchError.__name__, "AbortedError"), text
        assert "with arrays on GPUs" in text and "with NumPy arrays" in text
        assert seconds < 5.0


@pytest.mark.slow
def test_a_first_array_on_a_gpu_beside_numpy_is_told_long_before_other_waits():
    for name, text, seconds in run_ranks(_numpy_and_gpu, 2, 30.0):
        assert name == MismatchError.__name__ and "cupy.asarray(x) takes a NumPy array to the GPU" in text
        assert seconds < 20.0


def test_the_setting_is_checked():
    with pytest.raises(fc.ArgumentError, match="explain_wait_s"):
        fc.Config(explain_wait_s=0)
