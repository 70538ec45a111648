"""The console of every command: rich's console, made safe against control sequences in printed text.

Logs, evidence and names may contain escape sequences. They are removed here, where text becomes output, so that
commands need not do so. The colours and cursor movements of rich itself pass.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from results.text.printable import printable

_KEPT = "\n\t"


class SafeConsole(Console):
    """A console whose output has no control characters except those that rich writes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text, keep=_KEPT), segment.style)
