"""Figures that a notebook shows by themselves, without pyplot and its state of the process."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from flagcx.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NOTEBOOK_DPI = 100


def new_figure(width: float, height: float, what: str) -> Figure:
    """An empty figure of ``width`` by ``height`` inches.

    Args:
        width: Inches.
        height: Inches.
        what: What is to be drawn, for the error.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"drawing {what} needs matplotlib, which is not installed: pip install 'flagcx[plot]'"
        ) from error

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png", dpi=_NOTEBOOK_DPI, bbox_inches="tight")
            return picture.getvalue()

        def _repr_html_(self) -> str:
            encoded = base64.b64encode(self._repr_png_()).decode()
            return f'<img alt="{what}" src="data:image/png;base64,{encoded}">'

    return ShownFigure(figsize=(width, height))
