"""Codecs on a GPU: the bits of the NumPy codecs, and all-reduces that end as those of the host do."""

from __future__ import annotations

import numpy as np
import pytest

from flagcx.compression import Cast, Quantized, TopK
from flagcx.compression.codec import Scratch
from flagcx.compression.device import look_on_device, settle_on_device
from flagcx.compression.select import largest, select
from tests.gpu import compression_jobs as jobs
from tests.gpu.conftest import SIZES

CODECS = [Cast("fp16"), Cast("bf16")] + [
    Quantized(name, block) for name in ("int8", "int4", "fp8", "fp8_e5m2") for block in (32, 256)
]


def faults_of(results: list[list[str]]) -> str:
    return "\n".join(fault for faults in results for fault in faults[:20])


def numbers(count: int) -> np.ndarray:
    """Different in every place, over many magnitudes, with blocks of zeros."""
    rng = np.random.default_rng(count)
    x = (rng.standard_normal(count) * 10.0 ** rng.uniform(-20, 20, count)).astype(np.float32)
    x[256:512] = 0
    return x


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("count", [1, 33, 255, 256, 1000, 3_000_001])
def test_the_bits_are_those_of_numpy(codec, count):
    import cupy

    x = numbers(count)
    wire = cupy.zeros(codec.wire_nbytes(count), np.uint8)
    want = np.zeros(codec.wire_nbytes(count), np.uint8)
    codec.encode_into(cupy.asarray(x), wire, Scratch())
    codec.encode_into(x, want, Scratch())
    np.testing.assert_array_equal(wire.get(), want)
    out, host = cupy.asarray(x), x.copy()
    for add in (False, True):
        codec.decode_into(wire, out, Scratch(), add)
        codec.decode_into(want, host, Scratch(), add)
        np.testing.assert_array_equal(out.get(), host)


@pytest.mark.parametrize("codec", [c for c in CODECS if isinstance(c, Quantized)], ids=str)
def test_blocks_with_infinity_or_nan(codec):
    import cupy

    x = cupy.ones(3 * codec.block, np.float32)
    x[0], x[codec.block] = np.inf, np.nan
    back = codec.decode(codec.encode(x)).get().reshape(3, -1)
    assert np.isnan(back[:2]).all() and (back[2] == 1).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_is_no_number_is_found_also_by_a_graph(dtype):
    import cupy

    x, flag = cupy.arange(1000, dtype=dtype), cupy.zeros(1, np.int32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        look_on_device(x, flag)  # compiles
        stream.begin_capture()
        flag.fill(0)
        look_on_device(x, flag)
        graph = stream.end_capture()
        for bad in (np.nan, np.inf, -np.inf, 7):
            x[999] = bad
            graph.launch(stream)
            stream.synchronize()
            assert int(flag[0]) == (bad != 7)


@pytest.mark.parametrize("count", [1, 1000, 3_000_001])
def test_a_step_is_taken_back_where_a_flag_says_so(count):
    import cupy

    for spoilt, same in ((0, 0), (0, 1), (1, 0), (1, 1)):
        now, before = cupy.arange(count, dtype=np.float32), cupy.full(count, -1, np.float32)
        settle_on_device(now, before, cupy.asarray([spoilt], np.int32), same)
        assert bool((now == (-1 if spoilt else cupy.arange(count, dtype=np.float32))).all())
        assert bool((before == (now if same else -1)).all())


def test_selections_are_those_of_numpy():
    import cupy

    x = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    x[7] = np.nan
    threshold = int(np.float32(2.5).view(np.uint32))
    want = select(x, threshold, Scratch())
    np.testing.assert_array_equal(select(cupy.asarray(x), threshold, Scratch()).get(), want)
    np.testing.assert_array_equal(largest(cupy.asarray(x[want]), 100).get(), largest(x[want], 100))
    ties = np.float32([1, -2, 2, 2, 0])
    assert largest(cupy.asarray(ties), 2).get().tolist() == largest(ties, 2).tolist() == [1, 2]
    indices, values = TopK(0.01).encode(cupy.asarray(x)).parts
    np.testing.assert_array_equal(x[indices.get()], values.get())


@pytest.mark.parametrize("size", [n for n in SIZES if n <= 4])
def test_all_reduces_end_as_those_of_the_host(ranks, size):
    assert faults_of(ranks(size, jobs.as_on_the_host, [1, 1000, 100_003], 3)) == ""


def test_pieces_end_as_on_the_host(ranks):
    assert faults_of(ranks(3, jobs.as_on_the_host, [100_003], 2, 65_536)) == ""


def test_with_feedback_nothing_is_lost(ranks):
    assert faults_of(ranks(2, jobs.nothing_is_lost, 50_021, 4)) == ""


@pytest.mark.parametrize("size", [n for n in SIZES if n in (2, 3)])
def test_a_spoilt_step_is_seen_once_and_leaves_nothing_behind(ranks, size):
    assert faults_of(ranks(size, jobs.heals, 5003)) == ""


def test_steps_of_a_graph_go_on_from_each_other_and_are_taken_back(ranks):
    assert faults_of(ranks(2, jobs.replayed, 5003)) == ""


def test_feedback_that_was_saved_goes_on_with_the_same_bits(ranks):
    assert faults_of(ranks(2, jobs.continued, 5003)) == ""


def test_powersgd_uses_the_shape_of_the_array(ranks):
    assert faults_of(ranks(2, jobs.low_rank)) == ""


def test_sparse_means_have_the_bits_of_dense_ones(ranks):
    assert faults_of(ranks(2, jobs.sparse_means_have_the_bits_of_dense_ones, 70_001)) == ""


def test_momentum_arrives_and_bytes_and_speeds_are_those_of_gpus(ranks):
    assert faults_of(ranks(2, jobs.momentum_and_bytes, 50_021, 20)) == ""


def test_sparse_arrays_other_dtypes_and_ways_of_calling(ranks):
    assert faults_of(ranks(2, jobs.sparse_and_other_dtypes, 70_001)) == ""
