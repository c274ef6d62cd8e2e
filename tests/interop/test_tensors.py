"""Tensors as arrays over the same memory."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch==2.13.0)")

import ml_dtypes
import numpy as np
import torch
from torch.distributed import ReduceOp

from flagcx.interop import tensors
from flagcx.interop.tensors import HostViews, are_adjacent, is_ours, is_plain, operation_of, plain


def test_an_array_is_the_tensors_memory_and_is_kept():
    views, x = HostViews(), torch.arange(12, dtype=torch.int32).view(3, 4)
    array = views.elements(x)
    assert array.shape == (12,) and array.dtype == np.int32
    array[5] = -1
    assert x[1, 1] == -1
    assert views.elements(x.view(12)) is array, "the same memory has the same array"
    assert views.elements(x[1:]) is not array
    assert views.bytes(x).nbytes == 48 and views.elements(x, 4).size == 4


def test_an_array_keeps_no_memory_alive():
    views, x = HostViews(), torch.zeros(1000)
    storage = x.untyped_storage()._cdata
    users = torch._C._storage_Use_Count(storage)
    views.elements(x)
    assert torch._C._storage_Use_Count(storage) == users


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"),
    [(torch.bfloat16, ml_dtypes.bfloat16), (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn)],
)
def test_dtypes_that_numpy_lacks(dtype, numpy_dtype):
    x = torch.tensor([1.5, -2.0, 0.25]).to(dtype)
    array = HostViews().elements(x)
    assert array.dtype == numpy_dtype
    assert array.astype(np.float32).tolist() == [1.5, -2.0, 0.25]


def test_every_dtype_of_flagcx_that_torch_has_is_mapped():
    assert len(tensors.NUMPY_DTYPES) == len({str(d) for d in tensors.NUMPY_DTYPES.values()}) == 17
    for dtype, numpy_dtype in tensors.NUMPY_DTYPES.items():
        assert torch.empty(0, dtype=dtype).element_size() == numpy_dtype.itemsize


def test_what_is_plain():
    x = torch.arange(24.0).view(4, 6)
    assert is_plain(x) and is_plain(x[1:]) and is_plain(torch.tensor(1.0)) and is_plain(torch.empty(0))
    odd = torch.frombuffer(bytearray(17), dtype=torch.uint8)[1:].view(torch.uint8)
    assert is_plain(odd)
    z = torch.complex(x, x)
    for other in (x.t(), x[:, 1:3], z.conj(), z.conj().imag):
        assert not is_plain(other)
        copied = plain(other)
        assert is_plain(copied) and torch.equal(copied, other) and copied.data_ptr() != other.data_ptr()
    assert plain(x) is x


def test_what_is_ours():
    assert is_ours(torch.zeros(2)) and is_ours(torch.nn.Parameter(torch.zeros(2)))
    assert not is_ours(torch.zeros(2).to_sparse())
    assert not is_ours(torch.zeros(2, device="meta"))

    class Wrapped(torch.Tensor):
        pass

    assert not is_ours(torch.zeros(2).as_subclass(Wrapped)), "a subclass may hold its data elsewhere"


def test_tensors_end_to_end():
    x = torch.arange(12.0)
    assert are_adjacent(x.chunk(3)) and are_adjacent([x[:2], x[2:7], x[7:]])
    assert not are_adjacent([x[:2], x[3:5]]) and not are_adjacent([x[2:4], x[:2]])
    assert not are_adjacent(list(x.view(3, 4).t()))


def test_operations():
    assert operation_of(ReduceOp.SUM, torch.bool) == "sum"
    assert operation_of(ReduceOp(ReduceOp.BXOR), torch.int8) == "bxor"
    assert operation_of(ReduceOp.BAND, torch.float32) is None
    assert operation_of(ReduceOp.MAX, torch.complex64) is None
    assert operation_of(ReduceOp.SUM, torch.complex32) is None
    scaled = operation_of(torch.distributed._make_nccl_premul_sum(0.25), torch.float32)
    assert scaled is not None and not isinstance(scaled, str) and scaled.scale == 0.25


def test_a_large_tensor_that_keeps_coming_back_is_put_on_huge_pages_once(monkeypatch):
    asked = []
    monkeypatch.setattr(tensors, "_use_huge_pages", lambda *where: asked.append(where))
    views = HostViews()
    large = torch.empty(tensors.LARGE_NBYTES // 4)
    small = torch.empty(tensors.LARGE_NBYTES // 4 - 1)
    for _ in range(3 * tensors.ADVISED_AT):
        views.elements(large)
        views.elements(small)
    assert asked == [(large.data_ptr(), large.nbytes)]


def test_huge_pages_leave_the_data_as_it_is():
    x = torch.arange(3 << 20, dtype=torch.int32)
    tensors._use_huge_pages(x.data_ptr(), x.nbytes)
    assert torch.equal(x, torch.arange(3 << 20, dtype=torch.int32))
    tensors._use_huge_pages(x.data_ptr(), 100)
