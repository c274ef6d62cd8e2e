"""The regions of the index range, one a rank; see ``flagcx.compression.sparse_sum``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Regions:
    """The cut of the index range, kept from call to call.

    Attributes:
        bounds: Where each region begins, and where the last one ends; None before the first call.
        age: Calls so far.
    """

    bounds: np.ndarray | None = None
    age: int = 0
