"""Shows this process's rank to ``flagcx status``, and starts its flight recorder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flagcx.bootstrap.environment import Identity
from flagcx.bootstrap.rank_page import RankPage
from flagcx.bootstrap.store import Store
from flagcx.config import Config, environment, state_directory
from flagcx.diagnosis.recorder import FlightRecorder

_OFF = ("0", "off", "no", "false")


class OwnPage:
    """The page and the recorder of one rank. Made before the ranks meet; ``join`` when they have.

    Args:
        store: The rank's end of the job's store, which the page is put on.
        identity: The rank's place in the job.
        config: The settings.
    """

    def __init__(self, store: Store, identity: Identity, config: Config) -> None:
        key = getattr(store, "authkey", b"") or secrets.token_bytes(16)
        self._rank = identity.rank
        self._place = getattr(store, "address", ""), key.hex()
        self._job = f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self._page = store.page = RankPage(
            {
                "rank": identity.rank,
                "size": identity.size,
                "host": identity.host,
                "launcher": identity.launcher,
                "script": _script(),
                "store": hashlib.sha256(b"flagcx job\0" + key).hexdigest()[:12],
                "began": time.time(),
                "phase": "init",
            }
        )
        directory = config.record.strip()
        self._recorder: FlightRecorder | None = None
        if identity.size > 1 and directory.lower() not in _OFF:
            where = Path(directory) if directory else state_directory(environment()) / "records"
            with contextlib.suppress(OSError):  # no descriptor is left for it
                self._recorder = FlightRecorder(self._page, config, where.absolute())

    def card(self) -> bytes:
        """What the other ranks learn of this one when they meet."""
        pipe = -1 if self._recorder is None else self._recorder.pipe
        inode = 0 if pipe < 0 else os.fstat(pipe).st_ino
        host = self._page.state()["host"]
        return json.dumps([host, self._job, os.getpid(), self._page.descriptor, pipe, inode]).encode()

    def join(self, cards: Sequence[bytes], ranks: Sequence[int]) -> list[str]:
        """Takes what the ranks that have joined told of themselves.

        Args:
            cards: The card of each.
            ranks: Their numbers in the job.

        Returns:
            The host of each.
        """
        told = dict(zip(ranks, map(json.loads, cards), strict=True))
        hosts = [card[0] for card in told.values()]
        shown: dict[str, Any] = {"job": told[ranks[0]][1], "phase": "joined"}
        if len(set(hosts)) > 1:
            shown |= {"hosts": {rank: card[0] for rank, card in told.items()}, "place": self._place}
        self._page.neighbours = {
            rank: (card[2], card[3]) for rank, card in told.items() if card[0] == told[self._rank][0]
        }
        self._page.set(**shown)
        if self._recorder is not None:
            self._recorder.start(self._rank, shown["job"], told)
        return hosts

    def record_uncaught(self) -> None:
        """Records the exception that ends this process, if one does that is not recorded yet."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, Exception):
            self._page.record(error)

    def close(self) -> None:
        """Ends both."""
        if self._recorder is not None:
            self._recorder.close()
        self._page.close()


def _script() -> str:
    """The program in a few words."""
    name = sys.argv[0] if sys.argv and sys.argv[0] else "python"
    return "python -c" if name == "-c" else os.path.basename(name)
