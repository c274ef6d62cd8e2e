"""Pickles a function by value and keeps its file names, so that its tracebacks still show its code."""

from __future__ import annotations

import io
import linecache
import types
from collections import ChainMap
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle

_ANONYMOUS = "<dynamic-code>"


def dump_with_sources(value: Any) -> tuple[bytes, dict[str, list[str]]]:
    """Pickles a value with the file names of its functions, which cloudpickle leaves out.

    Returns:
        The pickle, and the lines of sources that are in no file, such as a notebook's cells.
    """
    reduce_code = cloudpickle.CloudPickler.dispatch_table[types.CodeType]
    names: set[str] = set()

    def reduce_with_name(code: types.CodeType) -> tuple[Any, ...]:
        names.add(code.co_filename)
        make, arguments, *rest = reduce_code(code)
        named = tuple(
            code.co_filename if isinstance(item, str) and item == _ANONYMOUS else item for item in arguments
        )
        return (make, named, *rest)

    class NamingPickler(cloudpickle.CloudPickler):
        dispatch_table: ClassVar = ChainMap(
            {types.CodeType: reduce_with_name}, cloudpickle.CloudPickler.dispatch_table
        )

    buffer = io.BytesIO()
    NamingPickler(buffer).dump(value)
    sources = {name: linecache.getlines(name) for name in sorted(names) if not Path(name).exists()}
    return buffer.getvalue(), {name: lines for name, lines in sources.items() if lines}
