"""All-reduces of rows with an epilogue, on arrays of the host."""

from __future__ import annotations

import numpy as np
import pytest

import flagcx as fc
from flagcx.dtypes import DTYPES
from tests.ranks import run_ranks

BF16 = next(d.numpy for d in DTYPES.values() if d.name == "bfloat16")


def data(seed: int, shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
    """Numbers that differ in every seed and place."""
    return np.random.default_rng(seed).normal(0, 2, shape).astype(dtype)


def summed(size: int, shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
    """The sum of all ranks' data, in float32."""
    return np.sum([data(q, shape, dtype).astype(np.float32) for q in range(size)], axis=0)


def _norms(dtype, last: float) -> None:
    comm, shape = fc.init(), (2, 3, 40)
    x = data(comm.rank, shape, dtype)
    residual, weight, shift = data(10, shape), data(11, (40,)), data(12, (40,), dtype)
    total = summed(comm.size, shape, dtype) + residual
    want = total / np.sqrt(np.mean(total**2, -1, keepdims=True) + 1e-5) * weight
    kept = residual.copy()
    got = comm.allreduce_rmsnorm(x, kept, weight, 1e-5)
    assert got.dtype == dtype and got.shape == shape
    np.testing.assert_allclose(got.astype(np.float32), want, last, last)
    np.testing.assert_allclose(kept, total, last, last)
    assert np.array_equal(x, data(comm.rank, shape, dtype)), "x was written"

    apart, given = np.zeros_like(residual), residual.copy()
    out = np.zeros(shape, dtype)[:, :, ::-1]
    assert comm.allreduce_rmsnorm(x, given, weight, 1e-5, out=out, residual_out=apart) is out
    assert np.array_equal(out, got) and np.array_equal(apart, kept) and np.array_equal(given, residual)
    assert comm.allreduce_rmsnorm(x, residual.copy(), weight, 1e-5, out=x) is x
    assert np.array_equal(x, got)
    for _ in range(2):  # the second goes straight to the plan of the first
        out, again = np.zeros_like(got), residual.copy()
        given = data(comm.rank, shape, dtype)
        assert comm.allreduce_rmsnorm(given, again, weight, 1e-5, out=out) is out
        assert np.array_equal(out, got) and np.array_equal(again, kept)
    with pytest.raises(fc.ArrayError, match="x and residual_out overlap"):
        comm.allreduce_rmsnorm(given, given, weight, 1e-5, out=out)
    out.flags.writeable = False
    with pytest.raises(fc.ArrayError, match="out is read-only"):
        comm.allreduce_rmsnorm(given, again, weight, 1e-5, out=out)
    every = comm.allgather_object((got.tobytes(), kept.tobytes()))
    assert len(set(every)) == 1, "other bits on another rank"

    x = data(comm.rank, shape, dtype)
    total = summed(comm.size, shape, dtype) + data(13, (40,))
    centred = total - total.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) + shift.astype(np.float32)
    got = comm.allreduce_layernorm(x, shift=shift, bias=data(13, (40,)), eps=1e-3)
    np.testing.assert_allclose(got.astype(np.float32), want, last, last)


@pytest.mark.parametrize(("dtype", "last"), [(np.float32, 1e-5), (np.float16, 4e-3), (BF16, 3e-2)])
def test_norms(dtype, last):
    run_ranks(_norms, 3, np.dtype(dtype), last)


def test_one_rank_alone():
    run_ranks(_norms, 1, np.dtype(np.float32), 1e-5)


def _quantized(dtype: str, limit: float, half: float) -> None:
    comm, shape = fc.init(), (5, 64)
    total = summed(comm.size, shape)
    total[3] = 0
    x = data(comm.rank, shape)
    x[3] = 0
    want = total / np.sqrt(np.mean(total**2, -1, keepdims=True) + 1e-6)
    got, scales = comm.allreduce_rmsnorm(x, quantize=dtype)
    assert got.dtype.name == dtype and scales.shape == (5, 1)
    largest = np.abs(want).max(-1, keepdims=True)
    np.testing.assert_allclose(scales[[0, 1, 2, 4]], largest[[0, 1, 2, 4]] / limit, 1e-5)
    step = scales if dtype == "int8" else np.abs(want)
    assert (np.abs(got.astype(np.float32) * scales - want) <= half * step + 1e-3 * scales).all()
    assert not got[3].astype(np.float32).any() and np.isfinite(scales).all()

    scale = np.array([1 / limit], np.float32)
    got = comm.allreduce_rmsnorm(x, quantize=dtype, scale=scale).astype(np.float32)
    clipped = np.clip(want / scale, -limit, limit)
    assert (np.abs(got - clipped) <= half * (1 if dtype == "int8" else np.abs(clipped)) + 1e-2).all()
    assert np.abs(got).max() == limit


@pytest.mark.parametrize(
    ("dtype", "limit", "half"),
    [("int8", 127, 0.501), ("float8_e4m3fn", 448, 2**-4), ("float8_e5m2", 57344, 2**-3)],
)
def test_quantised_results(dtype, limit, half):
    run_ranks(_quantized, 2, dtype, limit, half)


def _pieces() -> None:
    comm, shape = fc.init(), (4, 30)
    x, gate, bias = data(comm.rank, shape), data(20, shape), data(21, (30,))
    want = (summed(comm.size, shape) + bias) * 0.5 * gate / (1 + np.exp(-gate))
    pieces = ("bias", "scale", "silu_mul")
    given = {"bias": bias, "factor": 0.5, "gate": gate}
    np.testing.assert_allclose(comm.allreduce_then(x, pieces, **given), want, 1e-5, 1e-5)
    out = np.zeros_like(x)
    assert comm.allreduce_then(x, pieces, out=out, async_op=True, **given).wait() is out
    np.testing.assert_allclose(out, want, 1e-5, 1e-5)
    out[...] = 0
    with comm.group():
        comm.allreduce_then(x, pieces, out=out, algorithm="ring", **given)
    np.testing.assert_allclose(out, want, 1e-5, 1e-5)
    assert comm.allreduce_then(x[:0], pieces, **{**given, "gate": gate[:0]}).shape == (0, 30)


def test_pieces_in_any_order_of_calls():
    run_ranks(_pieces, 2)


WRONG = {
    "dtype": (lambda x, r, w: ((x.astype(np.float64), r, w), {}), "x has dtype float64"),
    "one number": (lambda x, r, w: ((x[0, 0], r, w), {}), "expected an array"),
    "weight's length": (lambda x, r, w: ((x, r, w[1:]), {}), r"shape \(7,\).*one value for each column \(8"),
    "residual's shape": (lambda x, r, w: ((x, r.T, w), {}), r"residual has shape \(8, 4\).*the shape of x"),
    "residual's dtype": (lambda x, r, w: ((x, r.astype(np.int32), w), {}), "float32 or float16 or bfloat16"),
    "eps": (lambda x, r, w: ((x, r, w, -1.0), {}), "eps=a number from 0 up, got -1.0"),
    "no number": (lambda x, r, w: ((x, r, w, "small"), {}), "got 'small'"),
    "out's dtype": (lambda x, r, w: ((x, r, w), {"out": np.zeros((4, 8), np.float16)}), "out has dtype"),
    "overlap": (lambda x, r, w: ((x, r, w), {"out": r}), "residual and out overlap|out and residual"),
    "a part of x": (lambda x, r, w: ((x[1:], r[1:], w), {"out": x[:-1]}), "x and out overlap|out and x"),
    "no residual": (lambda x, r, w: ((x, None, w), {"residual_out": r}), "pass residual too"),
    "no quantize": (lambda x, r, w: ((x, r, w), {"scale": w[:1]}), "pass quantize"),
    "both scales": (
        lambda x, r, w: ((x, r, w), {"quantize": "int8", "scale": w[:1], "scales": w[:4]}), "not both",
    ),
    "quantize": (lambda x, r, w: ((x, r, w), {"quantize": "int4"}), "int4"),
    "algorithm": (lambda x, r, w: ((x, r, w), {"algorithm": "rings"}), "rings"),
}  # fmt: skip


def _wrong(name: str) -> str:
    comm = fc.init()
    make, _ = WRONG[name]
    arguments, options = make(data(comm.rank, (4, 8)), data(30, (4, 8)), data(31, (8,)))
    try:
        comm.allreduce_rmsnorm(*arguments, **options)
    except (fc.ArgumentError, fc.ArrayError) as error:
        comm.allreduce(np.ones(3))  # the communicator can still be used
        return str(error)
    return "nothing"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_told(name):
    import re

    for told in run_ranks(_wrong, 2, name):
        assert re.search(WRONG[name][1], told), told


def _unknown() -> list[str]:
    comm, told = fc.init(), []
    x = data(comm.rank, (4, 8))
    for pieces, given in ((("rmsnorm",), {"eps": 0, "weigth": x}), (("bias",), {}), (("rms",), {})):
        try:
            comm.allreduce_then(x, pieces, **given)
        except fc.ArgumentError as error:
            told.append(str(error))
    return told


def test_what_pieces_take_is_told():
    for told in run_ranks(_unknown, 1):
        assert told[0] == "no piece of ['rmsnorm'] takes 'weigth'; expected some of weight, eps"
        assert told[1] == "['bias'] need bias=, an array of one value for each column"
        assert told[2].startswith("there is no piece 'rms'; expected some of bias, scale")


def _disagreeing(what: str) -> str:
    comm = fc.init(timeout_s=20)
    x, residual = data(comm.rank, (4, 8)), data(30, (4, 8))
    odd = comm.rank == 1
    try:
        if what == "rows":
            comm.allreduce_rmsnorm(x.reshape(8, 4) if odd else x, None)
        elif what == "eps":
            comm.allreduce_rmsnorm(x, residual, eps=1e-5 if odd else 1e-6)
        else:
            comm.allreduce_rmsnorm(x, None if odd else residual)
    except fc.MismatchError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "words"),
    [("rows", "in rows of 4, then"), ("eps", "eps=1e-05"), ("residual", "residual | rmsnorm")],
)
def test_ranks_that_disagree(what, words):
    for told in run_ranks(_disagreeing, 2, what):
        assert words in told, told


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(3, 0), (0, 8), (0, 0)])
def test_rows_of_nothing(shape):
    with fc.init() as comm:
        x = np.ones(shape, np.float32)
        found = comm.allreduce_rmsnorm(x, x.copy(), np.ones(shape[1], np.float32), 1e-6)
    assert np.shape(found[0] if isinstance(found, tuple) else found) == shape
