"""Trains a small network on ranks that may be lost at any moment, and goes on from the last step done.

    flagcx run -n 4 --elastic examples/elastic_training.py                    # lost ranks are started again
    flagcx run -n 4 --elastic --max-restarts 0 --min-ranks 2 examples/elastic_training.py    # or left out

Kill a rank while it runs: ``kill -9 PID``, each rank prints its own. The calls of the others raise an error,
they call ``fc.init()`` again, and it returns on all of them when the last has come. A rank that was started
again has nothing, so the rank that is furthest gives its state to all. Each step takes the same pictures
whatever happens, so a training that lost ranks ends with the very bits of one in which they left by plan:

    flagcx run -n 4 examples/elastic_training.py --leave 2:150                # rank 2 leaves before step 150
"""

import hashlib
import os
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import flagcx as fc

CLASSES, INPUTS, HIDDEN, BATCH = 10, 32, 64, 256
LEARNING_RATE, MOMENTUM = np.float32(0.05), np.float32(0.9)


class Training:
    """All that a rank must have to go on: the parameters, their velocity, and how many steps were done."""

    def __init__(self) -> None:
        random = np.random.default_rng(1)
        first = random.normal(0, INPUTS**-0.5, (INPUTS, HIDDEN))
        second = random.normal(0, HIDDEN**-0.5, (HIDDEN, CLASSES))
        self.parameters = np.concatenate([first.ravel(), second.ravel()]).astype(np.float32)
        self.velocity = np.zeros_like(self.parameters)
        self.step = 0

    def layers(self, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The two layers' views into a flat array of parameters or gradients."""
        first, second = flat[: INPUTS * HIDDEN], flat[INPUTS * HIDDEN :]
        return first.reshape(INPUTS, HIDDEN), second.reshape(HIDDEN, CLASSES)

    def gradient(self, points: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """What these points add to the gradient of the mean loss of a whole batch."""
        first, second = self.layers(self.parameters)
        hidden = np.tanh(points @ first)
        scores = hidden @ second
        likelihood = np.exp(scores - scores.max(axis=1, keepdims=True))
        likelihood /= likelihood.sum(axis=1, keepdims=True)
        slope = (likelihood - np.eye(CLASSES, dtype=np.float32)[labels]) / np.float32(BATCH)
        gradient = np.empty_like(self.parameters)
        of_first, of_second = self.layers(gradient)
        of_second[...] = hidden.T @ slope
        of_first[...] = points.T @ (slope @ second.T * (1 - hidden**2))
        return gradient

    def accuracy(self, points: np.ndarray, labels: np.ndarray) -> float:
        """The share of points that are put into their class."""
        first, second = self.layers(self.parameters)
        return float(((np.tanh(points @ first) @ second).argmax(axis=1) == labels).mean())

    def save(self, file: Path) -> None:
        """Writes a checkpoint, whole or not at all."""
        draft = file.with_suffix(f".{os.getpid()}")
        with draft.open("wb") as opened:
            np.savez(opened, parameters=self.parameters, velocity=self.velocity, step=self.step)
        draft.replace(file)

    def load(self, file: Path) -> None:
        """Reads a checkpoint."""
        saved = np.load(file)
        self.parameters, self.velocity = saved["parameters"], saved["velocity"]
        self.step = int(saved["step"])

    def take_from_the_furthest(self, comm: fc.Communicator) -> None:
        """Gives all ranks the state of the one that has done the most steps."""
        steps = comm.allgather_object(self.step)
        furthest = int(np.argmax(steps))
        comm.broadcast(self.parameters, root=furthest)
        comm.broadcast(self.velocity, root=furthest)
        self.step = steps[furthest]


def sample(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points around the centre of their class, the same on every rank."""
    centres = np.random.default_rng(0).normal(0, 0.7, (CLASSES, INPUTS))
    random = np.random.default_rng(seed)
    labels = random.integers(CLASSES, size=count)
    return (centres[labels] + random.normal(0, 1, (count, INPUTS))).astype(np.float32), labels


def train(
    comm: fc.Communicator, training: Training, steps: int, leave: dict[int, int], checkpoint: Path | None
) -> None:
    """Trains to the last step, or until a rank is lost: then a call raises."""
    training.take_from_the_furthest(comm)
    if comm.rank == 0:
        print(f"from step {training.step} on {comm.size} ranks", flush=True)
    while training.step < steps:
        leaving = [rank for rank, step in leave.items() if step == training.step]
        if leaving:
            rank = int(os.environ["FLAGCX_RANK"])
            part = comm.split(color=None if rank in leaving else 0)
            if part is None:
                return
            comm = part
        points, labels = sample(BATCH, seed=1000 + training.step)
        gradient = training.gradient(points[comm.rank :: comm.size], labels[comm.rank :: comm.size])
        comm.allreduce(gradient)  # raises where a rank was lost; the step is then not done
        training.velocity = MOMENTUM * training.velocity - LEARNING_RATE * gradient
        training.parameters += training.velocity
        training.step += 1
        if comm.rank == 0 and (training.step % 20 == 0 or training.step == steps):
            print(f"step {training.step}", flush=True)
            if checkpoint is not None:
                training.save(checkpoint)


def main(
    steps: int = 400,
    leave: Annotated[
        list[str] | None, typer.Option(help="RANK:STEP, for a rank that leaves by plan.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Where rank 0 saves the training.")] = None,
) -> None:
    """Trains, and begins anew with fc.init() whenever a rank was lost."""
    print(f"pid {os.getpid()}", flush=True)
    plan = {int(rank): int(step) for rank, _, step in (one.partition(":") for one in leave or [])}
    training = Training()
    if checkpoint is not None and checkpoint.exists():
        training.load(checkpoint)
    while True:
        comm = fc.init()
        try:
            train(comm, training, steps, plan, checkpoint)
            break
        except (fc.PeerDiedError, fc.AbortedError) as error:
            print(f"after step {training.step}: {error}", flush=True)
    if training.step == steps:
        digest = hashlib.sha256(training.parameters.tobytes()).hexdigest()[:16]
        print(f"accuracy {training.accuracy(*sample(2000, seed=7)):.3f}, parameters {digest}", flush=True)


if __name__ == "__main__":
    typer.run(main)
