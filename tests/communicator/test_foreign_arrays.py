"""Tensors of torch on the host: results are tensors too, on every rank, in every collective."""

from __future__ import annotations

import numpy as np
import pytest

import flagcx as fc
from tests.ranks import run_ranks

torch = pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'flagcx[torch]')")
RANKS = 2
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "int64", "complex64")


@pytest.fixture(scope="module")
def comm():
    with fc.init() as made:
        yield made


def values(tensor):
    """The elements, of any dtype, as Python's numbers."""
    return tensor.detach().to(torch.complex64).reshape(-1).tolist()


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_dtype(comm, name):
    dtype = getattr(torch, name)
    x = torch.arange(4).to(dtype).reshape(2, 2)
    assert comm.allreduce(x, "max" if name != "complex64" else "sum") is x
    for result, shape in (
        (comm.allgather(x), (1, 2, 2)),
        (comm.alltoall(x), (2, 2)),
        (comm.gather(x), (1, 2, 2)),
    ):
        assert type(result) is torch.Tensor and result.dtype is dtype and result.shape == shape
        assert values(result) == values(x)


def test_parameters_and_tensors_with_a_gradient(comm):
    parameter = torch.nn.Parameter(torch.ones(3))
    assert comm.broadcast(parameter) is parameter and parameter.requires_grad
    gathered = comm.allgather(parameter)
    assert type(gathered) is torch.Tensor and not gathered.requires_grad


def test_autograd_knows_of_what_was_written(comm):
    x = torch.ones(3, requires_grad=True)
    y = x * x
    comm.allreduce(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():
        comm.allreduce(torch.ones(3))


def test_a_tensor_that_is_only_read_may_be_used_by_autograd(comm):
    x = torch.ones(3, requires_grad=True)
    y = x * x
    comm.allreduce(x, out=torch.empty(3))
    y.sum().backward()


def test_out_may_be_of_another_library(comm):
    x, y = torch.arange(3.0), np.zeros(3, np.float32)
    assert comm.allreduce(x, out=y) is y and y.tolist() == [0, 1, 2]
    z = torch.zeros(3)
    assert comm.allreduce(y, out=z) is z and z.tolist() == [0, 1, 2]
    assert type(comm.allgather(y)) is np.ndarray


def test_strided_started_and_grouped_tensors(comm):
    x = torch.arange(6.0).reshape(2, 3).T
    assert not x.is_contiguous()
    assert comm.allgather(x)[0].tolist() == x.tolist()
    assert comm.allgather(x, async_op=True).wait()[0].tolist() == x.tolist()
    with comm.group():
        result = comm.allgather(x)
    assert result[0].tolist() == x.tolist()
    assert comm.allreduce([x, np.ones(2)])[0] is x


def test_what_cannot_be_viewed_is_refused(comm):
    with pytest.raises(
        fc.ArrayError, match=r"x is a torch\.Tensor .*; pass a dense tensor in x's place, or call"
    ):
        comm.allreduce(torch.ones(3).to_sparse())
    with pytest.raises(fc.ArrayError, match=r"x is a torch\.Tensor that NumPy cannot take as it is"):
        comm.allreduce(torch.ones(3, device="meta"))


def _tensors():
    comm = fc.init()
    rank, half = comm.rank, torch.bfloat16
    x = torch.full((4,), rank + 1, dtype=half)
    comm.allreduce(x)
    blocks = comm.reduce_scatter(torch.arange(4.0) * (rank + 1))
    counts = [1, 3]
    return (
        x.tolist(),
        blocks.tolist(),
        comm.allgather(torch.full((2,), float(rank))).tolist(),
        comm.allgatherv(torch.full((counts[rank],), float(rank)), counts).tolist(),
        comm.scatterv(
            torch.arange(4.0) if rank == 0 else None, counts, out=torch.empty(counts[rank])
        ).tolist(),
    )


@pytest.mark.slow  # the ranks import torch
def test_tensors_between_ranks():
    results = run_ranks(_tensors, RANKS)
    for rank, (summed, block, gathered, uneven, part) in enumerate(results):
        assert summed == [3.0] * 4 and block == [[0, 3], [6, 9]][rank]
        assert gathered == [[0, 0], [1, 1]] and uneven == [0, 1, 1, 1]
        assert part == [[0], [1, 2, 3]][rank]


def test_rows_of_tensors(comm):
    x = torch.randn(2, 8)
    result = comm.allreduce_rmsnorm(x)
    assert type(result) is torch.Tensor
    assert torch.allclose(result, x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(), atol=1e-5)
    quantized, scales = comm.allreduce_rmsnorm(x, quantize="int8")
    assert (quantized.dtype, type(scales)) == (torch.int8, torch.Tensor)
