"""Keeps ``torch.compile`` out of what runs while a compiled model calls back into Python.

Frames that C++ calls, such as a process group's methods under DDP, would else be compiled too, and a process
group is opaque to the compiler. The mark lies on the code itself: it costs nothing at a call, and does not
import the compiler.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

Kind = TypeVar("Kind", bound=type)


def untraced(kind: Kind) -> Kind:
    """Marks all methods of a class, and what they call."""
    for value in vars(kind).values():
        function = value.fget if isinstance(value, property) else value
        if isinstance(function, FunctionType):
            mark(function)
    return kind


def mark(function: Any) -> Any:
    """Marks one function, and what it calls."""
    frames = torch._C._dynamo.eval_frame
    try:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    except AttributeError:  # A torch that has other names for it; then it is for its compiler to find out.
        pass
    return function
