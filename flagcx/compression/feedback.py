"""Error feedback: the part of a gradient that a codec lost is added to the next gradient.

A codec alone drops the part that it rounds off or leaves out. With a residual that part arrives later: the
rank keeps e + g - C(e + g) and adds it to its next gradient. Training then comes as far as without
compression, even with codecs that keep one number in a hundred.

Top-k and random-k send most elements late, and an optimizer's momentum comes on top of that: it should be
shorter, see ``TopK``. Deep Gradient Compression instead gathers momentum before elements are chosen
(``momentum=``), and clears that of an element which is sent, so that old gradients don't push it on. But what
is cleared is lost: elements that are sent often lose up to nine tenths of their step (at 0.9), and a
convolutional network came to 2.5 times the dense loss in the same steps. Here an element takes along all that
momentum would still have added to it, and is chosen by that sum, so that nothing of a gradient is lost.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD" (2019); momentum correction, factor masking and
clipping: Lin et al., "Deep Gradient Compression" (2018), sections 3.1 to 3.3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from flagcx.arguments import is_number
from flagcx.compression.catalogue import codec_of
from flagcx.compression.checkpoint import (
    VERSION,
    check_complete,
    check_entry,
    listed,
    nested,
    read_slot,
    text_of,
    under,
)
from flagcx.compression.codec import captures, namespace
from flagcx.compression.slot import Slot
from flagcx.errors import ArgumentError


class Feedback:
    """Error feedback for any codec: a slot of memory for each array that is compressed.

    A slot keeps residual and momentum twice, as they are and as they were before the last call: a call whose
    result has infinity or NaN leaves them as they were, and ``undo`` does so after any.

    Args:
        codec: A codec, or its name.
        momentum: Momentum correction: each rank adds momentum to its gradients *before* they are compressed;
            the optimizer then uses none of its own, and a weight decay that it adds to gradients must be
            1 / (1 - momentum) times as large. 0 for none.
        residual: Whether lost parts are added to the next gradient. Without it a slot still keeps the
            codec's own state, such as the warm start of PowerSGD.
        clip: Largest norm of the sum of gradients; each rank clips its own at ``clip / sqrt(ranks)``. None
            for no clipping.

    Attributes:
        codec: The codec.
        momentum: The momentum.

    Raises:
        ArgumentError: No codec has that name, or a number is out of range.

    Example:
        >>> feedback = Feedback("int4")
        >>> for name, gradient in gradients.items():                                # doctest: +SKIP
        ...     comm.allreduce(gradient, "avg", compression=feedback[name])
    """

    def __init__(
        self, codec: Any, *, momentum: float = 0.0, residual: bool = True, clip: float | None = None
    ) -> None:
        if not (is_number(momentum) and 0 <= momentum < 1):
            raise ArgumentError(f"momentum={momentum!r} must be a number from 0 to below 1")
        if clip is not None and not (is_number(clip) and clip > 0):
            raise ArgumentError(f"clip={clip!r} must be a number above 0, or None")
        self.codec = codec_of(codec)
        self.momentum, limit = float(momentum), None if clip is None else float(clip)
        self._options: dict[str, Any] = {"momentum": self.momentum, "residual": bool(residual), "clip": limit}
        self._slots: dict[Hashable, Slot] = {}
        self._user: Callable[[], Any] = lambda: None
        self._before: weakref.WeakSet[Any] = weakref.WeakSet()

    def slot(self, key: Hashable = None, shapes: Sequence[tuple[int, ...]] | None = None) -> Slot:
        """The memory of one array.

        Args:
            key: Names the array: anything hashable, the same on every rank.
            shapes: Shapes of the parameters that lie end to end in it, for codecs that work on matrices; the
                array's own shape if None.

        Raises:
            ArgumentError: The slot was made for other shapes, or ``key`` cannot name one.
        """
        if not isinstance(key, Hashable):
            raise ArgumentError(
                f"the key of a slot must be hashable, such as a name or a number, got a {type(key).__name__}"
            )
        found = self._slots.get(key)
        if found is None:
            found = self._slots[key] = Slot(self.codec, key, shapes, **self._options)
        elif shapes is not None:
            found.check_shapes(shapes)
        return found

    def __getitem__(self, key: Hashable) -> Slot:
        return self.slot(key)

    def __iter__(self) -> Iterator[Slot]:
        """The slots that were asked for."""
        return iter(list(self._slots.values()))

    def drop(self, key: Hashable) -> None:
        """Removes the memory of one array."""
        self._slots.pop(key, None)

    def reset(self) -> None:
        """Clears all memory, as at the start of a training. Call it on all ranks."""
        self._check_idle("reset()")
        for slot in self._slots.values():
            slot.reset()

    def _check_idle(self, what: str) -> None:
        for slot in self._slots.values():
            if slot.busy():
                raise ArgumentError(
                    f"{what} while a call with the slot {slot.key!r} of this Feedback is under way; wait for "
                    f"the work of that call before"
                )

    def undo(self) -> None:
        """Takes the last call of each array back, for a step that the training does not use.

        The memory of an array whose result has infinity or NaN is as before the call anyway; that of the
        others is so after this. ``GradientSynchronizer`` and DDP's hook do it themselves. Call it on all
        ranks, after a step in which all arrays were given.

        Example:
            >>> if not all(np.isfinite(g).all() for g in gradients.values()):          # doctest: +SKIP
            ...     feedback.undo()
        """
        self._check_idle("undo()")
        for slot in self._slots.values():
            slot.undo()

    def end_step(self, undo: bool = False, user: Any = None) -> None:
        """Ends a step, and takes it back if one of its arrays had infinity or NaN, or if ``undo``.

        On a GPU the host does not wait. All ranks must call it.

        Args:
            undo: Whether it is taken back in any case.
            user: What names the slots, such as a synchronizer. Another may follow, but not two take turns.

        Raises:
            ArgumentError: Two take turns, which would have the same names for different arrays.
        """
        self._end_step([slot for slot in self._slots.values() if slot.fresh], undo)
        last = self._user()
        if user is None or user is last:
            return
        if user in self._before:
            raise ArgumentError(
                f"a Feedback serves {user!r} and {last!r} in turns, which share its memory by the same "
                f"names; give each a Feedback of its own"
            )
        if last is not None:
            self._before.add(last)
        self._user = weakref.ref(user)

    @staticmethod
    def _end_step(used: Sequence[Slot], undo: bool) -> None:
        flags = [slot.flag for slot in used if slot.flag is not None]
        if undo or any(slot.spoilt for slot in used):
            for slot in used:
                slot.undo()
        elif len(flags) > 1 and not captures(flags[0]):
            flag = namespace(flags[0]).concatenate(flags).max(keepdims=True)
            for slot in used:
                slot.settle(flag)
        for slot in used:
            slot.fresh = False

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers, for a checkpoint: NumPy arrays, numbers and text, by name.

        Every rank saves its own. A training that is continued with it on as many ranks ends with the bits of
        one that went through.

        Raises:
            ArgumentError: A slot has a key that is no text, number, None or tuple of them, or a call with it
                is under way.

        Example:
            >>> np.savez(f"feedback{comm.rank}.npz", **feedback.state_dict())          # doctest: +SKIP
            >>> feedback.load_state_dict(np.load(f"feedback{comm.rank}.npz"))          # doctest: +SKIP
        """
        self._check_idle("state_dict()")
        state: dict[str, Any] = {"version": VERSION} | self._settings()
        slots = [slot for slot in self._slots.values() if slot.step]
        for number, slot in enumerate(slots):
            state |= {f"{number}.key": text_of(slot.key)} | under(str(number), slot.state_dict())
        return listed(state)

    def _settings(self) -> dict[str, Any]:
        """What a state must have in common with the ``Feedback`` that takes it over."""
        return {"codec": repr(self.codec)} | {name: repr(value) for name, value in self._options.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` gave, on all ranks; what is remembered so far is forgotten.

        A rank that loads the state of another one, or of a job with another number of ranks, drops residuals
        and momentum at the first call, and warns.

        Args:
            state: A mapping of what ``state_dict`` gave, also as ``np.load``, or ``torch.load`` with
                ``weights_only=False``, give it back.

        Raises:
            ArgumentError: It is the state of another codec or of other settings, lacks an entry, or is none
                at all. Then what is remembered stays.
        """
        self._check_idle("load_state_dict()")
        check_complete(state, "Feedback")
        for name, value in self._settings().items():
            check_entry(state, name, value, "Feedback")
        keeps = self._options["residual"] and not self.codec.lossless
        needs = {"residual": bool(keeps), "velocity": bool(self.momentum)}
        loaded, number = [], 0
        while f"{number}.key" in state:
            loaded.append(read_slot(nested(state, str(number)), needs, f"slot number {number}"))
            number += 1
        self.reset()
        for saved in loaded:
            key, shapes = saved["key"], saved.get("shapes")
            if key in self._slots and self._slots[key].shapes != shapes:
                self.drop(key)
            self.slot(key, shapes).load_state_dict(saved)

    def __repr__(self) -> str:
        return f"Feedback({self.codec!r}, {len(self._slots)} slots)"


def as_feedback(compression: Any, **options: Any) -> Feedback | None:
    """Error feedback for a caller's ``compression=``, for a training loop that compresses many arrays.

    Args:
        compression: None, a name, a codec, or a ``Feedback``, which is returned as it is.
        options: Those of ``Feedback``, where one is made.

    Raises:
        ArgumentError: It is none of these.
    """
    if compression is None or isinstance(compression, Feedback):
        return compression
    if isinstance(compression, Slot):
        raise ArgumentError(
            f"compression={compression!r} remembers one array; for many, give the Feedback that it is from"
        )
    return Feedback(codec_of(compression), **options)
