"""Draws docs/figures/architecture.svg and docs/figures/point.svg: ``python docs/figures/draw_architecture.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FOLDER = Path(__file__).parent
COLOURS = {
    "sweep": "#dbe9f6",
    "launchers": "#fde6cf",
    "workloads": "#e0f0d9",
    "results": "#e9e2f3",
    "analysis": "#f8dcdc",
    "user": "#f2f2f2",
}
INK, GREY = "#222222", "#666666"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "ultrasweep", "font.family": "sans-serif", "font.size": 10}


def box(
    ax: Axes, x: float, y: float, room: str, title: str, lines: str, width: float = 2.75, height: float = 1.3
) -> None:
    """A box whose lower left corner is at (x, y), in the colour of its room."""
    ax.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", facecolor=COLOURS[room], edgecolor=GREY
        )
    )
    ax.text(x + width / 2, y + height - 0.14, title, ha="center", va="top", weight="bold", fontsize=12, color=INK)
    ax.text(x + width / 2, y + height - 0.47, lines, ha="center", va="top", fontsize=9.6, color=INK, linespacing=1.35)


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    label: str = "",
    at: tuple[float, float] | None = None,
    *,
    bend: float = 0.0,
    dashed: bool = False,
) -> None:
    """An arrow, and its label centred at ``at`` (the middle of the arrow if not given)."""
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=13,
            linewidth=1.3,
            color=INK,
            linestyle="--" if dashed else "-",
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=0,
            shrinkB=0,
        )
    )
    if label:
        x, y = at or ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.09)
        ax.text(x, y, label, ha="center", va="bottom", fontsize=9.2, color=GREY, linespacing=1.2)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), facecolor="white")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    return figure, ax


def draw_flow() -> Figure:
    """What flows, in three rows: planning (left to right), running (right to left), reading (left to right)."""
    figure, ax = canvas(13.6, 6.0)
    wide, high = 2.75, 1.3
    x, y = [0.15, 3.62, 7.09, 10.56], [4.55, 2.6, 0.65]
    box(ax, x[0], y[0], "user", "Grid, model, cluster", "YAML files:\nsweep/conf/ and --conf DIR")
    box(ax, x[1], y[0], "sweep", "Experiments", "one frozen description a point,\nwith an id;\nsweep/grids/expand.py")
    box(
        ax,
        x[2],
        y[0],
        "sweep",
        "Plan = ledger",
        "every point with a verdict,\npredicted memory, time, price;\nledger.parquet",
    )
    box(ax, x[3], y[0], "launchers", "Queue", "one file a point, in one of\ntodo/  claimed/  done/;\nlaunchers/state/")
    box(
        ax,
        x[3],
        y[1],
        "launchers",
        "Pilot",
        "one for each allocation:\nclaims points, starts, watches\nand judges attempts",
    )
    box(ax, x[2], y[1], "launchers", "Agents", "one on each node:\nfork the ranks and prove\nthat they are gone")
    box(ax, x[1], y[1], "workloads", "Ranks", "one process a GPU:\nthe engine, the timed steps;\nor one rehearsed rank")
    box(
        ax,
        x[0],
        y[1],
        "workloads",
        "attempts/ID/",
        "task, heartbeats, results,\nerrors and logs:\nworkloads/contract/protocol.py",
    )
    box(
        ax,
        x[0],
        y[2],
        "launchers",
        "Recorder",
        "of the pilot: outcome with\nevidence, one attempt row,\none step row a rank and step",
    )
    box(ax, x[1], y[2], "results", "parts/", "one Parquet file an attempt\nand table, written by\ntemp + rename")
    box(ax, x[2], y[2], "results", "Tables", "attempts.parquet,\nsteps.parquet;\nresults/tables/schema.py")
    box(ax, x[3], y[2], "analysis", "Report", "page, figures, explorer,\ntables, claims, comparison")
    middle = [row + high / 2 for row in y]
    for left, label in ((0, "expand"), (1, "judge"), (2, "verdict\nrun")):
        arrow(ax, (x[left] + wide, middle[0]), (x[left + 1], middle[0]), label)
    arrow(ax, (x[3] + 1.3, y[0]), (x[3] + 1.3, y[1] + high), "claim", (x[3] + 1.65, y[0] - 0.42))
    for right, label in ((3, "JSON\nlines"), (2, "fork"), (1, "files")):
        arrow(ax, (x[right], middle[1]), (x[right - 1] + wide, middle[1]), label)
    arrow(ax, (x[0] + 1.3, y[1]), (x[0] + 1.3, y[2] + high), "read", (x[0] + 1.6, y[1] - 0.45))
    for left, label in ((0, "rows"), (1, "compact"), (2, "read")):
        arrow(ax, (x[left] + wide, middle[2]), (x[left + 1], middle[2]), label)
    # The recorder's last act, drawn between the rows: the point's file moves on.
    back_y = y[1] - 0.36
    ax.plot(
        [x[0] + 2.3, x[0] + 2.3, x[3] + 2.95, x[3] + 2.95],
        [y[2] + high, back_y, back_y, middle[0]],
        "--",
        color=INK,
        lw=1.1,
    )
    arrow(ax, (x[3] + 2.95, middle[0]), (x[3] + wide, middle[0]), dashed=True)
    ax.text(
        6.8,
        back_y + 0.05,
        "last: the point's file moves to done/ or back to todo/",
        ha="center",
        va="bottom",
        fontsize=9.2,
        color=GREY,
    )
    for at, (room, colour) in enumerate(list(COLOURS.items())[:5]):
        ax.add_patch(
            FancyBboxPatch(
                (0.3 + 1.55 * at, 0.18), 0.22, 0.22, boxstyle="square,pad=0", facecolor=colour, edgecolor=GREY
            )
        )
        ax.text(0.6 + 1.55 * at, 0.29, f"{room}/", va="center", fontsize=9, color=INK)
    return figure


def draw_point() -> Figure:
    """The states of a point: where its file lies, and who moves it."""
    figure, ax = canvas(12.2, 5.0)
    size = {"width": 2.5, "height": 1.15}
    box(ax, 3.05, 2.0, "sweep", "waiting", "queue/todo/\nSTEM.json", **size)
    box(ax, 7.15, 2.0, "launchers", "claimed", "queue/claimed/\nSTEM@PILOT.json", **size)
    box(ax, 9.45, 0.25, "results", "done", "queue/done/\nSTEM@OUTCOME.json", **size)
    box(ax, 0.2, 3.6, "sweep", "planned", "a row of ledger.parquet\nwith the verdict run", **size)
    box(ax, 0.2, 0.25, "user", "gone", "no longer in the plan", **size)
    box(ax, 3.05, 0.25, "user", "broken", "queue/broken/: not a point", **size)
    arrow(ax, (1.9, 3.6), (3.4, 3.15), "run: add", (2.98, 3.4))
    arrow(ax, (5.55, 2.75), (7.15, 2.75), "claim", (6.35, 2.78))
    arrow(ax, (7.15, 2.3), (5.55, 2.3), "release,\nor try again", (6.35, 1.88))
    arrow(ax, (9.65, 2.4), (10.7, 1.4), "finish", (10.6, 1.85))
    arrow(ax, (9.45, 0.75), (5.3, 2.0), "retry", (7.6, 0.93))
    arrow(ax, (3.6, 2.0), (2.4, 1.4), "another\nplan", (2.6, 1.68))
    arrow(ax, (4.3, 2.0), (4.3, 1.4), "unreadable", (4.86, 1.6))
    arrow(ax, (8.0, 3.15), (8.9, 3.15), bend=-1.3)
    ax.text(8.45, 3.85, "take over from a dead pilot", ha="center", fontsize=9.2, color=GREY)
    arrow(ax, (3.9, 3.15), (4.8, 3.15), bend=-1.3)
    ax.text(
        4.7,
        3.85,
        "paused by the breaker, or waiting\nfor the canary: the file stays",
        ha="center",
        fontsize=9.2,
        color=GREY,
    )
    return figure


def save(figure: Figure, name: str) -> None:
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    with matplotlib.rc_context(STYLE):
        save(draw_flow(), "architecture")
        save(draw_point(), "point")


if __name__ == "__main__":
    main()
