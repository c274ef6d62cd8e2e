"""The overlap benchmark: how it finds the batch, and what its trace says."""

from __future__ import annotations

import overlap
import pytest
from overlap_trace import COMMUNICATION, COMPUTATION, beside_ms


@pytest.mark.parametrize(("fixed_s", "sample_s"), [(0.0, 1e-4), (0.05, 1e-4), (0.05, 1e-3)])
def test_the_batch_is_found_whatever_the_computation_needs_besides(fixed_s, sample_s):
    wanted, known, batch = 0.1, [], 256
    for _ in range(overlap.CALIBRATIONS):
        known.append((batch, fixed_s + sample_s * batch))
        batch = overlap.next_batch(known, wanted)
        if batch == known[-1][0]:
            break
    assert abs(fixed_s + sample_s * batch - wanted) <= 8 * sample_s


def test_a_batch_is_never_below_8_though_that_takes_too_long():
    assert overlap.next_batch([(256, 10.0)], 0.001) == 8
    assert overlap.next_batch([(256, 10.0), (8, 9.0)], 0.001) == 8


def test_what_lies_beside_a_computation():
    ms = 1_000_000
    spans = [
        (COMPUTATION, "layer 0", 0, 10 * ms),
        (COMPUTATION, "layer 1", 12 * ms, 20 * ms),
        (COMMUNICATION, "bucket", 5 * ms, 15 * ms),
        (COMMUNICATION, "bucket", 19 * ms, 29 * ms),
    ]
    assert beside_ms(spans) == (20.0, 9.0)
    assert beside_ms(spans[2:]) == (20.0, 0.0)
    assert beside_ms(spans[:2]) == (0.0, 0.0)
