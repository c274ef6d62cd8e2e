"""Steps that are left in the middle, gradients under two names, and waiting for nothing."""

from __future__ import annotations

import time

import numpy as np
import pytest

import flagcx as fc
from flagcx.gradients.apart import check_apart
from tests.communicator.jobs import job
from tests.ranks import run_ranks

NAMES = ("a", "b", "c", "d")


def make(comm) -> dict[str, np.ndarray]:
    return {name: np.full(1000 + i, float(comm.rank)) for i, name in enumerate(NAMES)}


def whole_step(sync, gradients, comm, value: float) -> None:
    """A step that must end with the mean."""
    for name, gradient in gradients.items():
        gradient[...] = value + comm.rank
        sync.ready(name)
    sync.wait()
    for name, gradient in gradients.items():
        assert (gradient == value + (comm.size - 1) / 2).all(), name


def _abandoned(overlap: bool, compression: str | None, by_exception: bool) -> None:
    """Each rank leaves each step after another number of gradients, also before any and after all."""
    comm = fc.init(timeout_s=20)
    gradients = make(comm)
    if by_exception:
        for ready in range(5):
            with (
                pytest.raises(ZeroDivisionError),
                fc.GradientSynchronizer(comm, gradients, 1, overlap=overlap) as sync,
            ):
                whole_step(sync, gradients, comm, 3.0)
                for name in NAMES[: (ready + comm.rank) % 5]:
                    sync.ready(name)
                raise ZeroDivisionError
            assert comm.allreduce(np.ones(3))[0] == comm.size
        return
    feedback = None if compression is None else fc.compression.Feedback(compression)
    sync = fc.GradientSynchronizer(comm, gradients, bucket_bytes=1, compression=feedback, overlap=overlap)
    sync.ready("a")
    sync.abandon()  # before the buckets are known
    for ready in range(10):
        if compression is None:
            whole_step(sync, gradients, comm, float(ready))
        else:
            for name in NAMES:
                sync.ready(name)
            sync.wait()
        for name in NAMES[: (ready + 2 * comm.rank) % 5]:
            gradients[name][...] = 7
            sync.ready(name)
        sync.abandon()
        assert comm.allreduce(np.ones(3))[0] == comm.size
    sync.close()
    with pytest.raises(fc.CommunicatorError, match="is closed"):
        sync.abandon()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("compression", "by_exception"), [(None, False), ("int8", False), (None, True)])
def test_a_step_that_all_ranks_abandon_is_followed_by_others(overlap, compression, by_exception):
    run_ranks(_abandoned, 3, overlap, compression, by_exception)


def _left_as_it_was(overlap: bool) -> list[str]:
    """Error feedback after a step in which one gradient has NaN on one rank, or that is left early."""
    comm, faults = fc.init(timeout_s=20), []
    gradients = make(comm)
    for codec in ("int8", "topk", "powersgd"):
        feedback = fc.compression.Feedback(codec, momentum=0.5)
        with fc.GradientSynchronizer(comm, gradients, 5000, compression=feedback, overlap=overlap) as sync:
            for step in range(6):
                before = feedback.state_dict()
                for number, (name, gradient) in enumerate(gradients.items()):
                    gradient[...] = np.random.default_rng([comm.rank, step, number]).standard_normal(
                        gradient.shape
                    )
                    if step == 2 and name == "c" and comm.rank == 1:
                        gradient[7] = np.nan
                    if step != 4 or number < 2 + comm.rank:
                        sync.ready(name)
                sync.abandon() if step == 4 else sync.wait()
                after = feedback.state_dict()
                same = before.keys() == after.keys() and all(
                    np.array_equal(before[n], after[n]) for n in before
                )
                if same != (step in (2, 4)):
                    faults.append(f"{codec}, step {step}: {'the same' if same else 'something is left'}")
    return faults


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_that_are_spoilt_or_left_leave_error_feedback_as_it_was(overlap):
    assert run_ranks(_left_as_it_was, 2, overlap) == [[], []]


