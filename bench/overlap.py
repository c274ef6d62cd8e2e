"""A training step whose gradients are reduced while others are computed, beside the two one after the other.

    flagcx run -n 2 bench/overlap.py --throttle 0.1        # NumPy; a link of 0.1 GB/s between the ranks
    flagcx run -n 2 bench/overlap.py                       # NumPy through shared memory: nothing is lost
    flagcx run -n 2 bench/overlap.py --gpu                 # CuPy; a GPU each
    flagcx run -n 2 --share-gpu bench/overlap.py --gpu     # on one GPU: nothing is lost
    flagcx run -n 2 bench/overlap.py --throttle 0.1 --trace trace.json

Each layer of the network learns by a loss of its own, so gradients come evenly all over the computation.
The batch is as large as it takes for the computation to last as long as the communication. Measured are the
computation alone, the communication alone, one after the other, and both at once, in turns; and that both
ways end with the same parameters, bit by bit. The optimizer's step belongs to the computation; with both at
once it begins with the first bucket that is reduced.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from overlap_trace import save_trace
from report import write_json_lines

import flagcx as fc
from flagcx.config import environment
from flagcx.kernels.cuda import load_cupy

CLASSES, RATE = 16, 1e-3
WIDTH, GPU_WIDTH = 512, 8192
"""Of a layer. A GPU needs larger ones, or the time goes into starting kernels."""
CALIBRATIONS, CLOSE = 8, 0.03
"""How often the batch is chosen anew at most, and how far apart both times may stay."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained, and how.

    Attributes:
        gpu: Whether on GPUs.
        layers: Layers of the network.
        width: Of a layer.
        plain: Whether gradients lie in ordinary arrays, and not in those of ``comm.empty``.
        bucket_bytes: As ``fc.GradientSynchronizer`` takes it.
        compression: Likewise.
        overlap: Likewise.
    """

    gpu: bool
    layers: int
    width: int
    plain: bool
    bucket_bytes: int | None
    compression: str | None
    overlap: bool | None = None

    @property
    def xp(self) -> Any:
        """NumPy or CuPy."""
        return load_cupy() if self.gpu else np


class Network:
    """Layers that each predict the labels through a fixed head, and learn by their own error alone."""

    def __init__(self, comm: fc.Communicator, setting: Setting) -> None:
        xp, layers, width = setting.xp, setting.layers, setting.width
        random = xp.random.default_rng(0)
        self.xp = xp
        self._slope, self._descend = elementwise(xp)

        def normal(rows: int, columns: int) -> Any:
            return random.standard_normal((rows, columns), dtype=xp.float32) * xp.float32(width**-0.5)

        self.weights = [normal(width, width) for _ in range(layers)]
        self.heads = [normal(width, CLASSES) for _ in range(layers)]
        shape, place = (width, width), "gpu" if setting.gpu else "cpu"
        self.gradients = [
            xp.empty(shape, np.float32) if setting.plain else comm.empty(shape, np.float32, device=place)
            for _ in range(layers)
        ]

    def compute(self, x: Any, y: Any, ready: Callable[[int], None]) -> None:
        """Computes all gradients, and calls ``ready`` with the number of each as soon as it's done."""
        xp, factor = self.xp, np.float32(1 / len(x))
        for i, (w, head) in enumerate(zip(self.weights, self.heads, strict=True)):
            h = x @ w
            xp.tanh(h, out=h)
            error = h @ head
            error -= y
            slope = self._slope(error @ head.T, h, factor)
            xp.matmul(x.T, slope, out=self.gradients[i])
            ready(i)
            x = h

    def learn(self, i: int) -> None:
        """The optimizer's step of one layer."""
        self._descend(self.gradients[i], np.float32(RATE), self.weights[i])

    def digest(self) -> list[int]:
        """Sums over the bits of all parameters, in which a change of place shows too."""
        sums = []
        for w in self.weights:
            bits = w.reshape(-1).view(np.uint32).astype(np.uint64)
            sums.append(int(bits.sum()))
            bits *= self.xp.arange(1, bits.size + 1, dtype=np.uint64)
            sums.append(int(bits.sum()))
        return sums


