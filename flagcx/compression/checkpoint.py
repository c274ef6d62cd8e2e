"""The memory of error feedback as a flat dictionary of NumPy arrays, numbers and text, for checkpoints.

Each rank saves its own: residuals and momentum differ from rank to rank. ``np.savez``, ``pickle`` and
``torch.save`` take what is saved here, and what they give back is taken.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from flagcx.compression.carried import Regions
from flagcx.errors import ArgumentError

State = dict[str, Any]
VERSION = 2
_ENTRIES = "entries"


def save_memory(memory: Mapping[str, Any]) -> State:
    """The memory of a codec's all-reduce."""
    state: State = {}
    for name, value in memory.items():
        if isinstance(value, Regions):
            state |= {"bounds": on_host(value.bounds), "age": value.age}
        elif isinstance(value, list):
            state |= {f"{name}.{i}": on_host(array) for i, array in enumerate(value)}
        elif value is not None and name != "loaded":
            state[name] = value
    return state


def load_memory(state: Mapping[str, Any]) -> dict[str, Any]:
    """The memory that ``save_memory`` has saved."""
    memory: dict[str, Any] = {}
    factors = [name for name in state if name.startswith("factors.")]
    if factors:
        memory["factors"] = [np.array(state[f"factors.{i}"]) for i in range(len(factors))]
    if "threshold" in state:
        memory["threshold"] = int(state["threshold"])
    if "bounds" in state:
        memory["regions"] = Regions(np.array(state["bounds"]), int(state["age"]))
    if "chosen" in state:
        memory["loaded"] = str(state["chosen"]), float(state["sparse_below"])
    return memory


def on_host(array: Any) -> np.ndarray:
    """A copy of an array as a NumPy array."""
    return array.copy() if isinstance(array, np.ndarray) else array.get()


def nested(state: Mapping[str, Any], name: str) -> State:
    """The entries of a state whose names begin with ``name`` and a dot, without these."""
    return {key[len(name) + 1 :]: state[key] for key in state if key.startswith(f"{name}.")}


def under(name: str, state: Mapping[str, Any]) -> State:
    """The entries of a state with ``name`` and a dot before each name: the inverse of ``nested``."""
    return {f"{name}.{key}": value for key, value in state.items()}


def listed(state: State) -> State:
    """The state with a list of its entries, so that ``check_complete`` finds those that get lost."""
    return state | {_ENTRIES: " ".join(state)}


def check_complete(state: Mapping[str, Any], what: str) -> None:
    """Raises ArgumentError where it is no state of this version, or lacks an entry that it had."""
    if not isinstance(state, Mapping):
        raise ArgumentError(
            f"a {type(state).__name__} is no state of a {what}; give the mapping that state_dict() gave"
        )
    check_entry(state, "version", VERSION, what)
    lost = [name for name in str(_entry(state, _ENTRIES, what)).split() if name not in state]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise ArgumentError(
            f"the state of a {what} has lost the entries {', '.join(lost[:3])}{more}; give all that "
            f"state_dict() gave"
        )


def _entry(state: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in state:
        raise ArgumentError(
            f"this is no state of a {what}: it has no entry {name!r}; give what state_dict() gave"
        )
    return state[name]


def read_slot(state: Mapping[str, Any], needs: Mapping[str, bool], where: str) -> State:
    """The entries of one slot, checked: numbers and shapes as such, arrays as copies.

    Args:
        state: What the slot's ``state_dict`` gave.
        needs: For "residual" and "velocity" whether the slot has one.
        where: Names the slot in errors.

    Raises:
        ArgumentError: An entry is missing, or is not of its kind.
    """
    read: State = {}
    for name in ("key", "shapes", "shape"):
        if name in state or name == "key":
            read[name] = _literal(str(_entry(state, name, where)), name, where)
    for name in ("step", "rank", "ranks"):
        read[name] = _whole(_entry(state, name, where), name, where)
    for name in ("threshold", "age"):
        if name in state:
            read[name] = _whole(state[name], name, where)
    for name, value in state.items():
        if name not in read:
            is_array = name in needs or name == "bounds" or name.startswith("factors.")
            read[name] = np.array(value) if is_array else value
    for name, needed in needs.items():
        if (name in read) != needed:
            has, this = ("a", "none") if name in read else ("no", "one")
            raise ArgumentError(f"the state of {where} has {has} {name}, and this Feedback keeps {this}")
    if "bounds" in read:
        _check_bounds(read["bounds"], len(read.get("residual", ())), where)
        _entry(state, "age", where)
    if "chosen" in read:
        _number(_entry(state, "sparse_below", where), "sparse_below", where)
    for name, value in read.items():
        if name in needs or name.startswith("factors."):
            _check_numbers(value, name, 1 if name in needs else 2, where)
    return read


def _whole(value: Any, name: str, where: str) -> int:
    """An entry that must be a whole number from 0 up."""
    found = _number(value, name, where)
    if found < 0 or found % 1:
        raise ArgumentError(f"the entry {name!r} of {where} is {found!r}; expected a whole number from 0 up")
    return int(found)


def _number(value: Any, name: str, where: str) -> float:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise ArgumentError(f"the entry {name!r} of {where} is {value!r}; expected a number")
    return array.item()


def _check_bounds(bounds: np.ndarray, count: int, where: str) -> None:
    """The bounds of the regions that ranks add up: places in the array, in order, from its first element."""
    right = bounds.dtype == np.int64 and bounds.ndim == 1 and bounds.size and bounds[0] == 0
    if not right or (np.diff(bounds) < 0).any() or (count and bounds[-1] != count):
        end = f" to {count}" if count else ""
        raise ArgumentError(
            f"the entry 'bounds' of {where} is {bounds!r}; expected int64 of 1 dimension, from 0 on{end}"
        )


def _literal(text: str, name: str, where: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ArgumentError(
            f"the entry {name!r} of {where} is {text!r}, which is not what was saved"
        ) from None


def _check_numbers(array: np.ndarray, name: str, dimensions: int, where: str) -> None:
    kinds = (np.float32, np.float64) if name == "velocity" else (np.float32,)
    said = f"the entry {name!r} of {where}"
    if array.dtype not in kinds or array.ndim != dimensions:
        raise ArgumentError(
            f"{said} is of {array.dtype} with {array.ndim} dimensions; expected "
            f"{' or '.join(kind.__name__ for kind in kinds)} with {dimensions}"
        )
    if not np.isfinite(array).all():
        raise ArgumentError(f"{said} has infinity or NaN, of which no slot would recover; load another state")


def check_entry(state: Mapping[str, Any], name: str, expected: Any, what: str) -> None:
    """Raises ArgumentError where an entry is missing, or not what is expected."""
    found = _entry(state, name, what)
    found = found if isinstance(found, str) else np.asarray(found).tolist()
    if found != expected:
        raise ArgumentError(
            f"the state is one of a {what} with {name} {found!r}, and this one has {expected!r}; make it "
            f"with the same settings"
        )


def text_of(key: Hashable) -> str:
    """The key of a slot as text.

    Raises:
        ArgumentError: The text does not stand for the key.
    """
    text = repr(key)
    try:
        if ast.literal_eval(text) == key:
            return text
    except (ValueError, SyntaxError):
        pass
    raise ArgumentError(
        f"the slot {text} cannot be saved: keys of slots must be text, numbers, None, or tuples of them"
    )
