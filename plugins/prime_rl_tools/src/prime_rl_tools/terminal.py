"""The console of every command: text that a model or an environment wrote cannot rule it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from prime_rl.errors import printable


class Console(rich.console.Console):
    """A console of rich that shows each control character of a text as one ``U+FFFD``. Rich itself
    writes ESC to the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if isinstance(renderable, Text):
            renderable = renderable.copy()
            renderable.plain = printable(renderable.plain)  # as long: styles stay in their places
        return super().render(renderable, options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)
