"""What the peer kernels do under compute-sanitizer: every form and way, small, on a GPU for each rank."""

from __future__ import annotations

import sys

from tests.gpu import move_jobs, peer_jobs, row_jobs

if __name__ == "__main__":
    faults = peer_jobs.every_form([5, 1003, 9000], [0, 1]) + peer_jobs.seen_arrays([1000, 9001])
    faults += move_jobs.v_forms(2) + move_jobs.messages(2)
    ways, kinds = ["one_shot", "two_shot", "ring"], [("bfloat16", "float32")]
    faults += row_jobs.shapes(["norm", "int8"], kinds, [(3, 4096), (2, 333), (1, 16384)], ways)
    sys.exit("\n".join(faults) or None)
