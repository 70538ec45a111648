"""The console of every command: rich's own, but nothing that is printed can command the terminal.

Logs, evidence and names may hold escape sequences. They are taken out here, where text becomes output, so that no
command has to think of it. The colours and movements of rich itself pass.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from results.text.printable import printable

_KEPT = "\n\t"


class SafeConsole(Console):
    """A console whose output holds no control character but those that rich writes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text, keep=_KEPT), segment.style)
