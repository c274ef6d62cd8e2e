"""Trains a small transformer to write like Python's manual, letter by letter, on as many ranks as you start.

    flagcx run -n 4 examples/train_transformer.py
    flagcx run -n 4 examples/train_transformer.py --compression int8
    flagcx run -n 4 examples/train_transformer.py --compression topk --density 0.01
    flagcx run -n 4 examples/train_transformer.py --checkpoints states --resume

As in train_digits.py, every rank holds the whole network, looks at its part of each batch, and the ranks add
up their gradients. Here the gradients may travel compressed: ``--compression`` names a codec of
flagcx.compression. What a codec loses in one step is added to the next (error feedback), unless you say
``--no-feedback``: try it with topk and powersgd. These two begin gently, while the network still changes
fast: topk sends more of the elements in the first quarter of the steps, powersgd all in the first half. And
as topk's elements come late, momentum on top of them is shorter, and each step so much larger that gradients
move the network as far as before.

With ``--checkpoints`` each rank saves its state now and then, and with ``--resume`` the training goes on from
there, after a crash too: it ends with the very bits of one that went through.

The network is written out, backward passes and all, in a page of NumPy: each function returns its result and
a function that carries the slope of the loss back through it. The text is the manual that comes with Python.
"""

import hashlib
import os
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import flagcx as fc

MOMENTUM = 0.9
LATE_MOMENTUM = 0.7  # where most elements come late anyway
HELD_OUT = 0.05  # the end of the text, to test on
LETTERS = 300_000


@dataclass(frozen=True)
class Size:
    """How large the network is."""

    context: int = 32  # letters that it looks back
    width: int = 48
    heads: int = 4
    layers: int = 1


