"""What ranks of several hosts do in tests: ``python -m tests.cli.tuning_jobs tune``, or ``choose``."""

from __future__ import annotations

import sys

import numpy as np

import flagcx as fc
from flagcx.cli import main
from flagcx.cli import tune as tuning
from flagcx.selection import table
from flagcx.selection.candidates import Request


def choose() -> None:
    """Says on each rank where its times come from, and why a call is chosen as it is."""
    # However busy this machine is, its links are those that were measured.
    table._LINKS = dict.fromkeys(table._LINKS, 1e5)
    comm = fc.init()
    x = np.ones(64, np.float32)
    assert (comm.allreduce(x) == comm.size).all()
    selector = comm._host.selector
    print(f"{selector.note}: {selector.choose(Request('allreduce', x.nbytes, comm.size)).reason}")


def tune() -> None:
    """Measures short messages."""
    tuning.sizes = lambda quick: [256]  # type: ignore[assignment]
    sys.argv = ["flagcx", "tune", "--quick", "-c", "allreduce"]
    main()


if __name__ == "__main__":
    {"choose": choose, "tune": tune}[sys.argv[1]]()