def elementwise(xp: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The slope behind a tanh, and the step down it; on a GPU a kernel each."""
    if xp is not np:
        slope = xp.ElementwiseKernel("T e, T h, T f", "T out", "out = e * (1 - h * h) * f", "slope")
        return slope, xp.ElementwiseKernel("T g, T rate", "T w", "w -= rate * g", "descend")

    def descend(g: np.ndarray, rate: np.float32, w: np.ndarray) -> None:
        w -= rate * g

    return lambda e, h, f: e * (1 - h * h) * f, descend


class Trial:
    """The measured steps of one network on one communicator."""

    def __init__(self, comm: fc.Communicator, setting: Setting) -> None:
        self.comm, self.setting, self.xp = comm, setting, setting.xp
        self.network = Network(comm, setting)
        self.sync = self._synchronizer()
        self.x = self.y = self.xp.zeros(0, np.float32)

    def _synchronizer(self) -> fc.GradientSynchronizer:
        s = self.setting
        return fc.GradientSynchronizer(
            self.comm, self.network.gradients, s.bucket_bytes, s.compression, overlap=s.overlap
        )

    def form_buckets(self) -> None:
        """Forms the buckets anew, for a step as long as it is now."""
        self.sync.close()
        self.sync = self._synchronizer()
        self.overlapped()

    def set_batch(self, batch: int) -> None:
        """Draws a batch, another on each rank."""
        random = self.xp.random.default_rng(1 + self.comm.rank)
        width = len(self.network.weights[0])
        self.x = random.standard_normal((batch, width), dtype=self.xp.float32)
        self.y = random.standard_normal((batch, CLASSES), dtype=self.xp.float32)

    def compute(self) -> None:
        """The computation alone."""
        self.network.compute(self.x, self.y, lambda i: None)
        self.learn()

    def learn(self) -> None:
        """The optimizer's step of all layers."""
        for i in range(len(self.network.weights)):
            self.network.learn(i)

    def communicate(self) -> None:
        """The communication alone."""
        for i in range(len(self.network.gradients)):
            self.sync.ready(i)
        self.sync.wait()

    def one_after_the_other(self) -> None:
        """All gradients first, then all all-reduces: what overlap is measured against."""
        self.network.compute(self.x, self.y, lambda i: None)
        self.communicate()
        self.learn()

    def overlapped(self) -> None:
        """Each bucket as soon as it is full, and each layer learns as soon as its bucket is reduced."""
        self.network.compute(self.x, self.y, self.sync.ready)
        for i in self.sync.reduced():
            self.network.learn(i)

    def finish(self) -> None:
        """Waits for the GPU, if there is one."""
        if self.xp is not np:
            self.xp.cuda.Device().synchronize()

    def time_s(self, step: Callable[[], None]) -> float:
        """Seconds of a step that all ranks begin together, until the last has ended it."""
        self.finish()
        self.comm.barrier()
        start = time.perf_counter()
        step()
        self.finish()
        return max(self.comm.allgather_object(time.perf_counter() - start))

    def calibrate(self, start: int) -> None:
        """Chooses the batch so that the computation takes as long as the communication."""
        known: list[tuple[int, float]] = []
        batch = start
        for _ in range(CALIBRATIONS):
            self.set_batch(batch)
            self.time_s(self.compute)
            wanted, got = (
                statistics.median(self.time_s(step) for _ in range(5))
                for step in (self.communicate, self.compute)
            )
            known.append((batch, got))
            batch = next_batch(known, wanted)
            if abs(got / wanted - 1) < CLOSE or batch in [tried for tried, _ in known]:
                break
        self.set_batch(min(known, key=lambda one: abs(one[1] - wanted))[0])


def next_batch(known: Sequence[tuple[int, float]], wanted_s: float) -> int:
    """The batch that should take so long, on the line through the two last ones or through none at all.

    Args:
        known: Batches and their times in s.
        wanted_s: The time.

    Example:
        >>> next_batch([(100, 3.0)], 1.5), next_batch([(100, 3.0), (50, 2.0)], 1.5)
        (48, 24)
    """
    batch, got = known[-1]
    per_sample = got / batch
    if len(known) > 1:
        before, took = known[-2]
        per_sample = max((got - took) / (batch - before), per_sample / 8)
    return max(round((batch + (wanted_s - got) / per_sample) / 8) * 8, 8)


def compare(trial: Trial, steps: int) -> dict[str, float]:
    """Times each kind of step, in turns; medians in ms."""
    kinds = ("compute", "communicate", "one_after_the_other", "overlapped")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(steps):
        for kind in kinds:
            times[kind].append(trial.time_s(getattr(trial, kind)))
    return {kind: statistics.median(values) * 1e3 for kind, values in times.items()}


def same_parameters(trial: Trial, steps: int) -> bool:
    """Whether both ways of stepping end with the same bits, on all ranks."""
    setting = replace(trial.setting, bucket_bytes=trial.sync.bucket_nbytes)
    digests = []
    for kind in ("one_after_the_other", "overlapped"):
        fresh = Trial(trial.comm, setting)
        fresh.x, fresh.y = trial.x, trial.y
        for _ in range(steps):
            getattr(fresh, kind)()
        fresh.finish()
        digests.append(fresh.network.digest())
        fresh.sync.close()
    everybodys = trial.comm.allgather_object(digests)
    return digests[0] == digests[1] and all(theirs == digests for theirs in everybodys)


def main(
    throttle: Annotated[str, typer.Option(help="A link between the ranks: GB/s, or GB/s,us.")] = "",
    gpu: Annotated[bool, typer.Option("--gpu", help="CuPy arrays.")] = False,
    layers: Annotated[int, typer.Option(min=1)] = 24,
    width: Annotated[int, typer.Option(min=0, help="Of a layer; 0: 512, or 8192 on a GPU.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each kind.")] = 9,
    bucket_bytes: Annotated[int | None, typer.Option(min=1, help="Chosen by the model if not given.")] = None,
    compression: Annotated[str, typer.Option(help="Of the gradients; none by default.")] = "",
    batch: Annotated[int, typer.Option(min=1, help="Batch that the calibration begins with.")] = 256,
    plain: Annotated[bool, typer.Option("--plain", help="Gradients not from comm.empty.")] = False,
    always: Annotated[bool, typer.Option("--always", help="Overlap also where it takes cores.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Where to save a trace for Perfetto.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to append the result as a JSON line.")] = None,
) -> None:
    """Measures a training step with and without overlap."""
    width = width or (GPU_WIDTH if gpu else WIDTH)
    setting = Setting(gpu, layers, width, plain, bucket_bytes, compression or None, always or None)
    with fc.init(throttle=throttle) as comm:
        trial = Trial(comm, setting)
        trial.set_batch(batch)
        trial.overlapped()  # the first step forms the buckets
        trial.calibrate(batch)
        trial.form_buckets()
        times = compare(trial, steps)
        same = same_parameters(trial, 5)
        beside = None if trace is None else save_trace(trial, trace)
        if comm.rank == 0:
            report(trial, times, same, beside, throttle, out)
        trial.sync.close()
        raise typer.Exit(0 if same else 1)


def report(
    trial: Trial,
    times: dict[str, float],
    same: bool,
    beside: tuple[float, float] | None,
    throttle: str,
    out: Path | None,
) -> None:
    """Prints the result, and appends it to a file."""
    larger = max(times["compute"], times["communicate"])
    print(trial.sync)
    print(f"bucket size by      {trial.sync.reason}")
    for kind, time_ms in times.items():
        print(f"{kind.replace('_', ' '):20}{time_ms:9.2f} ms{time_ms / larger:7.2f} x the larger of both")
    print(f"parameters          {'the same' if same else 'DIFFERENT'}, bit by bit, with and without overlap")
    if beside is not None:
        print(
            f"trace               buckets {beside[0]:.2f} ms, beside the computation {beside[1]:.2f} ms of it"
        )
    if out is not None:
        row = {
            "bench": "overlap",
            "ranks": trial.comm.size,
            **asdict(trial.setting),
            "throttle": throttle,
            "batch": len(trial.x),
            "bucket_nbytes": trial.sync.bucket_nbytes,
            "buckets": len(trial.sync.buckets),
            **{f"{kind}_ms": round(time_ms, 3) for kind, time_ms in times.items()},
            "over_larger": round(times["overlapped"] / larger, 3),
            "same_parameters": same,
            **(
                {} if beside is None else {"traced_buckets_ms": beside[0], "beside_computation_ms": beside[1]}
            ),
            "run": versions(trial.xp),
        }
        write_json_lines(out, [row])


def versions(xp: Any) -> dict[str, Any]:
    """What the figures were measured with."""
    found = {"command": " ".join(sys.argv), "python": platform.python_version(), "numpy": np.__version__}
    if xp is not np:
        name = xp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        found |= {"cupy": xp.__version__, "gpu": name, "gpus": xp.cuda.runtime.getDeviceCount()}
        found["float32_products"] = "tf32" if environment().get("CUPY_TF32") == "1" else "float32"
    return found


if __name__ == "__main__":
    typer.run(main)