class Transformer:
    """A transformer that predicts the next letter.

    All parameters lie in one flat array and all gradients in another; ``at`` and ``slope`` hold views into
    both by name. So one all-reduce per step does for the whole network.
    """

    def __init__(self, xp: Any, size: Size, letters: int, seed: int) -> None:
        self.xp, self.size, width = xp, size, size.width
        shapes: dict[str, tuple[int, ...]] = {"letters": (letters, width), "places": (size.context, width)}
        for i in range(size.layers):
            shapes |= {f"{i}.norm1": (2, width), f"{i}.qkv": (width, 3 * width), f"{i}.out": (width, width)}
            shapes |= {
                f"{i}.norm2": (2, width),
                f"{i}.up": (width, 4 * width),
                f"{i}.down": (4 * width, width),
            }
        shapes |= {"norm": (2, width), "head": (width, letters)}
        self.shapes = shapes
        total = sum(int(np.prod(shape)) for shape in shapes.values())
        self.parameters, self.gradient = xp.zeros(total, xp.float32), xp.zeros(total, xp.float32)
        self.at, self.slope, start, random = {}, {}, 0, np.random.default_rng(seed)
        for name, shape in shapes.items():
            stop = start + int(np.prod(shape))
            self.at[name] = self.parameters[start:stop].reshape(shape)
            self.slope[name] = self.gradient[start:stop].reshape(shape)
            if "norm" in name:
                self.at[name][0] = 1
            else:
                spread = 0.02 if name in ("letters", "places") else shape[0] ** -0.5
                self.at[name][...] = xp.asarray(random.normal(0, spread, shape), xp.float32)
            start = stop

    def forward(self, text: Any) -> tuple[Any, Callable[[Any], None]]:
        """Returns the scores of the next letter at each place, and the way back."""
        xp, ways = self.xp, []

        def step(result: tuple[Any, Callable]) -> Any:
            ways.append(result[1])
            return result[0]

        x = self.at["letters"][text] + self.at["places"][: text.shape[1]]
        for i in range(self.size.layers):
            y = step(self._linear(step(self._norm(x, f"{i}.norm1")), f"{i}.qkv"))
            x = x + step(self._linear(step(self._attention(y)), f"{i}.out"))
            y = step(self._swish(step(self._linear(step(self._norm(x, f"{i}.norm2")), f"{i}.up"))))
            x = x + step(self._linear(y, f"{i}.down"))
        scores = step(self._linear(step(self._norm(x, "norm")), "head"))

        def back(slope: Any) -> None:
            slope = ways[-2](ways[-1](slope))
            for i in range(self.size.layers)[::-1]:
                layer = ways[8 * i : 8 * i + 8]
                for part in (layer[4:], layer[:4]):  # around each part leads a short cut
                    inner = slope
                    for way in part[::-1]:
                        inner = way(inner)
                    slope = slope + inner
            self.slope["places"][: text.shape[1]] += slope.sum(axis=0)
            add_at = np.add.at if xp is np else xp.add.at
            add_at(self.slope["letters"], text, slope)

        return scores, back

    def _linear(self, x: Any, name: str) -> tuple[Any, Callable]:
        weights, slopes = self.at[name], self.slope[name]

        def back(slope: Any) -> Any:
            slopes[...] += x.reshape(-1, x.shape[-1]).T @ slope.reshape(-1, slope.shape[-1])
            return slope @ weights.T

        return x @ weights, back

    def _norm(self, x: Any, name: str) -> tuple[Any, Callable]:
        (scale, shift), slopes = self.at[name], self.slope[name]
        centred = x - x.mean(axis=-1, keepdims=True)
        inverse = 1 / self.xp.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.xp.float32(1e-5))
        unit = centred * inverse

        def back(slope: Any) -> Any:
            slopes[0] += (slope * unit).sum(axis=(0, 1))
            slopes[1] += slope.sum(axis=(0, 1))
            slope = slope * scale
            along = (slope * unit).mean(axis=-1, keepdims=True)
            return inverse * (slope - slope.mean(axis=-1, keepdims=True) - unit * along)

        return unit * scale + shift, back

    def _swish(self, x: Any) -> tuple[Any, Callable]:
        sigmoid = 1 / (1 + self.xp.exp(-x))

        def back(slope: Any) -> Any:
            return slope * sigmoid * (1 + x * (1 - sigmoid))

        return x * sigmoid, back

    def _attention(self, qkv: Any) -> tuple[Any, Callable]:
        xp, heads = self.xp, self.size.heads
        rows, places, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        q, k, v = qkv.reshape(rows, places, 3, heads, -1).transpose(2, 0, 3, 1, 4)
        factor = xp.float32((width // heads) ** -0.5)
        hidden = xp.triu(xp.full((places, places), -1e9, xp.float32), 1)  # nobody sees what comes after
        scores = q @ k.swapaxes(-1, -2) * factor + hidden
        weight = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        weight /= weight.sum(axis=-1, keepdims=True)

        def back(slope: Any) -> Any:
            slope = slope.reshape(rows, places, heads, -1).transpose(0, 2, 1, 3)
            of_weight = slope @ v.swapaxes(-1, -2)
            of_scores = weight * (of_weight - (of_weight * weight).sum(axis=-1, keepdims=True)) * factor
            three = xp.stack([of_scores @ k, of_scores.swapaxes(-1, -2) @ q, weight.swapaxes(-1, -2) @ slope])
            return three.transpose(1, 3, 0, 2, 4).reshape(rows, places, 3 * width)

        return (weight @ v).transpose(0, 2, 1, 3).reshape(rows, places, width), back

    def backward(self, text: Any, letters_in_batch: int) -> None:
        """Sets ``gradient`` to what these lines add to the gradient of the mean loss of a batch."""
        self.gradient[...] = 0
        if not len(text):
            return
        scores, back = self.forward(text[:, :-1])
        likelihood = self._likelihood(scores)
        rows, places = self.xp.ogrid[: text.shape[0], : text.shape[1] - 1]
        likelihood[rows, places, text[:, 1:]] -= 1
        back(likelihood / self.xp.float32(letters_in_batch))

    def loss(self, text: Any) -> float:
        """The mean loss over some lines: what the true next letter's likelihood is short of, in nats."""
        likelihood = self._likelihood(self.forward(text[:, :-1])[0])
        rows, places = self.xp.ogrid[: text.shape[0], : text.shape[1] - 1]
        return float(-self.xp.log(likelihood[rows, places, text[:, 1:]]).mean())

    def _likelihood(self, scores: Any) -> Any:
        likelihood = self.xp.exp(scores - scores.max(axis=-1, keepdims=True))
        likelihood /= likelihood.sum(axis=-1, keepdims=True)
        return likelihood


def load_text(xp: Any) -> tuple[Any, Any, int]:
    """The manual's letters as numbers: to train on, and held out; and how many different ones there are."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    raw = np.frombuffer(text.encode("ascii", "ignore")[:LETTERS], np.uint8)
    kinds, numbers = np.unique(raw, return_inverse=True)
    cut = int(len(numbers) * (1 - HELD_OUT))
    return xp.asarray(numbers[:cut]), xp.asarray(numbers[cut:]), len(kinds)


def lines_of(xp: Any, text: Any, starts: np.ndarray, context: int) -> Any:
    """Pieces of the text, each of ``context`` letters and the next one."""
    return text[xp.asarray(starts[:, None] + np.arange(context + 1))]


def train(
    comm: Any,
    network: Transformer,
    text: Any,
    steps: int,
    batch: int,
    lr: float,
    feedback: Any = None,
    momentum: float = MOMENTUM,
    checkpoints: "Checkpoints | None" = None,
) -> float:
    """Trains ``network`` and returns the seconds that this rank spent in communication.

    The learning rate is that for the usual momentum; with another one a gradient moves the network as far.

    The rate rises in the first tenth of the steps and falls to zero over all. The batches are the same for
    any number of ranks.
    """
    xp, context = network.xp, network.size.context
    random, communication_s = np.random.default_rng(1), 0.0
    velocity = xp.zeros_like(network.parameters)
    slot = None if feedback is None else feedback.slot("network", list(network.shapes.values()))
    lr *= (1 - momentum) / (1 - MOMENTUM)
    comm.broadcast(network.parameters, root=0)  # everybody starts where rank 0 does
    first = 0
    if checkpoints is not None and checkpoints.found is not None:
        state = checkpoints.load()
        first = int(state["step"])
        network.parameters[...], velocity[...] = (xp.asarray(state[k]) for k in ("parameters", "velocity"))
        if feedback is not None:
            feedback.load_state_dict(state)
    for step in range(steps):
        starts = random.integers(0, len(text) - context - 1, batch)
        if step < first:
            continue  # but for the drawing of numbers, all this was done before
        network.backward(lines_of(xp, text, starts[comm.rank :: comm.size], context), batch * context)
        began = time.perf_counter()
        comm.allreduce(network.gradient, compression=slot)  # here the ranks talk to each other
        communication_s += time.perf_counter() - began
        velocity *= xp.float32(momentum)
        velocity += network.gradient
        rate = lr * min(1.0, 10 * (step + 1) / steps) * (1 - step / steps)
        network.parameters -= xp.float32(rate) * velocity
        if checkpoints is not None and checkpoints.is_due(step + 1):
            state = {
                "step": step + 1,
                "parameters": on_host(network.parameters),
                "velocity": on_host(velocity),
            }
            checkpoints.save(step + 1, state | ({} if feedback is None else feedback.state_dict()))
    return communication_s


class Checkpoints:
    """The last states of all ranks, in a folder that all of them see: a file for each rank and step.

    A state counts when all ranks have saved theirs, and only then those before it are removed. So there is
    one to go on from, whenever a rank is killed.

    Args:
        comm: The ranks.
        folder: Where the files are.
        every: Steps from one state to the next.
        settings: The options of the training, which must be the same when it goes on.
        resume: Whether to go on from the last state, if there is one.

    Attributes:
        found: The step to go on from, and the number of ranks that saved it; None to begin anew.
    """

    def __init__(self, comm: Any, folder: Path, every: int, settings: str, resume: bool) -> None:
        self.comm, self.folder, self.every, self.settings = comm, folder, every, settings
        folder.mkdir(parents=True, exist_ok=True)
        self.found = comm.broadcast_object(max(self._complete(), default=None) if resume else None)

    def _complete(self) -> list[tuple[int, int]]:
        """The steps that all ranks have saved, each with their number."""
        files = [tuple(map(int, file.stem.split("-"))) for file in self.folder.glob("*-*-*.npz")]
        saved = {(step, ranks) for step, ranks, _ in files}
        return [one for one in saved if all((*one, rank) in files for rank in range(one[1]))]

    def _file(self, step: int, ranks: int, rank: int) -> Path:
        return self.folder / f"{step}-{ranks}-{rank}.npz"

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Saves what this rank has after a step."""
        file = self._file(step, self.comm.size, self.comm.rank)
        unfinished = file.with_suffix(".unfinished")
        with unfinished.open("wb") as stream:
            np.savez(stream, settings=self.settings, **state)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)  # all of a file, or none
        self.comm.barrier()
        for old in self.folder.glob("*-*-*.*") if self.comm.rank == 0 else ():
            if int(old.stem.split("-")[0]) != step:
                old.unlink()

    def load(self) -> dict[str, Any]:
        """This rank's state; that of another one where more ranks go on than there were."""
        step, ranks = self.found
        path = self._file(step, ranks, self.comm.rank % ranks)
        try:
            with np.load(path) as file:
                state = dict(file)
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{path} is damaged ({error}); remove the files of step {step} to go on before it"
            ) from error
        if str(state["settings"]) != self.settings:
            raise ValueError(f"{self.folder} has a training with {state['settings']}, not {self.settings}")
        return state


