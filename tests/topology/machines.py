"""Paths to our fixtures and, where they lie beside the checkout, to files of real machines."""

from __future__ import annotations

from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
SHARED = Path(__file__).parents[3] / "shared" / "machines"
#: Files that are no topology.
REFUSED = ("MALFORMED_h200_dump_cut_short.xml", "azure_ncv4_graph.xml")
#: A file that does not say which of its devices are GPUs.
CLASSLESS = ("aws_g5_8xa10g.xml",)


def shared_files(folder: str, pattern: str, *, without: tuple[str, ...] = ()) -> list:
    """The real machines' files as test parameters; one skipped parameter where there are none."""
    found = sorted((SHARED / folder).rglob(pattern)) if SHARED.exists() else []
    if not found:
        skip = pytest.mark.skip(reason=f"no files of real machines beside the checkout ({folder})")
        return [pytest.param(None, marks=skip)]
    return [pytest.param(path, id=path.name) for path in found if path.name not in without]
