"""Keeps ``torch.compile`` out of code that runs while a compiled model calls back into Python.

Dynamo would also compile frames that C++ calls, such as a process group's methods under DDP, and a process
group is opaque to it. The mark is stored with the code object: it costs nothing at a call, and does not
import the compiler.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

Marked = TypeVar("Marked", bound=Any)


def no_dynamo(target: Marked) -> Marked:
    """Marks a function, or all methods and properties of a class, and whatever they call."""
    for value in vars(target).values() if isinstance(target, type) else (target,):
        function = value.fget if isinstance(value, property) else value
        if isinstance(function, FunctionType):
            _skip(function)
    return target


def _skip(function: FunctionType) -> None:
    frames = torch._C._dynamo.eval_frame
    try:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    except AttributeError:  # This torch has other names for it; then its compiler has to find out by itself.
        pass
