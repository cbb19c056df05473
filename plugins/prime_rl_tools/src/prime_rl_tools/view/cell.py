"""The live view in a notebook: one output of the cell that is replaced as the run goes on."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import Any

from rich.console import RenderableType

from prime_rl_tools.terminal import Console

WIDTH = 110
HTML = '<pre style="line-height:1.25">{code}</pre>'


class Cell:
    """Draws where ``rich.live.Live``, which needs a terminal or ipywidgets, cannot."""

    def __init__(self, display: Callable[..., Any] | None = None) -> None:
        """``display``: None for IPython's own function."""
        self._display = display
        self._handle: Any = None
        self._shown = ""

    def start(self) -> None:
        """Open the output."""
        if self._display is None:
            self._display = importlib.import_module("IPython.display").display
        self._handle = self._display({"text/plain": ""}, raw=True, display_id=True)

    def update(self, renderable: RenderableType, *, refresh: bool) -> None:
        """Replace the output, if the picture is new."""
        console = Console(
            file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False, force_terminal=True
        )
        console.print(renderable)
        page = console.export_html(inline_styles=True, code_format=HTML, clear=False)
        if refresh and page != self._shown:
            self._shown = page
            plain = console.export_text()
            self._handle.update({"text/html": page, "text/plain": plain}, raw=True)

    def stop(self) -> None:
        """The last picture stays."""
