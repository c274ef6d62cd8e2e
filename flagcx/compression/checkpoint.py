"""The memory of error feedback as a flat dictionary of NumPy arrays, numbers and text, for checkpoints.

Each rank saves its own: residuals and momentum differ from rank to rank. ``np.savez``, ``pickle`` and
``torch.save`` take what is saved here, and what they give back is taken.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from flagcx.compression.regions import Regions
from flagcx.errors import ArgumentError

State = dict[str, Any]
VERSION = 1


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


def check_entry(state: Mapping[str, Any], name: str, expected: Any, what: str) -> None:
    """Raises ArgumentError where an entry is missing, or not what is expected."""
    if name not in state:
        raise ArgumentError(
            f"this is no state of a {what}: it has no entry {name!r}; give what state_dict() gave"
        )
    found = state[name]
    found = found if isinstance(found, str) else np.asarray(found).item()
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
