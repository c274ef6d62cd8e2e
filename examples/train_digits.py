"""Trains a small network to read handwritten digits, on as many ranks as you start.

    flagcx run -n 4 examples/train_digits.py
    mpirun -n 4 python examples/train_digits.py
    python examples/train_digits.py                  # alone: one rank, the same network
    flagcx run -n 4 examples/train_digits.py --overlap

Data-parallel training in three sentences. Every rank holds the whole network and looks at its own part
of each batch. After each backward pass the ranks add up their gradients, so that all of them take the
same step. The adding up is one line, ``comm.allreduce(network.gradient)``; all else is a network as you'd
write it for yourself. With ``--overlap`` each layer's gradients are added up as soon as they are ready, while
those of the layers before it are still being worked out.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track
from sklearn.datasets import load_digits

import flagcx as fc

LAYERS = (64, 128, 64, 10)  # 8 x 8 pixels in, two hidden layers, a score for each digit out
HELD_OUT = 360  # of 1797 pictures, to test on
MOMENTUM = 0.9


class Network:
    """A network of fully connected layers, with its gradients worked out by hand.

    All parameters lie in one flat array and all gradients in another; ``layers`` holds views into both.
    So one all-reduce per step does for the whole network, however many layers it has.
    """

    def __init__(self, xp: Any, seed: int) -> None:
        self.xp = xp
        shapes = [(inputs + 1, outputs) for inputs, outputs in pairwise(LAYERS)]  # + 1 for the bias
        size = sum(rows * columns for rows, columns in shapes)
        self.parameters, self.gradient = xp.zeros(size, xp.float32), xp.zeros(size, xp.float32)
        self.layers, start, random = [], 0, np.random.default_rng(seed)
        for rows, columns in shapes:
            stop = start + rows * columns
            weights = self.parameters[start:stop].reshape(rows, columns)
            weights[:-1] = xp.asarray(random.normal(0, np.sqrt(2 / rows), (rows - 1, columns)))
            self.layers.append((weights, self.gradient[start:stop].reshape(rows, columns)))
            start = stop

    def forward(self, pixels: Any) -> list[Any]:
        """Returns the input of each layer in turn and, last, the scores of the ten digits."""
        values = [pixels]
        for weights, _ in self.layers:
            values.append(values[-1] @ weights[:-1] + weights[-1])
            if weights is not self.layers[-1][0]:
                # tanh is smooth, so ranks that round differently stay close. (With a ReLU, a last bit
                # can decide between 0 and 1 in the slope, and two trainings slowly part.)
                values[-1] = self.xp.tanh(values[-1])
        return values

    def backward(
        self, pixels: Any, labels: Any, batch: int, ready: Callable[[int], None] = lambda layer: None
    ) -> None:
        """Sets ``gradient`` to what these pictures add to the gradient of the mean loss of a batch.

        Dividing by the size of the *whole* batch makes the sum over the ranks the mean over the batch,
        even if one rank has more pictures than another, or none. ``ready`` is called with the number of each
        layer, the last one first, once its part of the gradient is done.
        """
        xp = self.xp
        *inputs, scores = self.forward(pixels)
        likelihood = xp.exp(scores - scores.max(axis=1, keepdims=True))
        likelihood /= likelihood.sum(axis=1, keepdims=True)  # softmax
        slope = (likelihood - xp.eye(LAYERS[-1], dtype=xp.float32)[labels]) / xp.float32(batch)
        for layer in reversed(range(len(self.layers))):
            (weights, gradient), values = self.layers[layer], inputs[layer]
            gradient[:-1] = values.T @ slope
            gradient[-1] = slope.sum(axis=0)
            ready(layer)
            slope = (slope @ weights[:-1].T) * (1 - values**2)  # the derivative of tanh

    def accuracy(self, pixels: Any, labels: Any) -> float:
        """The share of pictures that are read right."""
        return float((self.forward(pixels)[-1].argmax(axis=1) == labels).mean())


def batches(count: int, batch: int, epochs: int, seed: int) -> Iterator[Any]:
    """Yields the rows of each batch. The seed is the same on all ranks, and so are the batches."""
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        order = random.permutation(count)
        yield from (order[start : start + batch] for start in range(0, count, batch))


def train(comm: Any, network: Network, pixels: Any, labels: Any, lr: float, steps: Iterable[Any]) -> float:
    """Trains ``network`` and returns the seconds that this rank spent in communication."""
    communication_s, velocity = 0.0, network.xp.zeros_like(network.parameters)
    comm.broadcast(network.parameters, root=0)  # everybody starts where rank 0 does
    for rows in steps:
        mine = rows[comm.rank :: comm.size]
        network.backward(pixels[mine], labels[mine], batch=len(rows))
        start = time.perf_counter()
        comm.allreduce(network.gradient)  # here the ranks talk to each other
        communication_s += time.perf_counter() - start
        velocity = MOMENTUM * velocity - lr * network.gradient
        network.parameters += velocity
    return communication_s


def train_overlapped(
    comm: Any, network: Network, pixels: Any, labels: Any, lr: float, steps: Iterable[Any]
) -> float:
    """Trains like ``train``, but adds up each layer's gradients while those before it are worked out."""
    waiting_s, velocity = 0.0, network.xp.zeros_like(network.parameters)
    comm.broadcast(network.parameters, root=0)
    gradients = [gradient for _, gradient in network.layers]
    with fc.GradientSynchronizer(comm, gradients, average=False) as sync:
        for rows in steps:
            mine = rows[comm.rank :: comm.size]
            network.backward(pixels[mine], labels[mine], batch=len(rows), ready=sync.ready)
            start = time.perf_counter()
            sync.wait()
            waiting_s += time.perf_counter() - start
            velocity = MOMENTUM * velocity - lr * network.gradient
            network.parameters += velocity
    return waiting_s


