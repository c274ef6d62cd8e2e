"""NumPy arrays between hosts by UCX, for ranks that anything started: torchrun, Slurm, Dask, by hand.

Over TCP, InfiniBand or RoCE, whatever UCX finds; ``UCX_TLS`` and ``UCX_NET_DEVICES`` choose.
"""

from __future__ import annotations

import base64

from flagcx.transport.base import TransportContext
from flagcx.transport.network.transport import MISSING, NetworkTransport, compare_cards
from flagcx.transport.ucx.engine import UcxEngine
from flagcx.transport.ucx.process import REMEDY, context_of_process, load_ucxx


class UcxTransport(NetworkTransport):
    """Carries NumPy arrays between ranks on any hosts, whatever started them.

    Args:
        context: The communicator, which must have a store; ``config.timeout_s`` matters here.

    Raises:
        MissingDependencyError: ucxx is not installed, on any of the ranks.
    """

    name = "ucx"

    def __init__(self, context: TransportContext) -> None:
        kind = problem = card = ""
        try:
            ucxx = load_ucxx()
            worker = ucxx.UCXWorker(
                context_of_process(), enable_delayed_submission=False, enable_python_future=False
            )
            card = base64.b64encode(worker.address.tobytes()).decode()
        except ImportError as error:
            kind = MISSING
            problem = (
                f"NumPy arrays travel between hosts by UCX, which needs ucxx ({error}): {REMEDY}; or start "
                f"the ranks with mpirun, for MPI"
            )
        cards, memory = compare_cards(context, kind, problem, card)
        addresses = [base64.b64decode(str(told)) for told in cards]
        super().__init__(context, UcxEngine(ucxx, worker, context.rank, addresses), memory)
