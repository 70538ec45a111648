"""The table of docs/accuracy.md on `advise`: its first layout for a question beside those that teams published."""

from __future__ import annotations

from typing import NamedTuple

from docs.tools.accuracy_scores import table
from sweep.advising.answer import Advice, answer
from sweep.advising.facts import published_of
from sweep.advising.question import read_question
from sweep.composing.conffiles import ConfFolders
from sweep.planning.summary import layout


class Asked(NamedTuple):
    """A question to which teams published a layout (``sweep/conf/published``), with their batch."""

    model: str
    cluster: str
    gpus: int
    batch: int


QUESTIONS = (
    Asked("llama70b", "h100_ib400", 64, 512),
    Asked("qwen3_30b_a3b", "h100_ib400", 8, 512),
    Asked("qwen3_30b_a3b", "h100_ib400", 16, 1024),
    Asked("qwen3_30b_a3b", "gb200", 8, 512),
    Asked("qwen3_30b_a3b", "gb300", 256, 16384),
    Asked("qwen3_235b_a22b", "gb200", 256, 8192),
    Asked("qwen3_235b_a22b", "gb300", 256, 8192),
    Asked("deepseek_v3", "h100_ib400", 1024, 16384),
    Asked("deepseek_v3", "gb200", 256, 4096),
    Asked("deepseek_v3", "gb300", 256, 4096),
)


def section() -> str:
    lines = []
    for asked in QUESTIONS:
        found = answered(asked)
        name = f"{asked.model} on {asked.gpus:,} {asked.cluster}"
        best = found.best[0] if found.best else None
        for published, numbers in published_of(found):
            against = numbers["against_best"]
            lines.append((
                name,
                {
                    "the first of `advise`": layout(best.experiment) if best else "nothing fits",
                    "published": layout(published.experiment),
                    "published, over the first": str(published.why_not) if against is None else f"{1 + against:.2f}",
                },
            ))  # fmt: skip
    return table(lines, "question")


def answered(asked: Asked) -> Advice:
    """`advise` in bf16 with its usual sequences of 4,096 tokens."""
    words = [f"model={asked.model}", f"cluster={asked.cluster}", f"gpus={asked.gpus}"]
    return answer(read_question([*words, f"global_batch_size={asked.batch}"], ConfFolders()))


if __name__ == "__main__":
    print(section())