def choose_arrays(comm: Any) -> Any:
    """CuPy if there is a GPU for each rank (or they share one), else NumPy. The code above is the same."""
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() < comm.size and not comm.config.share_gpu:
            return np
        return cupy  # fc.init() has made this rank's GPU the current one
    except (ImportError, RuntimeError):  # no CuPy, or no driver
        return np


def load_pictures(xp: Any, seed: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Loads scikit-learn's digits, shuffled: pixels and labels to train on, and those held out."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    pixels = xp.asarray(digits.data[order] / 16, xp.float32)
    labels = xp.asarray(digits.target[order])
    return (pixels[HELD_OUT:], labels[HELD_OUT:]), (pixels[:HELD_OUT], labels[:HELD_OUT])


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    epochs: Annotated[int, typer.Option(min=1, help="Times through the training set.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="Pictures in a step, over all ranks.")] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.1,
    seed: Annotated[int, typer.Option(help="For the first weights and the order of the pictures.")] = 0,
    check: Annotated[bool, typer.Option("--check", help="Compare with what one rank alone learns.")] = False,
    overlap: Annotated[bool, typer.Option("--overlap", help="Add gradients up as they come.")] = False,
) -> None:
    """Trains a small network on handwritten digits, data-parallel over all ranks."""
    began = time.perf_counter()
    with fc.init() as comm:
        xp = choose_arrays(comm)
        training, test = load_pictures(xp, seed)
        steps = list(batches(len(training[0]), batch, epochs, seed))
        network = Network(xp, seed)
        bar = track(steps, "training", disable=comm.rank != 0)
        learn = train_overlapped if overlap else train
        communication_s = learn(comm, network, *training, lr, bar)

        digest = hashlib.sha256(network.parameters.tobytes()).hexdigest()
        equal = len(set(comm.allgather_object(digest))) == 1
        alone = comm.split(color=comm.rank) if check else None  # one rank in each communicator
        if comm.rank != 0:
            return
        seconds = time.perf_counter() - began
        print(f"held-out accuracy  {network.accuracy(*test):.1%}")
        print(f"parameters         {'equal' if equal else 'DIFFERENT'} on {comm.size} ranks, bit by bit")
        print(f"time               {seconds:.2f} s, of which {communication_s:.2f} s in communication")
        times = f"{len(steps)} steps" if overlap else f"{len(steps)} all-reduces"
        print(f"bytes added up     {len(steps) * network.gradient.nbytes:,} in {times}")
        if alone:
            reference = Network(xp, seed)
            train(alone, reference, *training, lr, steps)
            difference = float(abs(network.parameters - reference.parameters).max())
            print(f"check              parameters within {difference:.1e} of those that one rank learns")
            equal = equal and difference <= 1e-4
        raise typer.Exit(0 if equal else 1)


if __name__ == "__main__":
    app()
