"""Another rank serves the store when the rank that did is gone.

Where a rank's process runs the store (any launcher but flagcx's own), every other rank listens at an address
of its own from the start, and serves nothing there. When the store is lost, the ranks that go on try these
addresses in the order of the ranks::

    refused, or ended      that rank is gone too: the next one
    silent                 it lives, and has yet to find out: wait
    its own address        all ranks before it are gone: it serves, and watches those that have not come
    a store's greeting     join it

A listening socket goes with its process, so this works between hosts too.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Mapping, Sequence

from flagcx.bootstrap.sockets import parse_address
from flagcx.bootstrap.store_server import StoreServer
from flagcx.daemon import Daemon
from flagcx.descriptors import occupy_standard_streams

_LOOK_S = 0.05
_CONNECT_S = 5.0
_GONE = "its process ended or was killed"


class Standby:
    """A rank's readiness to serve the store, and where the other ranks would.

    Args:
        rank: This rank.
        size: How many ranks the job has.
        own_address: The address of this host that the others reach; "" where all are on one.
        authkey: The key of the job's store.

    Attributes:
        addresses: Where each rank listens, "" for one that does not; empty until all have told.
        server: What serves, or would.
        serves: Whether it does.
    """

    def __init__(self, rank: int, size: int, own_address: str, authkey: bytes) -> None:
        self.rank = rank
        at = f"{own_address}:0" if own_address else None
        self.server = StoreServer(size, at, authkey, host=f"rank {rank}", host_rank=rank)
        self.addresses: Sequence[str] = ()
        self.serves = False

    def serve(self, gone: Mapping[int, str]) -> None:
        """Serves the store from now on, in this process.

        Args:
            gone: The ranks that are known to be gone, and how.
        """
        self.serves = True
        for rank, how in gone.items():
            self.server.rank_ended(rank, how)
        self.server.start()
        others = [rank for rank in range(len(self.addresses)) if rank != self.rank and rank not in gone]
        Daemon(self._watch, "flagcx-standby", (others,)).start()

    def _watch(self, ranks: list[int]) -> None:
        """Tells the store which ranks end, until each has connected to it: from then on the store sees it."""
        with contextlib.ExitStack() as probes:
            waiting = {}
            for rank in ranks:
                probe = _connect(self.addresses[rank])
                if probe is None:
                    self.server.rank_ended(rank, _GONE)
                else:
                    waiting[rank] = probes.enter_context(probe)
            while waiting and not self.server.ended:
                ended, _, _ = select.select(list(waiting.values()), [], [], _LOOK_S)
                for rank, probe in list(waiting.items()):
                    if rank in self.server.connected():
                        del waiting[rank]
                    elif probe in ended:
                        del waiting[rank]
                        self.server.rank_ended(rank, _GONE)

    def close(self) -> None:
        """Stops listening, unless this rank serves the store."""
        if not self.serves:
            self.server.close()


def _connect(address: str) -> socket.socket | None:
    """A connection to a rank that lives, which ends when it does."""
    if not address:
        return None
    family, place = parse_address(address)
    occupy_standard_streams()
    probe = socket.socket(family)
    try:
        probe.settimeout(_CONNECT_S)
        probe.connect(place)
    except OSError:
        probe.close()
        return None
    return probe
