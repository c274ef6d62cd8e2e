"""Random programs with arrays on GPUs in which one rank deviates: every rank is told, by default."""

from __future__ import annotations

import pytest

from tests.communicator.test_deviations import deviate, not_told

PROGRAMS = 10


def deviate_on_gpus(seeds: range, peer_memory: bool) -> list[tuple[int, str, str]]:
    return deviate(seeds, "cupy", explain_wait_s=0.5, peer_memory=peer_memory)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("batch", range(6))
def test_a_deviating_call_is_told_to_every_rank(ranks, size, batch):
    seeds = range((size * 10 + batch) * PROGRAMS, (size * 10 + batch + 1) * PROGRAMS)
    wrong = not_told(ranks(size, deviate_on_gpus, seeds, batch % 2 == 0))
    assert not wrong, f"{len(wrong)} of {len(seeds)}\n" + "\n".join(map(str, wrong))