def on_host(x: Any) -> np.ndarray:
    """A NumPy array, also of a CuPy array."""
    return x.get() if hasattr(x, "get") else x


def held_out_loss(network: Transformer, text: Any) -> float:
    """The loss on lines that were not trained on, all over the held-out text."""
    context = network.size.context
    starts = np.arange(0, len(text) - context - 1, context)[:200]
    return network.loss(lines_of(network.xp, text, starts, context))


def choose_arrays(comm: Any) -> Any:
    """CuPy if there is a GPU for each rank (or they share one), else NumPy. The code above is the same."""
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() < comm.size and not comm.config.share_gpu:
            return np
        return cupy  # fc.init() has made this rank's GPU the current one
    except (ImportError, RuntimeError):  # no CuPy, or no driver
        return np


def choose_feedback(
    compression: str, steps: int, feedback: bool = True, density: float = 0.01, rank: int = 4
) -> Any:
    """What remembers the network's gradients between steps; None to send them plainly."""
    if compression == "none":
        return None
    codec: Any = compression
    if compression == "topk":
        codec = fc.compression.TopK(density, warmup_steps=steps // 4)
    elif compression == "powersgd":
        codec = fc.compression.PowerSGD(rank, warmup_steps=steps // 2)
    return fc.compression.Feedback(codec, residual=feedback)


def choose_momentum(compression: str, feedback: bool = True) -> float:
    """The optimizer's momentum."""
    return LATE_MOMENTUM if compression == "topk" and feedback else MOMENTUM


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps.")] = 1500,
    batch: Annotated[int, typer.Option(min=1, help="Lines in a step, over all ranks.")] = 16,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.2,
    seed: Annotated[int, typer.Option(help="For the first weights.")] = 0,
    compression: Annotated[str, typer.Option(help="none, int8, int4, topk, powersgd, ...")] = "none",
    feedback: Annotated[bool, typer.Option(help="Whether what is lost comes with the next step.")] = True,
    density: Annotated[float, typer.Option(help="Share of the gradients that topk sends.")] = 0.01,
    rank: Annotated[int, typer.Option(help="Rank of powersgd.")] = 4,
    checkpoints: Annotated[Path | None, typer.Option(help="Folder for the ranks' states.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps from one saved state to the next.")] = 100,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last state.")] = False,
) -> None:
    """Trains a small transformer on Python's manual, data-parallel over all ranks."""
    began = time.perf_counter()
    with fc.init() as comm:
        xp = choose_arrays(comm)
        training, test, letters = load_text(xp)
        network = Transformer(xp, Size(), letters, seed)
        memory = choose_feedback(compression, steps, feedback, density, rank)
        momentum = choose_momentum(compression, feedback)
        settings = f"{steps=} {batch=} {lr=} {seed=} {compression=} {feedback=} {density=} {rank=}"
        saved = None
        if checkpoints is not None:
            saved = Checkpoints(comm, checkpoints, every, settings, resume)
        elif resume:
            raise typer.BadParameter("--resume needs --checkpoints FOLDER")
        communication_s = train(comm, network, training, steps, batch, lr, memory, momentum, saved)
        digest = hashlib.sha256(network.parameters.tobytes()).hexdigest()
        equal = len(set(comm.allgather_object(digest))) == 1
        if comm.rank != 0:
            return
        seconds, count = time.perf_counter() - began, network.parameters.size
        print(f"held-out loss      {held_out_loss(network, test):.4f} nats a letter")
        print(f"parameters         {count:,}, {'equal' if equal else 'DIFFERENT'} on {comm.size} ranks")
        print(f"their SHA-256      {digest}")
        print(f"time               {seconds:.1f} s, of which {communication_s:.1f} s in communication")
        raise typer.Exit(0 if equal else 1)


if __name__ == "__main__":
    app()
