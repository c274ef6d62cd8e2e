"""A synchronizer that goes on from a checkpoint forms the same buckets, and ends with the same bits."""

from __future__ import annotations

import io

import numpy as np
import pytest

import flagcx as fc
from tests.ranks import run_ranks

SHAPES = {"w0": (60, 40), "b0": (40,), "w1": (40, 30), "b1": (30,), "scale": ()}


def train(comm, sync, gradients, parameters, first: int, last: int, order) -> None:
    for step in range(first, last):
        for i, (name, gradient) in enumerate(gradients.items()):
            random = np.random.default_rng([comm.rank, step, i])
            gradient[...] = parameters[name] * 0.1 + random.standard_normal(gradient.shape, np.float32)
        for name in order:
            sync.ready(name)
        sync.wait()
        for name, gradient in gradients.items():
            parameters[name] -= np.float32(0.1) * gradient


def _continued(compression, momentum: float, bucket_bytes: int | None) -> tuple[bool, bool, list, list]:
    comm = fc.init()

    def begin(order):
        feedback = None
        if compression is not None:
            feedback = fc.compression.Feedback(compression, momentum=momentum)
        gradients = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        sync = fc.GradientSynchronizer(comm, gradients, bucket_bytes, compression=feedback)
        return sync, gradients, order

    orders = list(SHAPES), list(reversed(SHAPES))
    parameters = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    through, gradients, order = begin(orders[0])
    train(comm, through, gradients, parameters, 0, 4, order)
    file = io.BytesIO()
    np.savez(file, **through.state_dict(), **{f"p.{name}": value for name, value in parameters.items()})
    train(comm, through, gradients, parameters, 4, 8, order)
    file.seek(0)
    saved = np.load(file)
    ends = []
    for warm in (False, True):  # a new one, and one in use
        again, gradients, order = begin(orders[1])  # its gradients become ready in another order
        own = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
        if warm:
            train(comm, again, gradients, own, 50, 52, order)
        again.load_state_dict({key: saved[key] for key in saved if not key.startswith("p.")})
        own = {name: saved[f"p.{name}"].copy() for name in SHAPES}
        train(comm, again, gradients, own, 4, 8, order)
        ends.append(all(own[name].tobytes() == parameters[name].tobytes() for name in SHAPES))
        again.close()
    return (*ends, through.buckets, again.buckets or through.buckets)


@pytest.mark.parametrize(
    ("compression", "momentum", "bucket_bytes"),
    [
        (None, 0.0, None),
        ("int8", 0.0, 7000),
        ("int4", 0.9, None),
        ("topk", 0.9, 7000),
        ("powersgd", 0.0, None),
        ("randomk", 0.0, 1),
    ],
)
def test_a_continued_training_has_the_bits_of_one_that_went_through(compression, momentum, bucket_bytes):
    for same, after_others, buckets, again in run_ranks(_continued, 2, compression, momentum, bucket_bytes):
        assert same and after_others and buckets == again


def _back_to_the_begin() -> list[tuple]:
    comm, found = fc.init(), []
    gradients = [np.zeros(3, np.float32), np.zeros(5, np.float32)]
    for given in (None, 1):
        sync = fc.GradientSynchronizer(comm, gradients, given)
        begun = sync.state_dict()
        for order in ((0, 1), (1, 0)):
            for name in order:
                sync.ready(name)
            sync.wait()
            found.append((sync.reason, sync.buckets))
            sync.load_state_dict(begun)
        found.append((sync.reason, sync.bucket_nbytes))
    return found


def test_a_state_from_before_the_first_step_lets_buckets_form_anew():
    for found in run_ranks(_back_to_the_begin, 2):
        assert found[2:] == [("", None), ("given", [(0,), (1,)]), ("given", [(1,), (0,)]), ("given", 1)]
        assert [buckets for _, buckets in found[:2]] == [[(0, 1)], [(1, 0)]]


def _misfits() -> list[str]:
    comm, said = fc.init(), []
    gradients = [np.zeros((3, 4), np.float32), np.zeros(5, np.float32)]
    state = fc.GradientSynchronizer(comm, gradients, compression="int8").state_dict()
    dense = fc.GradientSynchronizer(comm, gradients)
    begun = dense.state_dict()
    again = fc.GradientSynchronizer(comm, gradients)
    dense.ready(0)
    for call in (
        lambda: dense.load_state_dict(begun),
        lambda: dense.state_dict(),
        lambda: fc.GradientSynchronizer(comm, gradients).load_state_dict(state),
        lambda: fc.GradientSynchronizer(comm, gradients[:1], compression="int8").load_state_dict(state),
        lambda: fc.GradientSynchronizer(comm, gradients, compression="int4").load_state_dict(state),
        lambda: fc.GradientSynchronizer(comm, gradients, compression="int8").load_state_dict({}),
        lambda: again.load_state_dict({name: begun[name] for name in begun if name != "order"}),
        lambda: again.load_state_dict(begun | {"order": np.array([0, 2]), "bucket_nbytes": 5}),
        lambda: again.load_state_dict(begun | {"order": np.array([1, 0])}),
    ):
        with pytest.raises(fc.ArgumentError) as caught:
            call()
        said.append(str(caught.value))
    again = fc.GradientSynchronizer(comm, gradients, compression="int8")
    again.load_state_dict(state)  # that of a training that has not begun
    return said


def test_states_that_do_not_fit_say_why():
    expected = (
        "sync.load_state_dict() in the middle of a step; call sync.wait() before",
        "sync.state_dict() in the middle of a step; call sync.wait() before",
        "is one of a GradientSynchronizer with error feedback, and this one has none; make it with the same",
        'the state is one of a GradientSynchronizer with gradients "0 of shape (3, 4) and dtype float32;',
        "the state is one of a Feedback with codec \"Quantized(name='int8', block=256)\", and this one has",
        "this is no state of a GradientSynchronizer: it has no entry 'version'",
        "the state of a GradientSynchronizer has lost the entries order; give all that state_dict() gave",
        "has the order [0, 2] of 2 gradients, and buckets of 5 bytes; give what state_dict() gave",
        "has the order [1, 0] of 2 gradients, and buckets of 0 bytes; give what state_dict() gave",
    )
    for said in run_ranks(_misfits, 2):
        for text, part in zip(said, expected, strict=True):
            assert part.replace('"', "'") in text.replace('"', "'"), text


def _saved_beside() -> str:
    """Rank 0 asks for its own Feedback's state while a bucket of its synchronizer waits for its turn."""
    comm, token = fc.init(timeout_s=20), np.zeros(1)
    feedback, gradient = fc.compression.Feedback("topk"), np.ones(3000, np.float32)
    with fc.GradientSynchronizer(comm, [gradient], compression=feedback, overlap=True) as sync:
        for step in range(2):
            if comm.rank == step == 1:
                comm.recv(token, source=0)
            before = comm.allreduce(np.ones(3), async_op=True)
            sync.ready(0)
            if comm.rank == 0 and step == 1:
                with pytest.raises(fc.ArgumentError) as caught:
                    feedback.state_dict()
                comm.send(token, to=1)
            before.wait()
            sync.wait()
        feedback.state_dict()
    return "" if comm.rank else str(caught.value)


def test_feedback_is_not_saved_while_a_bucket_is_under_way():
    said, _ = run_ranks(_saved_beside, 2)
    assert "state_dict() while a call with the slot (0,) of this Feedback is under way" in said
