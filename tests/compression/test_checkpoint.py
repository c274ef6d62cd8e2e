"""Error feedback that was saved: a training that is continued has the bits of one that went through."""

from __future__ import annotations

import io
import pickle
import warnings
from unittest import mock

import numpy as np
import pytest

import flagcx as fc
from flagcx.compression import Auto, Feedback, LinkProfile, PowerSGD, Quantized, RandomK, TopK
from tests.ranks import run_ranks

COUNT = 3000
CODECS = {
    "fp16": "fp16",
    "int8": "int8",
    "int4": Quantized("int4", 64),
    "topk": TopK(0.05),
    "topk that warms up": TopK(0.02, warmup_steps=6),
    "randomk": RandomK(0.1),
    "powersgd": PowerSGD(2),
    "powersgd that warms up": PowerSGD(2, warmup_steps=6),
    "sparse": "sparse",
    "auto": Auto(lossy=("int4",)),
}
KEYS = ("w", ("layer", 1), None)


def through_npz(state):
    file = io.BytesIO()
    np.savez(file, **state)
    file.seek(0)
    return np.load(file, allow_pickle=False)


def through_torch(state):
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"npz": through_npz, "pickle": lambda state: pickle.loads(pickle.dumps(state))}


def steps(comm, feedback: Feedback, first: int, last: int) -> list[bytes]:
    """The results of some steps with several arrays: matrices, and one of parameters end to end."""
    results = []
    for step in range(first, last):
        for number, key in enumerate(KEYS):
            random = np.random.default_rng([comm.rank, step, number])
            x = random.standard_normal((30, COUNT // 30), np.float32)
            if key is None:
                slot = feedback.slot(None, [(20, 100), (1000,)])
                results.append(comm.allreduce(x.reshape(-1), "avg", compression=slot).tobytes())
            else:
                results.append(comm.allreduce(x, "avg", compression=feedback[key]).tobytes())
    return results


def _continued(codec, momentum: float, way: str) -> list[bool]:
    # A measured latency would let "auto" choose no codec while other processes keep the cores busy.
    link = LinkProfile(ranks=2, bandwidth_gb_per_s=0.001, latency_us=100, known=True)
    with mock.patch("flagcx.compression.allreduce.measure_link", lambda *_: link):
        return _steps_again(fc.init(), codec, momentum, way)


def _steps_again(comm, codec, momentum: float, way: str) -> list[bool]:
    through = Feedback(codec, momentum=momentum)
    begun = steps(comm, through, 0, 5)
    saved = WAYS[way](through.state_dict())
    ends = steps(comm, through, 5, 10)
    again = Feedback(codec, momentum=momentum)
    if way == "npz":  # one that was used for something else
        steps(comm, again, 20, 22)
    again.load_state_dict(saved)
    continued = steps(comm, again, 5, 10)
    from_nothing = steps(comm, Feedback(codec, momentum=momentum), 5, 10)
    with comm.split(0) as other:  # as a new job has
        again.load_state_dict(WAYS[way](saved))
        elsewhere = steps(other, again, 5, 10)
    return [continued == ends, elsewhere == ends, from_nothing == ends, len(begun) == len(set(begun))]


@pytest.mark.parametrize("name", CODECS)
def test_a_continued_training_has_the_bits_of_one_that_went_through(name):
    way = list(WAYS)[list(CODECS).index(name) % 2]
    for momentum in (0.0, 0.9):
        for same, elsewhere, from_nothing, all_different in run_ranks(
            _continued, 2, CODECS[name], momentum, way
        ):
            assert same and elsewhere and all_different
            # What a slot keeps matters, but where all is sent anew in each step.
            assert not from_nothing or (name == "sparse" and not momentum)


def test_a_state_is_arrays_numbers_and_text():
    (state,) = run_ranks(_state, 1)
    assert all(isinstance(key, str) for key in state)
    assert {type(value) for value in state.values()} <= {np.ndarray, int, float, str}
    assert "0.residual" in state and "0.factors.0" in state and state["0.key"] == "'w'"


def test_torch_saves_a_state():
    pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch==2.13.0)")
    (state,) = run_ranks(_state, 1)
    back = through_torch(state)
    assert back.keys() == state.keys()
    assert all(np.array_equal(back[key], state[key]) for key in state)


def _state() -> dict:
    comm = fc.init()
    feedback = Feedback("powersgd", momentum=0.5)
    steps(comm, feedback, 0, 2)
    return feedback.state_dict()


def _save(codec, count: int) -> list[dict]:
    comm = fc.init()
    feedback = Feedback(codec, momentum=0.5)
    steps(comm, feedback, 0, count)
    return feedback.state_dict()


def _load(codec, states: list[dict], shift: int) -> tuple[list[str], list[bytes], bool]:
    comm = fc.init()
    feedback = Feedback(codec, momentum=0.5)
    feedback.load_state_dict(states[(comm.rank + shift) % len(states)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = steps(comm, feedback, 5, 8)
    kept = np.linalg.norm(states[0]["0.velocity"]) > 0
    return [str(w.message) for w in caught], results, kept


@pytest.mark.parametrize("codec", ["int8", "topk", "randomk", "powersgd"])
def test_another_number_of_ranks_drops_residuals_and_says_so(codec):
    states = run_ranks(_save, 3, codec, 5)
    done = run_ranks(_load, 2, codec, states, 0)
    for rank, (said, results, kept) in enumerate(done):
        assert len(said) == len(KEYS) and kept
        assert f"rank {rank} of 2 has loaded the memory of slot 'w' of rank {rank} of 3: its" in said[0]
        assert results == done[0][1]


@pytest.mark.parametrize("codec", ["topk", "powersgd"])
def test_the_state_of_another_rank_is_not_taken_for_ones_own(codec):
    states = run_ranks(_save, 2, codec, 5)
    done = run_ranks(_load, 2, codec, states[:1], 0)  # both load that of rank 0
    assert [len(said) for said, *_ in done] == [0, len(KEYS)]
    assert done[0][1] == done[1][1]


def _apart() -> list[str]:
    comm, said = fc.init(), []
    states = []
    for count in (2, 3):
        feedback = Feedback("randomk")
        steps(comm, feedback, 0, count)
        states.append(feedback.state_dict())
    feedback = Feedback("randomk")
    feedback.load_state_dict(states[comm.rank])
    for call in (
        lambda: steps(comm, feedback, 0, 1),
        lambda: Feedback("int8").load_state_dict(states[0]),
        lambda: Feedback(RandomK(0.5)).load_state_dict(states[0]),
        lambda: feedback.load_state_dict({"model": 1}),
        lambda: _unsavable(comm),
        lambda: _other_length(comm, states[0]),
        lambda: _other_shape(comm),
    ):
        with pytest.raises(fc.ArgumentError) as caught:
            call()
        said.append(str(caught.value))
    return said


def _unsavable(comm) -> None:
    feedback = Feedback("int8")
    comm.allreduce(np.ones(9, np.float32), compression=feedback[frozenset({object()})])
    feedback.state_dict()


def _other_length(comm, state) -> None:
    feedback = Feedback("randomk")
    feedback.load_state_dict(state)
    comm.allreduce(np.ones(COUNT + 1, np.float32), compression=feedback["w"])


def _other_shape(comm) -> None:
    feedback = Feedback("powersgd")
    comm.allreduce(np.ones((20, 30), np.float32), compression=feedback["w"])
    again = Feedback("powersgd")
    again.load_state_dict(feedback.state_dict())
    comm.allreduce(np.ones((30, 20), np.float32), compression=again["w"])


def test_states_that_do_not_fit_say_why():
    expected = (
        "ranks have loaded the slot 'w' of different steps: [2, 3], by rank; load states that were saved",
        'is one of a Feedback with codec "RandomK(density=0.01, seed=0)", and this one has "Quantized(',
        "with codec 'RandomK(density=0.01, seed=0)', and this one has 'RandomK(density=0.5, seed=0)'; make",
        "this is no state of a Feedback: it has no entry 'version'; give what state_dict() gave",
        "cannot be saved: keys of slots must be text, numbers, None, or tuples of them",
        "the slot 'w' has loaded the residual of an array of 3000 elements of float32, and got one of 3001",
        "remembers the matrix of an array of shape (20, 30), and got an array of shape (30, 20)",
    )
    for said in run_ranks(_apart, 2):
        for text, part in zip(said, expected, strict=True):
            assert part.replace('"', "'") in text.replace('"', "'"), text


DEVIATIONS = {
    "momentum": (lambda s: s, {"momentum": 0.9}, "with momentum '0.5', and this one has '0.9'; make it"),
    "no momentum": (lambda s: s, {"momentum": 0.0}, "with momentum '0.5', and this one has '0.0'"),
    "clip": (lambda s: s, {"clip": 3.0}, "with clip 'None', and this one has '3.0'"),
    "residual": (lambda s: s, {"residual": False}, "with residual 'True', and this one has 'False'"),
    "codec": (
        lambda s: s,
        {"codec": TopK(0.05, keep=2)},
        "codec 'TopK(density=0.05, keep=4.0, ",
    ),
    "version": (lambda s: s | {"version": 1}, {}, "with version 1, and this one has 2; make it"),
    "versions": (
        lambda s: s | {"version": np.arange(2)},
        {},
        "with version [0, 1], and this one has 2; make",
    ),
    "list": (
        lambda s: list(s),
        {},
        "a list is no state of a Feedback; give the mapping that state_dict() gave",
    ),
    "half": (
        lambda s: s | {"1.residual": s["1.residual"].astype(np.float16)},
        {},
        "entry 'residual' of slot number 1 is of float16 with 1 dimensions; expected float32 with 1",
    ),
    "nan": (
        lambda s: s | {"1.velocity": s["1.velocity"] * np.float32(np.nan)},
        {},
        "entry 'velocity' of slot number 1 has infinity or NaN, of which no slot would recover",
    ),
    "step": (lambda s: s | {"0.step": "x"}, {}, "entry 'step' of slot number 0 is 'x'; expected a number"),
    "rank": (lambda s: s | {"0.rank": -1}, {}, "'rank' of slot number 0 is -1; expected a whole number from"),
    "ranks": (lambda s: s | {"1.ranks": 1.5}, {}, "'ranks' of slot number 1 is 1.5; expected a whole number"),
    "threshold": (
        lambda s: s | {"0.threshold": None},
        {},
        "'threshold' of slot number 0 is None; expected a",
    ),
    "age": (lambda s: s | {"0.age": np.nan}, {}, "'age' of slot number 0 is nan; expected a number"),
    "bounds": (
        lambda s: s | {"0.bounds": "x"},
        {},
        "'bounds' of slot number 0 is array('x', dtype='<U1'); exp",
    ),
    "short bounds": (
        lambda s: s | {"0.bounds": s["0.bounds"][:-1]},
        {},
        "expected int64 of 1 dimension, from 0 on to",
    ),
    "falling bounds": (
        lambda s: s | {"0.bounds": -s["0.bounds"]},
        {},
        "expected int64 of 1 dimension, from 0",
    ),
    "key": (
        lambda s: s | {"0.key": "layer one"},
        {},
        "'key' of slot number 0 is 'layer one', which is not what",
    ),
}


@pytest.fixture(scope="module")
def topk_state():
    return run_ranks(_save, 1, TopK(0.05), 3)[0]


@pytest.mark.parametrize("name", DEVIATIONS)
def test_states_of_other_settings_are_refused_and_change_nothing(topk_state, name):
    change, settings, expected = DEVIATIONS[name]
    feedback = Feedback(**({"codec": TopK(0.05), "momentum": 0.5} | settings))
    feedback.slot("mine").step = 7
    with pytest.raises(fc.ArgumentError) as caught:
        feedback.load_state_dict(change(topk_state))
    assert expected in str(caught.value).replace('"', "'")
    assert [(slot.key, slot.step) for slot in feedback] == [("mine", 7)]


def test_a_state_that_has_lost_any_entry_is_refused(topk_state):
    assert len(topk_state) > 15
    for name in topk_state:
        with pytest.raises(fc.ArgumentError, match=f"'{name}'|lost the entries {name};"):
            Feedback(TopK(0.05), momentum=0.5).load_state_dict(
                {key: value for key, value in topk_state.items() if key != name}
            )


def test_momentum_of_another_dtype_is_refused():
    state = run_ranks(_save_wide, 1)[0]
    assert run_ranks(_load_narrow, 1, state) == [True]


def _save_wide() -> dict:
    comm, feedback = fc.init(), Feedback("sparse", momentum=0.5)
    comm.allreduce(np.ones(9), compression=feedback["w"])
    return feedback.state_dict()


def _load_narrow(state: dict) -> bool:
    comm, feedback = fc.init(), Feedback("sparse", momentum=0.5)
    feedback.load_state_dict(state)
    with pytest.raises(
        fc.ArgumentError, match="velocity of an array of 9 elements of float64, and got one of 9 of"
    ):
        comm.allreduce(np.ones(9, np.float32), compression=feedback["w"])
    return bool((comm.allreduce(np.ones(9), compression=feedback["w"]) == 1.5).all())


def _under_way() -> list[str]:
    comm, said = fc.init(), []
    feedback, x = Feedback("int8"), np.ones(3_000_000, np.float32)
    saved = feedback.state_dict()
    work = comm.allreduce(x, compression=feedback["w"], async_op=True)
    for call in (feedback.state_dict, feedback.reset, feedback.undo, lambda: feedback.load_state_dict(saved)):
        with pytest.raises(fc.ArgumentError) as caught:
            call()
        said.append(str(caught.value).split(" while ")[0])
    work.wait()
    assert feedback.state_dict()["0.step"] == 1
    return said


def test_nothing_is_saved_or_set_while_a_call_is_under_way():
    want = ["state_dict()", "reset()", "undo()", "load_state_dict()"]
    assert run_ranks(_under_way, 2) == [want, want]


def _other_communicator() -> None:
    """A slot goes on where the number of ranks changes in a job: regions are cut anew."""
    comm = fc.init()
    feedback = Feedback("topk")
    steps(comm, feedback, 0, 3)
    half = comm.split(0 if comm.rank < 2 else None)
    if half is not None:
        results = half.allgather_object(steps(half, feedback, 3, 6))
        assert results[0] == results[1]


def test_a_slot_goes_on_with_fewer_ranks():
    run_ranks(_other_communicator, 3)


def _another_choice() -> tuple[str, str, str]:
    """The choice of "auto" after a state was loaded into a Feedback that has chosen already."""
    comm, feedback = fc.init(throttle="0.05", tuning=False), Feedback(Auto(lossy=("int8",)))
    x = np.ones(COUNT, np.float32)
    comm.allreduce(x, compression=feedback["w"])
    state = feedback.state_dict()
    first = str(state["0.chosen"])
    feedback.load_state_dict(state | {"0.chosen": "int8" if first == "dense" else "dense"})
    comm.allreduce(x, compression=feedback["w"])
    second = str(feedback.state_dict()["0.chosen"])
    feedback.load_state_dict(state | {"0.chosen": "int9"})
    with pytest.raises(fc.ArgumentError) as caught:
        comm.allreduce(x, compression=feedback["w"])
    assert comm.allreduce(np.ones(3))[0] == comm.size
    return first, second, str(caught.value)


def test_auto_goes_on_with_the_choice_of_the_checkpoint_whatever_it_chose_before():
    for first, second, said in run_ranks(_another_choice, 2):
        assert {first, second} == {"dense", "int8"}
        assert "slot 'w' has loaded the choice 'int9'; expected one of dense, sparse, int8" in said


def _dropped_work() -> str:
    """Rank 0 asks for the state while a call waits for rank 1, whose work nobody keeps."""
    comm, feedback, token = fc.init(timeout_s=20), Feedback("topk"), np.zeros(1)
    if comm.rank == 1:
        comm.recv(token, source=0)
    comm.allreduce(np.ones(COUNT, np.float32), compression=feedback["w"], async_op=True)
    if comm.rank == 1:
        return ""
    with pytest.raises(fc.ArgumentError) as caught:
        feedback.state_dict()
    comm.send(token, to=1)
    return str(caught.value)


def test_a_state_is_not_saved_while_a_call_is_under_way_whose_work_was_dropped():
    said, _ = run_ranks(_dropped_work, 2)
    assert "state_dict() while a call with the slot 'w' of this Feedback is under way" in said
