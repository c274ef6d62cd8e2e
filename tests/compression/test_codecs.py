"""Each codec alone: what comes back, how many bytes it takes, and what it does with odd numbers."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from flagcx.compression import (
    Cast,
    Feedback,
    PowerSGD,
    Quantized,
    RandomK,
    Sparse,
    TopK,
    catalogue,
    codec_of,
    select,
)
from flagcx.compression import codec as codec_module
from flagcx.compression.codec import Scratch
from flagcx.errors import ArgumentError, ArrayError

COUNTS = (1, 2, 31, 32, 33, 255, 256, 257, 511, 70_001)
FIXED = [Cast("fp16"), Cast("bf16")] + [
    Quantized(name, block) for name in ("int8", "int4", "fp8", "fp8_e5m2") for block in (32, 256)
]
RELATIVE = {"fp16": 2.0**-11, "bf16": 2.0**-8}
OF_LARGEST = {"int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 2.0**-4, "fp8_e5m2": 2.0**-3}


def numbers(count: int) -> np.ndarray:
    """Different in every place, of magnitudes from 1e-3 to 1e3."""
    rng = np.random.default_rng(count)
    return (rng.standard_normal(count) * 10.0 ** rng.uniform(-3, 3, count)).astype(np.float32)


@pytest.mark.parametrize("codec", FIXED, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_what_comes_back_is_near(codec, count):
    x = numbers(count)
    payload = codec.encode(x)
    assert payload.nbytes == codec.wire_nbytes(count) and payload.nbytes % 16 == 0
    back = codec.decode(payload)
    if codec.name in RELATIVE:
        assert (abs(back - x) <= RELATIVE[codec.name] * abs(x) + 2.0**-25).all()
        return
    largest = np.repeat(
        [abs(x[i : i + codec.block]).max() for i in range(0, count, codec.block)], codec.block
    )
    bound = OF_LARGEST[codec.name] * 1.001 * largest[:count]
    if codec.name.startswith("fp8"):
        bound = OF_LARGEST[codec.name] * 1.001 * abs(x) + 1e-5 * largest[:count]
    assert (abs(back - x) <= bound).all()


@pytest.mark.parametrize("codec", FIXED, ids=str)
def test_decoding_adds_to_what_is_there(codec):
    x, y = numbers(70_001), numbers(70_002)[1:].copy()
    wire, scratch = np.empty(codec.wire_nbytes(x.size), np.uint8), Scratch()
    codec.encode_into(x, wire, scratch)
    alone = np.empty_like(x)
    codec.decode_into(wire, alone, scratch)
    total = y.copy()
    codec.decode_into(wire, total, scratch, add=True)
    np.testing.assert_array_equal(total, y + alone)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_fp8_rounds_as_ml_dtypes(name):
    dtype, limit = {"fp8": (ml_dtypes.float8_e4m3fn, 448), "fp8_e5m2": (ml_dtypes.float8_e5m2, 57344)}[name]
    x = numbers(4096)
    x[::256] = limit * np.float32(2.0**-6)  # the factor of every block is a power of two
    x = np.clip(x, -limit * 2.0**-6, limit * 2.0**-6).astype(np.float32)
    codec = Quantized(name)
    want = (x * np.float32(64)).astype(dtype).astype(np.float32) / np.float32(64)
    np.testing.assert_array_equal(codec.decode(codec.encode(x)), want)


@pytest.mark.parametrize("codec", [c for c in FIXED if isinstance(c, Quantized)], ids=str)
def test_zeros_tiny_and_infinite_numbers(codec):
    x = np.zeros(5 * codec.block, np.float32)
    x[codec.block] = 1e-38
    x[2 * codec.block] = np.inf
    x[3 * codec.block + 1] = np.nan
    x[4 * codec.block :] = 1
    back = codec.decode(codec.encode(x)).reshape(5, -1)
    assert (back[:2] == 0).all()
    assert np.isnan(back[2:4]).all()
    assert (back[4] == 1).all()


def test_int4_takes_half_the_bytes_of_int8():
    assert Quantized("int8").ratio(1 << 20) == pytest.approx(0.25 + 1 / 256)
    assert Quantized("int4").ratio(1 << 20) == pytest.approx(0.125 + 1 / 256)


@pytest.mark.parametrize("count", [1, 7, 1000, 300_001])
@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
def test_topk_finds_about_the_largest(count, density):
    x = numbers(count)
    codec = TopK(density)
    indices, values = codec.encode(x).parts
    k = codec.count(count, 1)
    np.testing.assert_array_equal(x[indices], values)
    assert (np.diff(indices) > 0).all()
    assert 0.6 * k <= len(indices) <= 1.25 * k + 1
    left = np.delete(abs(x), indices)
    assert left.size == 0 or left.max() <= abs(values).min()


def test_topk_of_equal_numbers_takes_k_of_them():
    x = np.ones(100_000, np.float32)
    assert len(TopK(0.01).encode(x).parts[0]) == 1000
    assert len(TopK(0.01).encode(0 * x).parts[0]) == 0


def test_topk_sends_what_is_no_number():
    x = numbers(10_000)
    x[123] = np.nan
    assert 123 in TopK(0.01).encode(x).parts[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("codec", [Cast("fp16"), Cast("bf16"), Quantized("int8"), Quantized("fp8")])
def test_infinities_that_meet_are_no_number_and_no_warning(codec):
    x = np.float32([np.inf, 1, -np.inf])
    wire, out = np.empty(codec.wire_nbytes(3), np.uint8), np.float32([-np.inf, 2, np.inf])
    codec.encode_into(x, wire, Scratch())
    codec.decode_into(wire, out, Scratch(), add=True)
    assert np.isnan(out[[0, 2]]).all()


def test_topk_warms_up():
    codec = TopK(0.01, warmup_steps=4)
    densities = [codec.density_at(step) for step in range(1, 7)]
    assert densities[0] == 0.25 and densities[4:] == [0.01, 0.01]
    assert all(a > b for a, b in pairwise(densities[:5]))


def test_a_threshold_is_used_again_only_where_it_still_fits():
    x, scratch = numbers(200_000), Scratch()
    codec = TopK(0.01)
    _, threshold = codec.find(x, scratch, 1)
    assert threshold is not None
    assert codec.find(x * np.float32(1.001), scratch, 2, threshold)[1] == threshold
    indices, renewed = codec.find(x * np.float32(8), scratch, 3, threshold)
    assert renewed != threshold and len(indices) <= 1.25 * codec.count(x.size, 3)


@pytest.mark.parametrize("factor", [0.01, 0.5, 2, 100])
def test_a_threshold_that_no_longer_fits_costs_no_elements(factor):
    x, scratch, codec = numbers(200_000), Scratch(), TopK(0.01)
    _, threshold = codec.find(x, scratch, 1)
    half, whole = x * np.float32(factor / 2), np.empty_like(x)
    indices, renewed = codec.find(half, scratch, 2, threshold, half, whole)
    np.testing.assert_array_equal(whole, 2 * half)
    k = codec.count(x.size, 2)
    assert 0.7 * k <= len(indices) <= 1.25 * k
    left = np.delete(abs(x), indices)
    assert left.max() <= abs(x[indices]).min()
    if renewed is not None:
        again, _ = codec.find(x * np.float32(factor), scratch, 3, renewed)
        assert 0.8 * k <= len(again) <= 1.25 * k


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001, 0.0001])
def test_few_elements_are_found_with_as_small_samples_as_many(density, monkeypatch):
    """A sample of half a million numbers, for a density of 0.1%, took as long as to look at all of them."""
    drawn, real = [], select.sample

    def sample(x, size, seed, add=None):
        drawn.append(size)
        return real(x, size, seed, add)

    monkeypatch.setattr(select, "sample", sample)
    codec, scratch, threshold, kept = TopK(density), Scratch(), None, np.zeros(1 << 20, np.float32)
    x = numbers(kept.size)
    for step in range(1, 13):
        indices, threshold = codec.find(kept, scratch, step, threshold, np.roll(x, 1000 * step), kept)
        kept[indices] = 0
        assert 0.7 * codec.count(x.size, step) <= len(indices) <= 1.25 * codec.count(x.size, step)
    assert max(drawn[:2]) <= max(200 / density, 5000) and sum(n > 5000 for n in drawn[8:]) <= 4


def test_randomk_draws_alike_and_anew_at_each_step():
    codec = RandomK(0.1, seed=3)
    first, again, second = codec.places(1000, 1), codec.places(1000, 1), codec.places(1000, 2)
    np.testing.assert_array_equal(first, again)
    assert len(set(first)) == 100 and not np.array_equal(first, second)
    seen = set().union(*(codec.places(1000, step) for step in range(1, 120)))
    assert len(seen) == 1000


def test_sparse_loses_nothing():
    x = np.zeros(10_000, np.float32)
    x[[0, 5, 9999]] = [1, np.nan, -3]
    codec = Sparse()
    payload = codec.encode(x)
    assert payload.nbytes == 24
    np.testing.assert_array_equal(codec.decode(payload), x)


@pytest.mark.parametrize("shape", [(40, 30), (7, 11, 3), (1000,), (2,), (1, 5)])
def test_powersgd_gives_back_a_matrix_of_its_rank(shape):
    rng = np.random.default_rng(0)
    rows = shape[0] if len(shape) > 1 else 1
    left, right = rng.standard_normal((rows, 2)), rng.standard_normal((2, int(np.prod(shape)) // rows))
    x = (left @ right).astype(np.float32).reshape(shape)
    if len(shape) == 1:
        x = np.tile(np.arange(1, 11, dtype=np.float32), 100)[: shape[0]]
    codec = PowerSGD(rank=2)
    back = codec.decode(codec.encode(x)).reshape(shape)
    if len(shape) > 1 or shape[0] <= 2:
        np.testing.assert_allclose(back, x, atol=1e-4 * abs(x).max())


def test_names_and_settings_that_are_wrong():
    with pytest.raises(
        ArgumentError, match=r"compression='int9' is not known; expected one of fp16, .* or a Feedback"
    ):
        codec_of("int9")
    with pytest.raises(ArgumentError, match=r"Quantized\('int3'\) is not known; expected one of int8, int4"):
        Quantized("int3")
    with pytest.raises(ArgumentError, match="block=100 must be a multiple of 32 from 32 to 4096"):
        Quantized("int8", 100)
    with pytest.raises(ArgumentError, match="density=0 must be above 0 and at most 1"):
        TopK(density=0)
    with pytest.raises(ArgumentError, match="rank=0 must be an integer from 1"):
        PowerSGD(rank=0)
    with pytest.raises(ArrayError, match="x has dtype float64; codecs work on float32"):
        Quantized().encode(np.ones(3))


def test_the_catalogue_has_every_codec():
    entries = catalogue()
    assert set(entries) == {
        "fp16", "bf16", "fp8", "fp8_e5m2", "int8", "int4", "topk", "randomk", "powersgd", "sparse",
    }  # fmt: skip
    assert [e.name for e in entries.values() if e.lossless] == ["sparse"]
    assert entries["topk"].ratio == pytest.approx(0.03)  # on two ranks
    assert all(entry.codec.name == name and entry.host_gb_per_s > 0 for name, entry in entries.items())


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "int8", "int4"])
@pytest.mark.parametrize("largest", [1e-38, 1.1e-36, 1e-34, 1.6e-34, 3e-34])
def test_small_numbers_stay_finite(name, largest):
    x = np.zeros(64, np.float32)
    x[3], x[40] = largest, 1
    back = Quantized(name, 32).decode(Quantized(name, 32).encode(x))
    assert back[40] == 1 and not back[4:40].any()
    assert back[3] == pytest.approx(largest if largest > 2e-34 else 0, rel=0.01)
    assert (back[3] == 0) == (largest < 2e-34)


def test_a_view_with_gaps_is_coded_and_written_as_it_looks():
    x = np.arange(256, dtype=np.float32)
    payload = Quantized("int8", 32).encode(x[::2])
    np.testing.assert_allclose(Quantized("int8", 32).decode(payload), x[::2], atol=1.1)
    out = np.zeros((16, 8), np.float32).T
    assert Quantized("int8", 32).decode(payload, out) is out
    np.testing.assert_allclose(out.reshape(-1), x[::2], atol=1.1)


def test_an_array_that_a_payload_does_not_fit_is_refused():
    payload = Quantized("int8").encode(np.ones(40, np.float32))
    with pytest.raises(ArrayError, match="out has 41 elements, and the payload stands for 40"):
        Quantized("int8").decode(payload, np.zeros(41, np.float32))
    with pytest.raises(ArrayError, match="out has dtype float64"):
        Quantized("int8").decode(payload, np.zeros(40))


def test_scratch_of_a_gpu_belongs_to_a_stream_of_its_own(monkeypatch):
    """What a larger array replaces may still be used on another stream than the one it was made on."""
    made, current = [], ["the caller's"]

    class Stream:
        def __init__(self, **_):
            self.name = f"own {id(self)}"

        def __enter__(self):
            current.append(self.name)

        def __exit__(self, *_):
            current.pop()

    def empty(count, dtype):
        made.append(current[-1])
        return np.full(count, 7, dtype)

    fake = SimpleNamespace(empty=empty, cuda=SimpleNamespace(Stream=Stream))
    monkeypatch.setattr(codec_module, "namespace", lambda like: fake)
    monkeypatch.setattr(codec_module, "on_device", lambda like: True)
    monkeypatch.setattr(codec_module, "captures", lambda like: False)
    scratch = Scratch()
    for count in (10, 5, 20):
        assert len(scratch.get("wire", count, np.uint8, None)) == count
    assert not scratch.get("seen", 4, np.uint8, None, zeros=True).any()
    assert len(made) == 3 and len(set(made)) == 1 and made[0].startswith("own")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Feedback("int8", momentum="0.5"),
        lambda: Feedback("int8", momentum=float("nan")),
        lambda: Feedback("int8", clip="3"),
        lambda: Feedback("int8").slot("x", [3, 4]),
        lambda: Feedback("int8").slot("x", [(3, -4)]),
        lambda: Feedback("int8")[[1]],
        lambda: TopK("a"),
        lambda: TopK(0.1, warmup_steps="x"),
        lambda: PowerSGD(2, warmup_steps=-1),
    ],
)
def test_settings_that_are_none_are_refused(make):
    with pytest.raises(ArgumentError, match=r"must be|no shape|\(0.01 keeps"):
        make()


def test_numbers_of_numpy_are_settings_as_those_of_python_are():
    assert (
        Feedback("int8", momentum=np.float64(0.5))._settings() == Feedback("int8", momentum=0.5)._settings()
    )
