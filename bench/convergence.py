"""How far training comes with compressed gradients, beside the dense one's, with three seeds.

    python bench/convergence.py --json bench/results/it.jsonl    # all tasks, 4 ranks
    python bench/convergence.py --quick                          # one seed, whose chance decides nothing
    python bench/convergence.py --plot picture.png --stored bench/results/convergence_epyc_2_cores.jsonl
    python bench/convergence.py --tasks transformer --steps 300 --codecs int8,topk+

Same seeds, same batches, same number of steps; only ``compression=`` differs. "+" after a codec is error
feedback. A training with feedback (and bf16, fp8, int8 without) should end within 2% of the dense loss on
average over the seeds; int4, topk and powersgd without it should be visibly worse. After the last step all
ranks must have the same parameters, bit by bit.

=============  ========================================================================================
digits         examples/train_digits.py, NumPy; the loss on the training set, with weight decay
transformer    examples/train_transformer.py, NumPy; the loss on held-out text
cnn            a convolutional network through DistributedDataParallel's hook, torch on the CPU; the loss
               on its pictures, shifted and with noise anew
=============  ========================================================================================

topk and powersgd begin gently, and after topk the optimizer has less momentum and so much larger steps
(``choose_feedback`` and ``choose_momentum`` in examples/train_transformer.py). "topk+ plain" is topk with
feedback alone, as ``compression="topk"`` in a GradientSynchronizer or hook gives it, and "topk+ early" is one
that gathers all momentum before it sends, as ``Feedback("topk", momentum=0.9)`` does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from convergence_plot import draw
from harness import version_of, versions
from report import format_table, list_of, write_json_lines

import flagcx as fc

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CODECS = (
    "bf16", "fp8", "int8", "int4+", "topk+", "topk+ plain", "topk+ early", "randomk+", "powersgd+",
    "int4", "topk", "powersgd",
)  # fmt: skip
QUICK = ("topk+",)
PROMISED = ("bf16", "fp8", "int8", "int4+", "topk+", "powersgd+")
NOT_PROMISED = (("digits", "topk+"),)  # decay acts at once there, and the gradients that hold against it late
WITHIN = 1.02
DECAY = np.float32(0.02)
MOMENTUM = 0.9
STEPS = {"digits": 1000, "transformer": 1500, "cnn": 800}


@dataclass(frozen=True)
class Row:
    """The trainings with one codec.

    Attributes:
        task, ranks, steps, codec: What was trained.
        losses: The loss after the last step, with each seed.
        ratios: Those over the dense training's with the same seed.
        equal: Whether all ranks ended with the same bits.
        seconds: How long all of them took.
    """

    task: str
    ranks: int
    steps: int
    codec: str
    losses: tuple[float, ...]
    ratios: tuple[float, ...]
    equal: bool
    seconds: float

    @property
    def ratio(self) -> float:
        """The mean over the seeds."""
        return fmean(self.ratios)

    @property
    def verdict(self) -> str:
        """Whether it came as far as promised."""
        if not self.equal:
            return "RANKS DIFFER"
        if self.codec not in PROMISED or (self.task, self.codec) in NOT_PROMISED:
            return ""
        return "ok" if self.ratio <= WITHIN else "MISSED"


def recipe(codec: str, steps: int) -> tuple[Any, float]:
    """The memory for a training, None for the dense one, and the momentum of its optimizer."""
    sys.path.insert(0, str(EXAMPLES))
    import train_transformer as example

    name, fed = codec.split("+")[0], "+" in codec
    if codec.endswith(" plain"):
        return fc.compression.Feedback(name), MOMENTUM
    feedback = example.choose_feedback("none" if codec == "dense" else name, steps, fed)
    if codec.endswith(" early"):
        return fc.compression.Feedback(feedback.codec, momentum=MOMENTUM), 0.0
    return feedback, example.choose_momentum(name, fed)


def gain(feedback: Any, momentum: float) -> float:
    """How much larger steps are than with the usual momentum, so that gradients move parameters as far."""
    early = feedback is not None and feedback.momentum
    return 1.0 if early else (1 - momentum) / (1 - MOMENTUM)


def train_transformer(comm: Any, codec: str, steps: int, seed: int) -> tuple[np.ndarray, float]:
    """Returns the network's parameters and its loss."""
    feedback, momentum = recipe(codec, steps)
    import train_transformer as example

    text, test, letters = example.load_text(np)
    network = example.Transformer(np, example.Size(), letters, seed)
    rate = 0.2 * gain(feedback, momentum) * (1 - MOMENTUM) / (1 - momentum)  # train makes it larger itself
    example.train(comm, network, text, steps, 16, rate, feedback, momentum)
    return network.parameters, example.held_out_loss(network, test)


