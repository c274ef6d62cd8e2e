"""Decodes with a Llama-like model that is split over all ranks, and says what the communication costs.

    torchrun --nproc-per-node 2 examples/tensor_parallel_decode.py            # GPUs, sizes of an 8B model
    torchrun --nproc-per-node 2 examples/tensor_parallel_decode.py --small    # on any machine
    flagcx run -n 2 --share-gpu examples/tensor_parallel_decode.py --small    # ranks that share a GPU

Each layer ends twice in an all-reduce, after which every rank adds the residual and normalises. The same
weights (random, from one seed) decode the same prompt in several ways: without communication (which gives
wrong tokens), through torch's own group, through the group that ``fc.enhance_process_group()`` has enhanced,
and with ``torch.ops.flagcx.allreduce_rmsnorm``, which does all-reduce, residual and norm in one kernel; eager
and compiled into one graph. On GPUs a token is one CUDA graph. First a small model in float32 shows that all
ways give the same tokens; then a large one in bfloat16 is timed.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flagcx as fc
import flagcx.interop.torch

EPS = 1e-5
Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(this rank's part of a sum, residual, weight) -> the norm of the sum with the residual, and that sum."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model.

    Attributes:
        hidden: Width of the residual.
        inner: Width inside the feed-forward part.
        layers: Number of layers.
        heads: Number of heads.
        kv_heads: Number of heads of keys and values.
        vocabulary: Number of tokens that there are.
        context: Most tokens of a sequence.
    """

    hidden: int = 4096
    inner: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32000
    context: int = 512


SMALL = Sizes(256, 512, 3, 8, 8, 512, 64)


