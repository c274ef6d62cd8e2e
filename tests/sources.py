"""The package's own text, read once for all tests that look at it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import flagcx as fc

PACKAGE = Path(fc.__file__).parent


class Module(NamedTuple):
    """What tests look at in a module.

    Attributes:
        path: Its file, from the package on.
        imports: Every statement that imports, wherever it stands.
        lines: Number of lines.
        environment: Line and name of each use of ``os.environ`` and ``os.getenv``.
        docstrings: The name of each class and function that has a docstring, and its text; "" for the module.
    """

    path: Path
    imports: list[ast.Import | ast.ImportFrom]
    lines: int
    environment: list[tuple[int, str]]
    docstrings: list[tuple[str, str]]

    @property
    def name(self) -> str:
        """Its dotted name."""
        return ".".join(("flagcx", *self.path.with_suffix("").parts)).removesuffix(".__init__")


def parsed(text: str, path: str | Path = "module.py") -> Module:
    """A module from its text."""
    one = Module(Path(path), [], len(text.splitlines()), [], [])
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            one.imports.append(node)
        elif isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                one.environment.append((node.lineno, node.attr))
        elif isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            one.docstrings.append((getattr(node, "name", ""), ast.get_docstring(node) or ""))
    return one


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return tuple(parsed(path.read_text(), path.relative_to(PACKAGE)) for path in paths)
