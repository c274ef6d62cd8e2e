"""Figures that a notebook shows by themselves, without pyplot and its state of the process."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flagcx.errors import ArgumentError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NOTEBOOK_DPI = 100
_SUFFIXES = (".png", ".svg", ".pdf")


def new_figure(
    width: float, height: float, what: str, layout: Literal["constrained"] | None = None
) -> Figure:
    """An empty figure of ``width`` by ``height`` inches.

    Args:
        width: Inches.
        height: Inches.
        what: What is to be drawn, for the error.
        layout: matplotlib's layout engine.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"drawing {what} needs matplotlib, which is not installed; pip install 'flagcx[plot]'"
        ) from error

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=_NOTEBOOK_DPI, bbox_inches="tight")
            return picture.getvalue()

        def _repr_html_(self) -> str:
            encoded = base64.b64encode(self._repr_png_()).decode()
            return f'<img alt="{what}" src="data:image/png;base64,{encoded}">'

    return ShownFigure(figsize=(width, height), layout=layout)


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuses a file that no picture can be saved to, before the work of drawing it.

    Raises:
        ArgumentError: The ending is none of .png, .svg and .pdf, or there is no such directory.
    """
    place = Path(path)
    if place.suffix.lower() not in _SUFFIXES:
        raise ArgumentError(
            f"{place}: cannot draw to {place.suffix or 'no ending'!r}; use .png, .svg or .pdf"
        )
    if not place.absolute().parent.is_dir():
        raise ArgumentError(f"{place}: cannot be written: there is no such directory")


def save_picture(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Saves a figure.

    Raises:
        ArgumentError: The file cannot be written, or its ending is none of .png, .svg and .pdf.
    """
    check_picture(path)
    try:
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except OSError as error:
        raise ArgumentError(f"{os.fspath(path)}: cannot be written: {error.strerror or error}") from None