class Model(torch.nn.Module):
    """One rank's part of the model: its heads, and its columns and rows of the feed-forward part.

    Args:
        sizes: The sizes of the whole.
        batch: Sequences that are decoded together.
        rank: This rank.
        size: Number of ranks.
        device: Where the weights are.
        dtype: Their dtype.
    """

    def __init__(
        self, sizes: Sizes, batch: int, rank: int, size: int, device: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.sizes, self.size, self.head = sizes, size, sizes.hidden // sizes.heads
        self.queries, self.keys = sizes.heads // size, sizes.kv_heads // size
        generator, made = (
            torch.Generator(device).manual_seed(1),
            partial(torch.empty, device=device, dtype=dtype),
        )

        def weight(rows: int, columns: int, axis: int | None) -> torch.nn.Parameter:
            """A matrix that is the same on all ranks, or this rank's part of it along an axis."""
            whole = made(rows, columns).normal_(0, columns**-0.5, generator=generator)
            part = whole if axis is None else whole.chunk(size, axis)[rank].contiguous()
            return torch.nn.Parameter(part, requires_grad=False)

        def norm() -> torch.nn.Parameter:
            return torch.nn.Parameter(
                made(sizes.hidden).normal_(1, 0.1, generator=generator), requires_grad=False
            )

        def layer() -> torch.nn.ParameterDict:
            h, d = sizes.hidden, self.head
            return torch.nn.ParameterDict(
                {
                    "q": weight(sizes.heads * d, h, 0), "k": weight(sizes.kv_heads * d, h, 0),
                    "v": weight(sizes.kv_heads * d, h, 0), "o": weight(h, sizes.heads * d, 1),
                    "gate": weight(sizes.inner, h, 0), "up": weight(sizes.inner, h, 0),
                    "down": weight(h, sizes.inner, 1), "before": norm(), "between": norm(),
                }
            )  # fmt: skip

        self.embedding = weight(sizes.vocabulary, sizes.hidden, None)
        self.layers = torch.nn.ModuleList(layer() for _ in range(sizes.layers))
        self.last = norm()
        self.output = weight(sizes.vocabulary, sizes.hidden, 0)
        self.first_token = rank * (sizes.vocabulary // size)
        for parameters in self.layers:  # one product for those that have the same input
            parameters["qkv"] = joined(parameters, "q", "k", "v")
            parameters["gate_up"] = joined(parameters, "gate", "up")
        shape = sizes.layers, batch, self.keys, sizes.context, self.head
        self.register_buffer("key_cache", made(shape).zero_())
        self.register_buffer("value_cache", made(shape).zero_())
        self.register_buffer("places", torch.arange(sizes.context, device=device))
        angles = torch.outer(
            torch.arange(sizes.context, device=device),
            5e5 ** -(torch.arange(0, 1, 2 / self.head, device=device)),
        )
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]).to(dtype))

    def forward(
        self,
        token: torch.Tensor,
        place: torch.Tensor,
        add: Add,
        gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The next token of each sequence.

        Args:
            token: The last tokens, of shape (batch,).
            place: How many tokens came before, of shape (1,).
            add: All-reduce, residual and norm.
            gather: The candidates of all ranks, of shape (ranks, batch, 2).
        """
        residual = F.embedding(token, self.embedding)
        h = F.rms_norm(residual, residual.shape[-1:], self.layers[0]["before"], EPS)
        batch, turn = len(token), self.turns[:, place]
        mask = (self.places <= place)[None, None, None]
        for i, weights in enumerate(self.layers):
            q, k, v = (
                (h @ weights["qkv"].T)
                .view(batch, -1, 1, self.head)
                .split([self.queries, self.keys, self.keys], 1)
            )
            self.key_cache[i].index_copy_(2, place, turned(k, turn))
            self.value_cache[i].index_copy_(2, place, v)
            attended = F.scaled_dot_product_attention(
                turned(q, turn), self.key_cache[i], self.value_cache[i], mask, enable_gqa=True
            )
            h, residual = add(attended.reshape(batch, -1) @ weights["o"].T, residual, weights["between"])
            gate, up = (h @ weights["gate_up"].T).chunk(2, -1)
            after = self.layers[i + 1]["before"] if i + 1 < len(self.layers) else self.last
            h, residual = add((F.silu(gate) * up) @ weights["down"].T, residual, after)
        value, index = (h @ self.output.T).float().max(-1)
        found = gather(torch.stack([value, (index + self.first_token).float()], -1))
        return found.gather(0, found[..., :1].argmax(0, keepdim=True) + torch.zeros_like(found[:1]).long())[
            0, :, 1
        ].long()


def joined(weights: Any, *names: str) -> torch.nn.Parameter:
    """Several matrices as one; they are removed."""
    return torch.nn.Parameter(torch.cat([weights.pop(name) for name in names]), requires_grad=False)


def turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary positions: the two halves of each head, turned by the angles of a place."""
    a, b = x.chunk(2, -1)
    cos, sin = turn
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


# -- the ways to add up ------------------------------------------------------------------------------


def normed(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual and norm after an all-reduce."""
    residual = residual + total
    return F.rms_norm(residual, residual.shape[-1:], weight, EPS), residual


def reduced(
    part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.distributed's all-reduce, in place."""
    dist.all_reduce(part)
    return normed(part, residual, weight)


def through_functional(name: str) -> Add:
    """The functional collective, which compiled models and DTensor use."""
    return lambda part, residual, weight: normed(functional.all_reduce(part, "sum", name), residual, weight)


def fused(name: str) -> Add:
    """All-reduce, residual and norm in one kernel."""
    return lambda part, residual, weight: torch.ops.flagcx.allreduce_rmsnorm(
        part, residual, weight, EPS, name
    )


def gathered(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The candidates of all ranks."""
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    return lambda mine: gather(mine[None], 0, name) + 0


@dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        name: Its name in the table.
        add: How sums are made.
        enhanced: Whether the group is flagcx's meanwhile.
        compiled: Whether the model is compiled into one graph.
        alone: Whether nothing is communicated.
    """

    name: str
    add: Add
    enhanced: bool = False
    compiled: bool = False
    alone: bool = False


def ways(name: str, backend: str) -> list[Way]:
    """All ways, for the group of a name; gloo has none for GPUs, which it serves through the host."""
    each = through_functional(name)
    theirs = [Way(backend, reduced), Way(f"{backend} compiled", each, compiled=True)]
    return [
        Way("no communication", normed, alone=True),
        Way("no communication compiled", normed, compiled=True, alone=True),
        *([] if backend == "gloo" and torch.cuda.is_available() else theirs),
        Way("flagcx", reduced, enhanced=True),
        Way("flagcx compiled", each, enhanced=True, compiled=True),
        Way("flagcx fused", fused(name), enhanced=True),
        Way("flagcx fused compiled", fused(name), enhanced=True, compiled=True),
    ]


class Decoder:
    """Decodes token after token; on a GPU each token is a replay of one CUDA graph.

    Args:
        model: The model.
        way: How sums are made.
        batch: Number of sequences.
        name: The group's name.
    """

    def __init__(self, model: Model, way: Way, batch: int, name: str) -> None:
        self.model, self.device = model, model.embedding.device
        self.token, self.place = (torch.zeros(n, dtype=torch.long, device=self.device) for n in (batch, 1))
        self.prompt = torch.arange(batch, device=self.device) * 7 % model.sizes.vocabulary
        gather = (lambda mine: mine[None]) if way.alone else gathered(name)
        self.step = partial(model, add=way.add, gather=gather)
        if way.compiled:
            torch._dynamo.reset()
            backend = "inductor" if self.device.type == "cuda" else "aot_eager"
            compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
            self.step = partial(compiled, add=way.add, gather=gather)
        self.replay: Callable[[], Any] = self.advance
        if self.device.type == "cuda":
            self._capture()

    def advance(self) -> None:
        """One token."""
        self.token.copy_(self.step(self.token, self.place))
        self.place.add_(1)

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.advance()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.advance()
        self.replay = graph.replay

    def begin(self) -> None:
        """Goes back to the prompt."""
        self.token.copy_(self.prompt)
        self.place.zero_()

    def tokens(self, count: int) -> list[list[int]]:
        """The next tokens of all sequences."""
        self.begin()
        found = []
        for _ in range(count):
            self.replay()
            found.append(self.token.tolist())
        return found

    def ms_a_token(self, count: int, rounds: int = 5) -> float:
        """The time of a token; the median of some rounds, on the slowest rank."""
        times = []
        for _ in range(rounds):
            self.begin()
            self._wait()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                self.replay()
            self._wait()
            times.append((time.perf_counter() - start) / count * 1e3)
        slowest = torch.tensor(statistics.median(times), device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def compare(sizes: Sizes, batch: int, count: int, dtype: torch.dtype, only: list[str], timed: bool) -> bool:
    """Decodes in all ways, and prints a line for each; returns whether all give the same tokens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    name, backend = dist.group.WORLD.group_name, dist.get_backend()
    model, want, equal = Model(sizes, batch, rank, size, device, dtype), None, True
    for way in ways(name, backend):
        if only and way.name not in only:
            continue
        if way.enhanced:
            fc.enhance_process_group()
        with torch.no_grad():
            decoder = Decoder(model, way, batch, name)
            tokens = decoder.tokens(count)
            ms = decoder.ms_a_token(count) if timed else 0.0
        fc.restore_process_group()
        words = f"{ms:9.3f} ms a token" if timed else ""
        if not way.alone:
            want = want or tokens
            pairs = zip(chain(*tokens), chain(*want), strict=True)
            words += f"  {sum(a == b for a, b in pairs)} of {batch * count} tokens the same"
            equal = equal and tokens == want
        if rank == 0:
            print(f"  {way.name:28}{words}", flush=True)
        del decoder
    return equal


def main() -> int:
    """Compares the tokens of all ways, then their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small model alone, on any machine")
    parser.add_argument("--batches", default="1,8,64", help="sequences that are decoded together")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--only", default="", help="names of ways, by commas")
    for field, value in Sizes().__dict__.items():
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=value)
    given = parser.parse_args()
    sizes = Sizes(**{field: getattr(given, field) for field in Sizes().__dict__})
    only = [name for name in given.only.split(",") if name]
    join()
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"{size} ranks; {SMALL} in float32:", flush=True)
    equal = compare(SMALL, 3, min(given.tokens, 24), torch.float32, only, timed=False)
    for batch in () if given.small else map(int, given.batches.split(",")):
        if rank == 0:
            print(f"{sizes} in bfloat16, {batch} sequences:", flush=True)
        compare(sizes, batch, given.tokens, torch.bfloat16, only, timed=True)
    if rank == 0:
        print("all ways give the same tokens" if equal else "TOKENS DIFFER", flush=True)
    dist.destroy_process_group()
    return 0 if equal else 1


def join() -> None:
    """Joins the ranks: by torchrun's variables, or by flagcx's where it has started them.

    NCCL takes no two ranks on one GPU; then the group is gloo's, and flagcx serves its tensors on GPUs.
    """
    gpus, at = torch.cuda.device_count(), os.environ
    if "MASTER_ADDR" in at:
        local, size = int(at["LOCAL_RANK"]), int(at["LOCAL_WORLD_SIZE"])
        where: dict[str, Any] = {}
    else:
        comm = fc.init()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = comm.broadcast_object(free.getsockname()[1])
        local, size = comm.rank, comm.size
        where = {"init_method": f"tcp://127.0.0.1:{port}", "rank": comm.rank, "world_size": comm.size}
    if gpus:
        torch.cuda.set_device(local % gpus)
    dist.init_process_group("nccl" if gpus >= size else "gloo", **where)


if __name__ == "__main__":
    sys.exit(main())
