"""Looks into a job's store from outside: which ranks are there, and what those note that wait long.

An observer shows that it knows the key, as a rank does, and gets one answer; the store takes nothing from it.
"""

from __future__ import annotations

import json
from typing import Any

from flagcx.bootstrap import wire
from flagcx.bootstrap.greeting import greet, open_connection
from flagcx.bootstrap.store_state import OBSERVER
from flagcx.errors import BootstrapError

_MOST_NBYTES = 32 << 20


def observe(address: str, authkey: bytes, timeout_s: float = 5.0) -> dict[str, Any]:
    """Asks a store what it knows of its ranks.

    Args:
        address: The store's address.
        authkey: The key of the job.
        timeout_s: How long to wait for it, in seconds.

    Returns:
        ``connected``: the ranks that are; ``lost``: what happened to those that are lost; ``notes``: the
        notes of ranks that wait long, by rank and kind of array, as ``flagcx.transport.waits`` leaves them.

    Raises:
        BootstrapError: The store cannot be reached, or does not know the key.
    """
    connection = open_connection(address, timeout_s, -1)
    try:
        header, body = greet(
            address, authkey, {OBSERVER: True}, connection, lambda: _hear(connection, timeout_s)
        )
        if "error" in header:
            raise BootstrapError(f"the store at {address} lets nobody look: {header['error']}")
        found: dict[str, Any] = json.loads(body)
        return found
    except (OSError, EOFError, ValueError, wire.MalformedError) as error:
        raise BootstrapError(f"the store at {address} does not answer: {error}") from None
    finally:
        connection.close()


def _hear(connection: Any, timeout_s: float) -> bytes:
    if not connection.poll(timeout_s):
        raise OSError(f"nothing within {timeout_s:g} s")
    heard: bytes = connection.recv_bytes(_MOST_NBYTES)
    return heard
