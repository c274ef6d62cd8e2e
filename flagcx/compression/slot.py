"""The memory of one compressed array between calls."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from flagcx.arguments import check_shape, on_device
from flagcx.compression.carried import Carried, Regions
from flagcx.compression.checkpoint import load_memory, on_host, save_memory
from flagcx.compression.codec import FixedRate, Scratch, captures, is_finite, namespace
from flagcx.compression.device import look_on_device
from flagcx.errors import ArgumentError


class Ranks(Protocol):
    """The ranks that a slot is used with.

    Attributes:
        size: Number of ranks.
    """

    size: int

    def numbers(self, mine: Sequence[int]) -> np.ndarray:
        """The numbers of all ranks, a row for each rank."""


class Slot:
    """The memory of one array's compressed all-reduces; ``Feedback`` makes one for each array.

    A step whose result has infinity or NaN, or that ends with an error, leaves it as it was before: residual
    and momentum are kept twice, and each step reads the one copy and writes the other.

    Attributes:
        codec: The codec.
        shapes: Shapes of the parameters that lie end to end in the array; None for that of the array itself.
        keeps: Whether lost parts of a lossy codec are kept for the next call.
        residual: The part of this rank's gradients that is not sent yet (float32, one dimension), or None.
        velocity: The momentum of this rank's gradients, or None.
        residuals, velocities: The residual and the velocity, now and before the step; or None.
        step: Calls so far that left something; the same on every rank. Where the host does not wait for a
            GPU to see whether they did, all calls.
        shape: The shape of the caller's arrays, if it matters to the codec.
        place: The rank, and the number of ranks, of the calls.
        memory: State of the codec's all-reduce, by name.
        resumes: Whether a state was loaded that no call has used yet.
        ranks: Returns the ranks that it was used with last.
        plans: The plans of calls with this slot.
        lasting: Whether the slot belongs to one array. Otherwise all arrays of one length share it, and it
            keeps nothing that depends on an array's content.
        flag: One int32 on the GPU, not 0 if the last step there was spoilt; None without a GPU.
        spoilt: Whether the host knows that the last step was.
        fresh: Whether it was used since the last ``Feedback.end_step``.
        runs: Whether a call is under way.
        work: A call that was started; a weak reference to its future, or to its ``Work`` on a GPU.
    """

    def __init__(
        self,
        codec: Any,
        key: Hashable = None,
        shapes: Sequence[tuple[int, ...]] | None = None,
        momentum: float = 0.0,
        residual: bool = True,
        clip: float | None = None,
        lasting: bool = True,
    ) -> None:
        self.codec, self.key, self.lasting = codec, key, lasting
        self.shapes = None if shapes is None else _checked(shapes)
        self._momentum, self.keeps, self._clip = momentum, residual, clip
        self._remembers = lasting and bool(residual or momentum or not isinstance(codec, FixedRate))
        self.plans: dict[tuple, Any] = {}
        self.reset()

    @property
    def settings(self) -> str:
        """How it is used, in words; the same on every rank."""
        clip = "" if self._clip is None else f", clipped to {self._clip:g}"
        momentum = f", momentum {self._momentum:g}" if self._momentum else ""
        return f"{', with a residual' if self.keeps else ''}{momentum}{clip}"

    def reset(self) -> None:
        """Clears the memory, as at the start of a training. Call it on all ranks."""
        self.residuals: Carried | None = None
        self.velocities: Carried | None = None
        self._loaded: dict[str, np.ndarray] = {}
        self.step = 0
        self.memory: dict[str, Any] = {}
        self.flag: Any = None
        self.spoilt = self.fresh = self.runs = self._captured = False
        self.work: Callable[[], Any] = lambda: None
        self._saved: tuple[int, dict[str, Any]] | None = None
        self.place, self.resumes = (0, 1), False
        self._count: int | None = None
        self.shape: tuple[int, ...] | None = None
        self._size = 0
        self.ranks: Callable[[], Any] = lambda: None

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Raises ArgumentError where the slot is not one for parameters of these shapes."""
        if shapes == self.shapes:
            return
        given = _checked(shapes)
        if given != self.shapes:
            known = "no shapes" if self.shapes is None else f"the shapes {_short(self.shapes)}"
            raise ArgumentError(
                f"the slot {self.key!r} of this Feedback was made for {known}, and is asked for with "
                f"{_short(given)}; use another key, or feedback.drop({self.key!r}) first"
            )

    def begin(self, x: Any, shape: tuple[int, ...] | None = None) -> None:
        """Begins a call with ``x``; the first call allocates the residual and the velocity.

        Args:
            x: The array, in one dimension.
            shape: The caller's, if it matters to the codec.

        Raises:
            ArgumentError: Earlier calls had another number of elements, another shape, or another dtype where
                momentum is kept in it; or the slot is new inside a capture.
        """
        if self._count is None:
            total = x.size if self.shapes is None else sum(map(math.prod, self.shapes))
            if total != x.size:
                raise ArgumentError(
                    f"the shapes of slot {self.key!r} have {total} elements together, but its array has "
                    f"{x.size}"
                )
            keeps = self.keeps and not self.codec.lossless
            if (keeps or self._momentum) and on_device(x) and captures(x):
                raise ArgumentError(
                    f"the slot {self.key!r} of this Feedback is new: a graph that captures its first call "
                    f"would clear its memory in every replay; make one call before the capture"
                )
            if self.shape not in (None, shape):
                raise self._other_shape(shape)
            self._allocate(x, keeps)
            self._count, self.shape = x.size, shape
        elif self._count != x.size:
            raise ArgumentError(
                f"the slot {self.key!r} of this Feedback remembers an array of {self._count} elements, and "
                f"got one of {x.size}; use a slot for each array: compression=feedback[key]"
            )
        elif self.shape != shape and self.shapes is None:
            raise self._other_shape(shape)
        elif self.velocities is not None and self.velocity.dtype != x.dtype:
            raise ArgumentError(
                f"the slot {self.key!r} of this Feedback keeps the momentum of an array of "
                f"{self.velocity.dtype}, and got one of {x.dtype}; use a slot for each array, or convert it"
            )
        self._turn(x)
        self.step += 1

    def _turn(self, x: Any) -> None:
        """Saves what the step may have to leave as it is, and zeros the flag."""
        if not self._remembers:
            return
        memory = {k: replace(v) if isinstance(v, Regions) else v for k, v in self.memory.items()}
        self._saved, self.spoilt, self.fresh, self.runs = (self.step, memory), False, True, True
        for carried in self._all_carried():
            if not self._captured:
                carried.turn()
        if self.flag is not None:
            self.flag.fill(0)
            self._captured = self._captured or captures(x)

    def end(self, y: Any, waits: bool = True, spoilt: bool | None = None) -> None:
        """Ends a call: if its result has an infinite number or NaN, as on all ranks then, it is taken back.

        Args:
            y: The result as the caller gets it.
            waits: Whether the host may wait for a GPU. Otherwise the flag must say already what was found.
            spoilt: What is known of the result; None for nothing.
        """
        self.runs = False
        if not self._remembers:
            return
        if not waits:
            self.settle(self.flag)
        elif not is_finite(y) if spoilt is None else spoilt:
            self.undo()
            self.spoilt = True

    def look(self, y: Any) -> None:
        """Sets the flag on the GPU if ``y`` has an infinite number or NaN."""
        if self.flag is not None:
            look_on_device(y, self.flag)

    def settle(self, flag: Any) -> None:
        """Takes the step back on the GPU if a flag there is not 0."""
        for carried in self._all_carried():
            carried.settle(flag, self._captured)

    def undo(self) -> None:
        """Takes the last call back, once: residual, momentum, factors and step are as before it.

        On a GPU it does nothing to a slot that a graph was captured with. Call it on all ranks.
        """
        self.runs = False
        if self._saved is None:
            return
        (self.step, self.memory), self._saved = self._saved, None
        for carried in self._all_carried():
            if not self._captured:
                carried.turn()

    def busy(self) -> bool:
        """Whether a call with it is under way on the host; on a GPU streams keep the order."""
        work = self.work()
        return self.runs or (work is not None and not work.done())

    def _all_carried(self) -> list[Carried]:
        return [carried for carried in (self.residuals, self.velocities) if carried is not None]

    @property
    def residual(self) -> Any:
        return None if self.residuals is None else self.residuals.now

    @property
    def velocity(self) -> Any:
        return None if self.velocities is None else self.velocities.now

    def _other_shape(self, shape: tuple[int, ...] | None) -> ArgumentError:
        return ArgumentError(
            f"the slot {self.key!r} of this Feedback remembers the matrix of an array of shape {self.shape}, "
            f"and got an array of shape {shape}; use a slot for each array, or reshape it"
        )

    def meet(self, peers: Ranks) -> None:
        """Agrees on the step with ranks that are new to the slot.

        Ranks that went on without one that was lost may have left off in different steps, and one that was
        started again has none. Then what must be alike on all ranks, such as factors, begins anew.

        Args:
            peers: The ranks; all of them call it together.
        """
        self.ranks = weakref.ref(peers)
        if not self.lasting:
            return
        told = peers.numbers([self.step, self._size])
        if (told != told[0]).any() or told[0, 1] not in (0, peers.size):
            self.memory.clear()
        self.step, self._size = int(told[:, 0].max()), peers.size

    def source(self, x: Any, scratch: Scratch, ranks: int) -> Any:
        """This step's contribution before the residual: clipped, and with momentum.

        Args:
            x: The gradient; it is not written.
            scratch: Holds the clipped gradient.
            ranks: Number of ranks; each clips at ``clip / sqrt(ranks)``.
        """
        if self._clip is not None:
            norm, limit = _norm(x), self._clip / math.sqrt(ranks)
            if limit < norm < math.inf:
                clipped = scratch.get(f"clipped {x.dtype.itemsize}", x.size, x.dtype, x)
                namespace(x).multiply(x, x.dtype.type(limit / norm), out=clipped)
                x = clipped
        if self.velocities is None:
            return x
        before, velocity = self.velocities.before, self.velocities.now
        namespace(x).multiply(before, before.dtype.type(self._momentum), out=velocity)
        velocity += x
        return velocity

    def total(self, x: Any, scratch: Scratch, ranks: int) -> Any:
        """This step's contribution with the residual, which then holds it; see ``source``."""
        source = self.source(x, scratch, ranks)
        if self.residuals is None:
            return source
        return namespace(x).add(self.residuals.before, source, out=self.residuals.now)

    def ahead(self, kept: Any, scratch: Scratch) -> Any:
        """What is kept, with all that momentum would still add to it: m + m^2 + ... of the velocity.

        It is 1 / (1 - m) of the gradients since ``sent`` cleared an element, which without compression would
        move the parameters as far, only later.
        """
        whole = scratch.get("ahead", kept.size, np.float32, kept)
        namespace(kept).multiply(self.velocity, np.float32(self._momentum / (1 - self._momentum)), out=whole)
        whole += kept
        return whole

    def state_dict(self) -> dict[str, Any]:
        """What the slot remembers; see ``Feedback.state_dict``."""
        state: dict[str, Any] = {"step": self.step, "rank": self.place[0], "ranks": self.place[1]}
        for name, shape in (("shapes", self.shapes), ("shape", self.shape)):
            if shape is not None:
                state[name] = repr(shape)
        for name, carried in (("residual", self.residuals), ("velocity", self.velocities)):
            if carried is not None:  # a graph that was captured and has not run yet has written nothing
                state[name] = on_host(carried.before if self._captured else carried.now)
        return state | {name: array.copy() for name, array in self._loaded.items()} | save_memory(self.memory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state that ``read_slot`` has read. The first call moves it to where the arrays are."""
        self.reset()
        self.step, self.place = state["step"], (state["rank"], state["ranks"])
        self._loaded = {name: state[name] for name in ("residual", "velocity") if name in state}
        self.shape = state.get("shape")
        self.memory, self.resumes = load_memory(state), True

    def drop_own(self) -> None:
        """Drops what was loaded of one rank alone."""
        self._loaded.clear()
        self.memory.pop("threshold", None)

    def drop_common(self) -> None:
        """Drops what the memory has of a number of ranks, and what all of them must have alike."""
        for name in ("regions", "loaded"):
            self.memory.pop(name, None)

    def _allocate(self, x: Any, keeps: bool) -> None:
        """Makes the residual and the velocity for arrays like ``x``, from what was loaded if anything was.

        Raises:
            ArgumentError: What was loaded is of another length.
        """
        xp = namespace(x)
        for name, array in self._loaded.items():
            dtype = x.dtype if name == "velocity" else array.dtype
            if array.size != x.size or array.dtype != dtype:
                raise ArgumentError(
                    f"the slot {self.key!r} has loaded the {name} of an array of {array.size} elements of "
                    f"{array.dtype}, and got one of {x.size} of {x.dtype}"
                )

        def made(name: str, dtype: Any) -> Carried:
            loaded = self._loaded.get(name)
            now = xp.zeros(x.size, dtype) if loaded is None else xp.asarray(loaded, dtype)
            return Carried(now, xp.empty_like(now))

        self.residuals = made("residual", np.dtype(np.float32)) if keeps else None
        self.velocities = made("velocity", x.dtype) if self._momentum else None
        if "factors" in self.memory:
            self.memory["factors"] = [xp.asarray(factors) for factors in self.memory["factors"]]
        if on_device(x) and self._all_carried():
            self.flag = xp.zeros(1, np.int32)
        self._loaded, self.resumes = {}, False

    def sent(self, indices: Any) -> None:
        """Clears the elements that were sent, in the residual and in the momentum that led to it."""
        for kept in (self.residual, self.velocity):
            if kept is not None:
                kept[indices] = 0

    def sent_all(self) -> None:
        """Clears the residual, since all of it was sent. Momentum goes on: none of it was late."""
        if self.residual is not None:
            self.residual[...] = 0

    def __repr__(self) -> str:
        count = "nothing yet" if self._count is None else f"{self._count} elements"
        return f"<flagcx.compression.Slot {self.key!r} of {self.codec}, {count}, {self.step} steps>"


def _checked(shapes: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(shapes, Sequence) and all(isinstance(shape, Sequence) for shape in shapes):
        return tuple(map(check_shape, shapes))
    raise ArgumentError(f"shapes={shapes!r} must be a list of shapes, such as [(512, 256), (256,)]")


def _short(shapes: Sequence[tuple[int, ...]]) -> str:
    more = f" and {len(shapes) - 4} more" if len(shapes) > 4 else ""
    return ", ".join(map(str, shapes[:4])) + more


def _norm(x: Any) -> float:
    """The norm of an array whose squares may be out of range."""
    norm = math.sqrt(float(namespace(x).vdot(x, x)))
    if math.isinf(norm):
        wide = x.astype(np.float64)
        norm = math.sqrt(float(namespace(x).vdot(wide, wide)))
    return norm
