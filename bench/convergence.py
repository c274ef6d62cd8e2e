"""Whether training comes as far with compressed gradients: final losses beside the dense one's.

    python bench/convergence.py                      # digits (1,000 steps) and transformer (1,500), 4 ranks
    python bench/convergence.py --tasks transformer --steps 300 --codecs int8,topk+

Same seeds, same batches, same number of steps; only ``compression=`` differs. "+" behind a codec is error
feedback. A run with feedback (and int8 without) should end within 2% of the dense loss; int4, topk and
powersgd without it should be visibly worse. After the last step all ranks must have the same parameters,
bit by bit.

The loss of digits is that on the training set, with weight decay, which keeps it from going to zero: held-out
losses of so small a set say little. The transformer's is that on held-out text; topk and powersgd begin
gently and topk gathers momentum before it sends, as examples/train_transformer.py arranges.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from report import format_table, write_json_lines

import flagcx as fc

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CODECS = (
    "bf16", "fp8", "int8", "int4+", "topk+", "randomk+", "powersgd+", "int4", "topk", "powersgd", "sparse",
)  # fmt: skip
PROMISED = ("int8", "int4+", "topk+", "powersgd+")
WITHIN = 1.02
DECAY = np.float32(0.02)


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        task, ranks, steps, codec: What was trained.
        loss: The loss after the last step.
        ratio: That over the dense training's.
        equal: Whether all ranks ended with the same bits.
        seconds: How long it took.
    """

    task: str
    ranks: int
    steps: int
    codec: str
    loss: float
    ratio: float
    equal: bool
    seconds: float

    @property
    def verdict(self) -> str:
        """Whether it came as far as promised."""
        if not self.equal:
            return "RANKS DIFFER"
        return "" if self.codec not in PROMISED else "ok" if self.ratio <= WITHIN else "MISSED"


def feedback_of(codec: str):
    """The memory for a training; None for the dense one."""
    if codec == "dense":
        return None
    return fc.compression.Feedback(codec.removesuffix("+"), residual=codec.endswith("+"))


def train_transformer(comm, codec: str, steps: int):
    """Returns the network's parameters and its loss."""
    sys.path.insert(0, str(EXAMPLES))
    import train_transformer as example

    training, test, letters = example.load_text(np)
    network = example.Transformer(np, example.Size(), letters, seed=0)
    name = "none" if codec == "dense" else codec.removesuffix("+")
    feedback = example.choose_feedback(name, steps, codec.endswith("+"))
    example.train(comm, network, training, steps, 16, 0.2, feedback)
    return network.parameters, example.held_out_loss(network, test)


def train_digits(comm, codec: str, steps: int):
    """Returns the network's parameters and its loss."""
    sys.path.insert(0, str(EXAMPLES))
    import train_digits as example

    (pixels, labels), _ = example.load_pictures(np, seed=0)
    network = example.Network(np, seed=0)
    feedback = feedback_of(codec)
    shapes = [weights.shape for weights, _ in network.layers]
    slot = None if feedback is None else feedback.slot("network", shapes)
    epochs = -(-steps // -(-len(pixels) // 64))
    velocity = np.zeros_like(network.parameters)
    for step, rows in enumerate(list(example.batches(len(pixels), 64, epochs, 0))[:steps]):
        mine = rows[comm.rank :: comm.size]
        network.backward(pixels[mine], labels[mine], batch=len(rows))
        comm.allreduce(network.gradient, compression=slot)
        rate = np.float32(0.05 * (1 - 0.9 * step / steps))
        velocity = np.float32(0.9) * velocity - rate * network.gradient
        network.parameters += velocity - rate * DECAY * network.parameters
    scores = network.forward(pixels)[-1].astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    likelihood = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return network.parameters, float(-likelihood[np.arange(len(labels)), labels].mean())


TASKS = {"digits": train_digits, "transformer": train_transformer}
STEPS = {"digits": 1000, "transformer": 1500}


def training(task: str, codec: str, steps: int) -> tuple[float, bool]:
    """What every rank does: the loss, and whether all ranks are equal."""
    comm = fc.init(tuning=False)
    parameters, loss = TASKS[task](comm, codec, steps)
    digests = comm.allgather_object(hashlib.sha256(parameters.tobytes()).hexdigest())
    return loss, len(set(digests)) == 1


def main(given: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where a promise is not kept."""
    options = _parse(given)
    missed = 0
    for task in options.tasks:
        rows, steps = list[Row](), options.steps or STEPS[task]
        for codec in ("dense", *options.codecs):
            began = time.monotonic()
            loss, equal = fc.launch(training, options.ranks, (task, codec, steps), timeout_s=1200)[0]
            ratio = loss / (rows[0].loss if rows else loss)
            seconds = time.monotonic() - began
            row = Row(task, options.ranks, steps, codec, loss, ratio, equal, round(seconds, 1))
            rows.append(row)
            missed += row.verdict not in ("", "ok")
            print(
                f"{task} {codec}: {loss:.4f}, {ratio:.3f} of dense {row.verdict}", file=sys.stderr, flush=True
            )
        table = [[r.codec, f"{r.loss:.4f}", f"{r.ratio:.3f}", r.verdict] for r in rows]
        print(f"\n{task}, {options.ranks} ranks, {steps} steps")
        print(format_table(["codec", "loss", "/ dense", ""], table), flush=True)
        if options.json:
            write_json_lines(options.json, (asdict(row) for row in rows))
    return int(bool(missed))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=lambda s: s.split(","), default=list(TASKS))
    parser.add_argument("--codecs", type=lambda s: s.split(","), default=list(CODECS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, help="default 1000 for digits, 1500 for the transformer")
    parser.add_argument("--json", type=Path, metavar="PATH", help="append the results there, one a line")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
