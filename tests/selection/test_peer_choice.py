"""What the rule makes of the ranks' own memory."""

from __future__ import annotations

import pytest

from flagcx.selection.selector import Possible, choose_on_device

PACKETS, CHUNKS = frozenset({"peer_packets", "peer_memory"}), frozenset({"peer_memory"})


@pytest.mark.parametrize(
    ("collective", "nbytes", "size", "protocols", "algorithm", "protocol"),
    [
        ("allreduce", 4096, 8, PACKETS, "one_shot", "peer_packets"),
        ("allreduce", 1 << 20, 2, CHUNKS, "one_shot", "peer_memory"),
        ("allreduce", 1 << 20, 8, CHUNKS, "two_shot", "peer_memory"),
        ("allreduce", 1 << 30, 2, CHUNKS, "two_shot", "peer_memory"),
        ("allgather", 4096, 4, PACKETS, "direct", "peer_packets"),
        ("alltoall", 64 << 20, 4, CHUNKS, "direct", "peer_memory"),
    ],
)
def test_the_peers_memory_goes_before_nccl(collective, nbytes, size, protocols, algorithm, protocol):
    choice = choose_on_device(collective, nbytes, size, False, Possible(True, protocols))
    assert (str(choice.algorithm), choice.protocol) == (algorithm, protocol)


def test_blocks_of_different_sizes_do_not_go_through_it():
    assert choose_on_device("allgather", 4096, 4, True, Possible(True, CHUNKS)).protocol == ""
