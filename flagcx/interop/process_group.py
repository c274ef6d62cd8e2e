"""A process group of torch whose collectives are flagcx's.

The collectives take the arguments of torch's own (``torch.distributed.ProcessGroup``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from flagcx.config import Config
from flagcx.interop import collectives
from flagcx.interop.batches import route_batches, unroute_batches
from flagcx.interop.call_queue import CallQueue, Task
from flagcx.interop.membership import Membership, dispatch_modes
from flagcx.interop.no_dynamo import no_dynamo
from flagcx.interop.normalize import as_list, as_lists, as_options, one_per_rank, split_nbytes
from flagcx.interop.tensors import operation_of
from flagcx.interop.work import CallWork, CoalescedWork

logger = logging.getLogger("flagcx")

_BEFORE = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Methods that older versions of torch call by other names."""


@no_dynamo
class FlagcxProcessGroup(ProcessGroup):
    """A process group whose collectives are flagcx's; the original makes all other calls.

    The choice between the two depends only on facts that are the same on all ranks: the collective, dtype,
    operation and kind of device, and whether flagcx could join the ranks.

    Args:
        original: The process group that it replaces.
        store: That group's store.
        config: Settings.
        name: Its name in torch; that of the original by default.

    Attributes:
        original: The process group that it replaces.
        config: Settings.
        membership: This rank's part in flagcx's communicator.
    """

    def __init__(self, original: ProcessGroup, store: Any, config: Config, name: str = "") -> None:
        super().__init__(original.rank(), original.size())
        self.original, self.config = original, config
        self._store, self._name = store, name or original.name()
        self._told: set[str] = set()
        # Nothing here refers to the group in a circle: it must end where its last user drops it, and the
        # threads of its backends with it. One that outlives the interpreter may abort the process.
        self._tell = partial(_tell, self._told, original.group_name)
        self.membership = Membership(store, original.rank(), original.size(), config, self._tell)
        self._is_routed = False
        self._block: list[Any] | None = None
        self._block_device: Any = None
        self._originals_block = False
        self._resemble(original)

    def _resemble(self, original: ProcessGroup) -> None:
        """Registers the original's backends, so that torch's questions to them are answered."""
        names: list[str] = []
        for device in original._device_types:
            backend = original._get_backend(device)
            names.append(backend.name())
            kind = c10d.Backend.backend_type_map.get(names[-1], ProcessGroup.BackendType.CUSTOM)
            self._register_backend(device, kind, backend)
        self._has_nccl = "nccl" in names
        first = "nccl" if "nccl" in names else (names or ["gloo"])[0]
        self._set_default_backend(c10d.Backend.backend_type_map.get(first, ProcessGroup.BackendType.CUSTOM))
        if original.bound_device_id is not None:
            self.bound_device_id = original.bound_device_id
        if original.group_name:
            self._set_group_name(original.group_name)
            self._set_group_desc(original.group_desc)

    def getBackendName(self) -> str:
        """The name of the group's backend in torch."""
        return self._name

    def get_group_store(self) -> Any:
        """The group's store."""
        return self._store

    # -- flagcx's part ----------------------------------------------------------------------------

    @property
    def communicator(self) -> Any:
        """flagcx's communicator of these ranks, or None where it could not join them."""
        queue = self.membership.host_queue()
        return None if queue is None else queue.comm

    def queue_of(self, tensors: Sequence[Any]) -> CallQueue | None:
        """The queue for a call on these tensors; None if the original makes it."""
        return None if self._originals_block else self.membership.queue_of(tensors)

    def _run(
        self, queue: CallQueue, task: Task, tensors: Sequence[Any], opts: Any, value: Any = None
    ) -> CallWork:
        block = self._block
        waits = block is None and not getattr(opts, "asyncOp", True)
        work = queue.run(task, tensors, waits, value)
        if block is not None:
            block.append(work)
        return work

    def _originally(self, name: str, *args: Any) -> Any:
        """Makes a call on the original; an older torch may have another name for it."""
        if name not in self._told:
            self._tell(name)
        if self._block is not None and not self._originals_block:
            self.original._start_coalescing(self._block_device)
            self._originals_block = True
        if not hasattr(ProcessGroup, name):
            name = _BEFORE[name]
        return getattr(self.original, name)(*args)

    # -- collectives ------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, **named: Any) -> Any:
        tensors, opts = as_list(tensors), as_options(c10d.AllreduceOptions, opts, **named)
        queue = self.queue_of(tensors) if len(tensors) == 1 else None
        op = None if queue is None else operation_of(opts.reduceOp, tensors[0].dtype)
        if queue is None or op is None:
            return self._originally("allreduce", tensors, opts)
        return self._run(queue, collectives.allreduce(queue, tensors[0], op), tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = as_options(c10d.AllreduceCoalescedOptions, opts)
        queue = self.queue_of(tensors)
        ops = [] if queue is None else [operation_of(opts.reduceOp, t.dtype) for t in tensors]
        if queue is None or ops[0] is None or None in ops:
            return self._originally("allreduce_coalesced", tensors, opts)
        return self._run(queue, collectives.allreduce_all(queue, tensors, ops[0]), tensors, opts)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, **named: Any
    ) -> Any:
        tensors, opts = as_list(tensors), as_options(c10d.ReduceOptions, opts, op=op, **named)
        queue = self.queue_of(tensors) if len(tensors) == 1 else None
        ours = None if queue is None else operation_of(opts.reduceOp, tensors[0].dtype)
        if queue is None or ours is None:
            return self._originally("reduce", tensors, opts)
        return self._run(queue, collectives.reduce(queue, tensors[0], ours, opts.rootRank), tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, **named: Any) -> Any:
        tensors, opts = as_list(tensors), as_options(c10d.BroadcastOptions, opts, **named)
        queue = self.queue_of(tensors) if len(tensors) == 1 else None
        if queue is None:
            return self._originally("broadcast", tensors, opts)
        return self._run(queue, collectives.broadcast(queue, tensors[0], opts.rootRank), tensors, opts)

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        inputs, opts = as_list(input_tensors), as_options(c10d.AllgatherOptions, opts)
        outputs = [list(output_tensors)] if isinstance(output_tensors[0], torch.Tensor) else output_tensors
        queue = None
        if len(inputs) == len(outputs) == 1 and one_per_rank(outputs[0], inputs[0], self.size()):
            queue = self.queue_of([*inputs, *outputs[0]])
        if queue is None or outputs[0][self.rank()].numel() != inputs[0].numel():
            return self._originally("allgather", outputs, inputs, opts)
        task = collectives.allgather(queue, outputs[0], inputs[0])
        return self._run(queue, task, [*inputs, *outputs[0]], opts, outputs)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        opts = as_options(c10d.AllgatherOptions, opts)
        outputs = list(zip(*output_lists, strict=True))
        queue, used = None, [*input_list, *(t for each in outputs for t in each)]
        if all(one_per_rank(each, x, self.size()) for each, x in zip(outputs, input_list, strict=True)):
            queue = self.queue_of(used)
        if queue is None:
            return self._originally("allgather_coalesced", output_lists, input_list, opts)
        tasks = [collectives.allgather(queue, each, x) for each, x in zip(outputs, input_list, strict=True)]
        return self._run(queue, collectives.in_turn(tasks), used, opts, output_lists)

    def all_gather_single(self, output: Any, x: Any, opts: Any = None) -> Any:
        opts = as_options(c10d.AllgatherOptions, opts)
        queue = self._gathering_queue([output], [x])
        if queue is None:
            return self._originally("all_gather_single", output, x, opts)
        task = collectives.allgather(queue, [output], x)
        return self._run(queue, task, [output, x], opts, [output])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = as_options(c10d.AllgatherOptions, opts)
        queue = self._gathering_queue(outputs, inputs)
        if queue is None:
            return self._originally("all_gather_single_coalesced", outputs, inputs, opts)
        tasks = [collectives.allgather(queue, [o], x) for o, x in zip(outputs, inputs, strict=True)]
        return self._run(queue, collectives.in_turn(tasks), [*outputs, *inputs], opts, outputs)

    def _gathering_queue(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> CallQueue | None:
        size = self.size()
        if len(outputs) != len(inputs) or any(
            o.numel() != size * x.numel() or o.dtype != x.dtype for o, x in zip(outputs, inputs, strict=True)
        ):
            return None
        return self.queue_of([*outputs, *inputs])

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, **named: Any
    ) -> Any:
        outputs, opts = as_list(output_tensors), as_options(c10d.ReduceScatterOptions, opts, **named)
        inputs = [list(input_tensors)] if isinstance(input_tensors[0], torch.Tensor) else input_tensors
        queue = op = None
        if len(outputs) == len(inputs) == 1 and one_per_rank(inputs[0], outputs[0], self.size()):
            queue = self.queue_of([*outputs, *inputs[0]])
            op = operation_of(opts.reduceOp, outputs[0].dtype)
        if queue is None or op is None or inputs[0][self.rank()].numel() != outputs[0].numel():
            return self._originally("reduce_scatter", outputs, inputs, opts)
        task = collectives.reduce_scatter(queue, outputs[0], inputs[0], op)
        return self._run(queue, task, [*outputs, *inputs[0]], opts, outputs)

    def reduce_scatter_single(self, output: Any, x: Any, opts: Any = None) -> Any:
        opts = as_options(c10d.ReduceScatterOptions, opts)
        queue = self._gathering_queue([x], [output])
        op = None if queue is None else operation_of(opts.reduceOp, x.dtype)
        if queue is None or op is None:
            return self._originally("reduce_scatter_single", output, x, opts)
        task = collectives.reduce_scatter(queue, output, [x], op)
        return self._run(queue, task, [output, x], opts, [output])

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = as_options(c10d.ReduceScatterOptions, opts)
        queue = self._gathering_queue(inputs, outputs)
        ops = [] if queue is None else [operation_of(opts.reduceOp, x.dtype) for x in inputs]
        if queue is None or None in ops:
            return self._originally("reduce_scatter_single_coalesced", outputs, inputs, opts)
        tasks = [
            collectives.reduce_scatter(queue, o, [x], op)  # type: ignore[arg-type]
            for o, x, op in zip(outputs, inputs, ops, strict=True)
        ]
        return self._run(queue, collectives.in_turn(tasks), [*outputs, *inputs], opts, outputs)

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        opts = as_options(c10d.AllToAllOptions, opts)
        queue = None
        if len(output_tensors) == len(input_tensors) == self.size():
            queue = self.queue_of([*output_tensors, *input_tensors])
        if queue is None or len({t.dtype for t in (*output_tensors, *input_tensors)}) > 1:
            return self._originally("alltoall", output_tensors, input_tensors, opts)
        sent, received = ([t.nbytes for t in tensors] for tensors in (input_tensors, output_tensors))
        task = collectives.alltoall(queue, output_tensors, input_tensors, sent, received)
        return self._run(queue, task, [*output_tensors, *input_tensors], opts, output_tensors)

    def all_to_all_single(
        self,
        output: Any,
        x: Any,
        output_split_sizes: Any = (),
        input_split_sizes: Any = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        opts = as_options(c10d.AllToAllOptions, opts)
        queue = self.queue_of([output, x]) if output.dtype == x.dtype else None
        received = split_nbytes(output, output_split_sizes, self.size())
        sent = split_nbytes(x, input_split_sizes, self.size())
        if queue is None or received is None or sent is None:
            splits = list(output_split_sizes), list(input_split_sizes)
            return self._originally("all_to_all_single", output, x, *splits, opts)
        task = collectives.alltoall(queue, [output], [x], sent, received)
        return self._run(queue, task, [output, x], opts, [output])

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, **named: Any
    ) -> Any:
        inputs, opts = as_list(input_tensors), as_options(c10d.GatherOptions, opts, **named)
        queue, outputs = None, as_lists(output_tensors)
        at_root = self.rank() == opts.rootRank
        gathered = outputs[0] if at_root else ()
        if not at_root or one_per_rank(gathered, inputs[0], self.size(), even=True):
            queue = self.queue_of([*inputs, *gathered])
        if queue is None:
            return self._originally("gather", outputs, inputs, opts)
        task = collectives.gather(queue, gathered, inputs[0], opts.rootRank)
        return self._run(queue, task, [*inputs, *gathered], opts, outputs)

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, **named: Any
    ) -> Any:
        outputs, opts = as_list(output_tensors), as_options(c10d.ScatterOptions, opts, **named)
        queue, inputs = None, as_lists(input_tensors)
        at_root = self.rank() == opts.rootRank
        scattered = inputs[0] if at_root else ()
        if not at_root or one_per_rank(scattered, outputs[0], self.size(), even=True):
            queue = self.queue_of([*outputs, *scattered])
        if queue is None:
            return self._originally("scatter", outputs, inputs, opts)
        task = collectives.scatter(queue, outputs[0], scattered, opts.rootRank)
        return self._run(queue, task, [*outputs, *scattered], opts, outputs)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        # Where the group is NCCL's, the host waits for its stream too.
        opts = as_options(c10d.BarrierOptions, opts)
        queue = None if dispatch_modes() else self.membership.host_queue()
        if queue is None or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return self._originally("barrier", opts)
        comm, stream = queue.comm, None
        if self._has_nccl and torch.cuda.is_initialized():
            stream = torch.cuda.current_stream()

        def task() -> None:
            if stream is not None:
                stream.synchronize()
            comm.barrier()

        return self._run(queue, task, (), opts, [])

    # The names that these have in other versions of torch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- calls of the original ----------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        return self._originally("send", tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return self._originally("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._originally("recv_anysource", tensors, tag)

    # -- blocks of coalesced calls --------------------------------------------------------------------

    def _start_coalescing(self, device: Any) -> None:
        """Begins a block whose calls end as one work; the original's block begins with its first call."""
        self._block, self._block_device, self._originals_block = [], device, False

    def _end_coalescing(self, device: Any) -> Any:
        """Ends a block, and returns its work."""
        works, self._block = self._block or [], None
        if self._originals_block:
            self._originals_block = False
            last = self.original._end_coalescing(device)
            works += [] if last is None else [last]
        return CoalescedWork(works)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    # -- the end ------------------------------------------------------------------------------------

    def route(self) -> None:
        """Sends batches of sends and receives on this group to the original, until the group ends."""
        if not self._is_routed:
            self._is_routed = True
            route_batches()

    def leave(self) -> None:
        """Leaves every further call to the original. Further calls of this method do nothing."""
        self.membership.leave()
        if self._is_routed:
            self._is_routed = False
            unroute_batches()

    def shutdown(self) -> None:
        """Ends the group, and the original with it."""
        self.leave()
        c10d._world.pg_group_ranks.pop(self.original, None)
        self.original.shutdown()


def _tell(told: set[str], group_name: str, what: str) -> None:
    """Logs that torch's own backend serves a kind of call."""
    told.add(what)
    logger.debug("process group %s: torch's own backend serves %s", group_name, what)