def train_digits(comm: Any, codec: str, steps: int, seed: int) -> tuple[np.ndarray, float]:
    """Returns the network's parameters and its loss."""
    feedback, momentum = recipe(codec, steps)
    import train_digits as example

    (pixels, labels), _ = example.load_pictures(np, seed)
    network = example.Network(np, seed)
    shapes = [weights.shape for weights, _ in network.layers]
    slot = None if feedback is None else feedback.slot("network", shapes)
    epochs = -(-steps // -(-len(pixels) // 64))
    velocity = np.zeros_like(network.parameters)
    for step, rows in enumerate(list(example.batches(len(pixels), 64, epochs, seed))[:steps]):
        mine = rows[comm.rank :: comm.size]
        network.backward(pixels[mine], labels[mine], batch=len(rows))
        comm.allreduce(network.gradient, compression=slot)
        rate = np.float32(0.05 * (1 - 0.9 * step / steps))
        velocity *= np.float32(momentum)
        velocity -= np.float32(rate * gain(feedback, momentum)) * network.gradient
        network.parameters += velocity - rate * DECAY * network.parameters
    scores = network.forward(pixels)[-1].astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    likelihood = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return network.parameters, float(-likelihood[np.arange(len(labels)), labels].mean())


def train_cnn(comm: Any, codec: str, steps: int, seed: int) -> tuple[np.ndarray, float]:
    """Returns the network's parameters and its loss."""
    import convergence_cnn

    feedback, momentum = recipe(codec, steps)
    return convergence_cnn.train(comm, feedback, momentum, gain(feedback, momentum), steps, seed)


TASKS = {"digits": train_digits, "transformer": train_transformer, "cnn": train_cnn}


def training(task: str, codec: str, steps: int, seeds: Sequence[int]) -> tuple[list[float], bool]:
    """What every rank does: the loss with each seed, and whether all ranks are equal."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    comm = fc.init(tuning=False)
    losses, equal = [], True
    for seed in seeds:
        parameters, loss = TASKS[task](comm, codec, steps, seed)
        digests = comm.allgather_object(hashlib.sha256(parameters.tobytes()).hexdigest())
        losses.append(loss)
        equal = equal and len(set(digests)) == 1
    return losses, equal


def measure(
    task: str,
    codec: str,
    ranks: int,
    steps: int,
    seeds: Sequence[int],
    dense: Row | None = None,
    threads: bool = False,
) -> Row:
    """Trains with one codec."""
    began, arguments = time.monotonic(), (task, codec, steps, seeds)
    losses, equal = fc.launch(training, ranks, arguments, timeout_s=1200, threads=threads)[0]
    ratios = [loss / base for loss, base in zip(losses, dense.losses if dense else losses, strict=True)]
    seconds = round(time.monotonic() - began, 1)
    return Row(task, ranks, steps, codec, tuple(losses), tuple(ratios), equal, seconds)


def main(given: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where a promise is not kept."""
    options = _parse(given)
    if options.stored:
        draw([json.loads(line) for line in options.stored.read_text().splitlines()], WITHIN, options.plot)
        return 0
    missed, drawn = 0, list[dict[str, Any]]()
    for task in options.tasks:
        rows, steps = list[Row](), options.steps or STEPS[task]
        for codec in ("dense", *options.codecs):
            dense = rows[0] if rows else None
            threads = options.threads and task != "cnn"
            row = measure(task, codec, options.ranks, steps, range(options.seeds), dense, threads)
            rows.append(row)
            missed += row.verdict not in ("", "ok") and (options.seeds > 1 or not row.equal)
            print(f"{task} {codec}: {' '.join(_cells(row)[1:])}", file=sys.stderr, flush=True)
            facts = {**asdict(row), "ratio": row.ratio, "threads": threads, "versions": _versions()}
            drawn.append(facts)
            if options.json:
                write_json_lines(options.json, [facts])
        print(f"\n{task}, {options.ranks} ranks, {steps} steps, {options.seeds} seeds")
        print(format_table(["codec", "loss", "/ dense", "from", "to", ""], map(_cells, rows)), flush=True)
    if options.plot:
        draw(drawn, WITHIN, options.plot)
    return int(bool(missed))


def _cells(row: Row) -> list[str]:
    ratios = row.ratio, min(row.ratios), max(row.ratios)
    return [row.codec, f"{fmean(row.losses):.4f}", *(f"{ratio:.3f}" for ratio in ratios), row.verdict]


def _versions() -> dict[str, str]:
    return versions(flagcx=fc.__version__, torch=version_of("torch"), sklearn=version_of("scikit-learn"))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=list_of(str), default=list(TASKS))
    parser.add_argument("--codecs", type=list_of(str), default=list(CODECS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3, help="trainings with each codec; default 3")
    parser.add_argument("--steps", type=int, help="default 1000 for digits, 1500 transformer, 800 cnn")
    parser.add_argument("--quick", action="store_true", help=f"one seed, and {', '.join(QUICK)} alone")
    parser.add_argument("--threads", action="store_true", help="NumPy's ranks are threads of this process")
    parser.add_argument("--json", type=Path, metavar="PATH", help="append the results there, one a line")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the ratios: .png, .svg or .pdf")
    parser.add_argument("--stored", type=Path, metavar="PATH", help="draw these results, and train nothing")
    options = parser.parse_args(arguments)
    if options.stored and not options.plot:
        parser.error("--stored draws results that there are; add --plot PATH")
    if options.quick:
        options.seeds, options.codecs = 1, list(QUICK)
    return options


if __name__ == "__main__":
    sys.exit(main())
