"""A small convolutional network that learns digits through torch's DDP; see ``convergence.py``."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from flagcx.interop.torch import ddp_hook

BATCH, RATE, DECAY = 64, 0.05, 5e-4


def train(
    comm: Any, feedback: Any, momentum: float, gain: float, steps: int, seed: int
) -> tuple[np.ndarray, float]:
    """Trains with the gradients of each bucket compressed, or plain ones where ``feedback`` is None.

    The rate rises in the first tenth of the steps and falls to zero over all; it is ``gain`` times the usual
    one, with another momentum.

    Returns:
        The network's parameters, and its loss on shifted pictures with noise.
    """
    torch.set_num_threads(1)
    if not dist.is_initialized():
        _join(comm)
    torch.manual_seed(seed)
    model = DistributedDataParallel(_network())
    if feedback is not None:
        model.register_comm_hook(None, ddp_hook(feedback))
    # Where momentum is gathered before compression, the decay that the optimizer adds gets none of it.
    early = 0.0 if feedback is None else feedback.momentum
    decay = DECAY / (1 - early)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum, weight_decay=decay)
    pictures, labels = _pictures()
    random, mine = np.random.default_rng(seed), slice(comm.rank, None, comm.size)
    for step in range(steps):
        rows = random.integers(0, len(labels), BATCH)
        inputs = _disturbed(pictures[rows], random)
        rate = gain * RATE * min(1.0, 10 * (step + 1) / steps) * (1 - step / steps)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        cross_entropy(model(inputs[mine]), labels[rows][mine]).backward()
        optimizer.step()
    random = np.random.default_rng(99)
    with torch.no_grad():
        losses = [float(cross_entropy(model.module(_disturbed(pictures, random)), labels)) for _ in range(4)]
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()]), float(np.mean(losses))


def _join(comm: Any) -> None:
    """Makes torch's process group of the ranks."""
    folder = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
    if comm.rank == 0:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=address, rank=comm.rank, world_size=comm.size)


def _network() -> nn.Module:
    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]

    first = [*convolution(1, 16), *convolution(16, 32), nn.MaxPool2d(2), *convolution(32, 32)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def _pictures() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    return torch.tensor(digits.images[:, None] / 16, dtype=torch.float32), torch.tensor(digits.target)


def _disturbed(pictures: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    """The pictures, each moved by up to a pixel, and with noise."""
    moves = random.integers(-1, 2, (len(pictures), 2)).tolist()
    moved = [torch.roll(p, tuple(move), (1, 2)) for p, move in zip(pictures, moves, strict=True)]
    return torch.stack(moved) + torch.tensor(random.normal(0, 0.2, pictures.shape), dtype=torch.float32)