def _in_turns() -> None:
    comm, feedback = fc.init(timeout_s=20), fc.compression.Feedback("int8")
    first = fc.GradientSynchronizer(comm, make(comm), compression=feedback)
    whole = lambda sync: ([sync.ready(name) for name in NAMES], sync.wait())  # noqa: E731
    whole(first)
    with fc.GradientSynchronizer(comm, make(comm), compression=feedback) as second:
        whole(second)  # one may follow another
        whole(second)
        with pytest.raises(
            fc.ArgumentError, match="in turns, which share its memory by the same names; give"
        ):
            whole(first)


def test_two_synchronizers_do_not_share_error_feedback():
    run_ranks(_in_turns, 2)


ALONE = """
comm = fc.init(timeout_s=30, explain_wait_s=1)
g = {name: np.ones(1000) for name in "ab"}
def train():
    with fc.GradientSynchronizer(comm, g, bucket_bytes=1, overlap=True) as sync:
        for step in range(3):
            sync.ready("a")
            if step == 2 and comm.rank == 1:
                raise ValueError("no such file")
            sync.ready("b")
            sync.wait()
outcome(train)
"""


def test_a_rank_that_leaves_a_step_alone_tells_the_others():
    began = time.monotonic()
    with job(2, ALONE) as ranks:
        # Before that rank 0 may have warned that it waits.
        first, second = (next(line for line in rank.stdout if "Error" in line[:20]) for rank in ranks)
    assert "rank 1 left its GradientSynchronizer in the middle of a step: ValueError: no such file" in first
    assert second.startswith("ValueError") and time.monotonic() - began < 15


def _wait_for_nothing() -> list[str]:
    comm, said = fc.init(), []
    gradients = make(comm)
    with fc.GradientSynchronizer(comm, gradients) as sync:
        for _ in range(2):
            with pytest.raises(fc.ArgumentError) as caught:
                sync.wait()
            said.append(str(caught.value))
            whole_step(sync, gradients, comm, 5.0)
        with sync.accumulate():
            sync.wait()
    return said


def test_waiting_with_nothing_ready_is_said_and_ends_nothing():
    for rank, (first, later) in enumerate(run_ranks(_wait_for_nothing, 2)):
        assert "rank 0 waits for its gradients, but never made 'a', 'b', 'c', 'd' ready" in first
        assert (
            f"rank {rank} waits for its gradients, but made none of them ready since the last step" in later
        )


def _two_names() -> None:
    comm = fc.init()
    memory = np.zeros((6, 50))
    whole, other = np.full(10, 10.0), np.zeros(10)
    for parameters, names in (
        ({"w": whole, "b": other, "tied": whole}, "'w' and 'tied'"),
        ({"w": whole[:6], "v": whole[5:]}, "'w' and 'v'"),
        ([memory[:, 3], memory[2]], "0 and 1"),
        ({"w": whole.reshape(2, 5).T, "v": whole[::-1]}, "'w' and 'v'"),
    ):
        with pytest.raises(fc.ArgumentError, match=f"{names} share memory, and would be reduced twice"):
            fc.GradientSynchronizer(comm, parameters)
    sync = fc.GradientSynchronizer(comm, {"w": whole, "v": other})
    for _ in range(2):
        sync.ready("w", whole)
        sync.ready("v", whole)
        with pytest.raises(fc.ArgumentError, match="'w' and 'v' share memory"):
            sync.wait()
    with fc.GradientSynchronizer(comm, [memory[:, ::2], memory[:, 1::2], np.zeros(0), np.zeros(0)]) as sync:
        memory[...] = comm.rank
        for number in range(4):
            sync.ready(number)
        sync.wait()
    assert (memory == (comm.size - 1) / 2).all()


def test_one_array_under_two_names_is_refused():
    run_ranks(_two_names, 2)


@pytest.mark.parametrize(
    ("pairs", "share"),
    [
        ([slice(0, 5), slice(5, 10)], False),
        ([slice(0, 6), slice(5, 10)], True),
        ([slice(None, None, 3), slice(1, None, 3)], False),
        ([slice(None, None, -2), slice(1, None, 2)], True),
        ([slice(0, 10), slice(3, 4)], True),
        ([slice(0, 0), slice(0, 0)], False),
    ],
)
def test_views_share_what_their_elements_share(pairs, share):
    x = np.zeros(10)
    views = [x[part] for part in pairs]
    if not share:
        check_apart([0, 1], views)
        return
    with pytest.raises(fc.ArgumentError, match="0 and 1 share memory"):
        check_apart([0, 1], views)
