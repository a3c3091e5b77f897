"""The plots of a report, from the same files as its tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.eval.statistics import Interval
from headstart.eval.summary import main_row
from headstart.heads.store import atomic_path


def plot_acceptance(acceptance: dict[str, Any], path: Path) -> None:
    """Conditional acceptance by position with intervals: the head offline and live, n-gram lookup beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    kind = acceptance["checkpoint"]["kind"]
    shown = [(kind, "offline", "o"), (kind, "live", "x"), ("ngram", "offline", "s")]
    for shift, (drafter, source, marker) in enumerate(shown):
        row = main_row(acceptance, drafter, source)
        found = [(k + 0.08 * (shift - 1), a) for k, a in enumerate(row["conditional"] if row else [])]
        plot_intervals(axes, found, marker, f"{drafter}, {source}")
    axes.set(xlabel="draft position", ylabel="accepted / judged", ylim=(0, 1.02))
    axes.set_xticks(range(max((row["draft_length"] for row in acceptance["rows"]), default=1)))
    axes.grid(alpha=0.3)
    axes.legend()
    save_plot(figure, path)


def plot_training(curve: list[dict[str, Any]], path: Path) -> None:
    """accept_len on the validation split over optimiser steps, with its interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    steps = [line["step"] for line in curve]
    axes.plot(steps, [line["accept_len"] for line in curve], marker="o")
    if all(line.get("accept_len_low") is not None and line.get("accept_len_high") is not None for line in curve):
        low, high = ([line[f"accept_len_{end}"] for line in curve] for end in ("low", "high"))
        axes.fill_between(steps, low, high, alpha=0.2)
    axes.set(xlabel="optimiser step", ylabel="accept_len (validation)")
    axes.grid(alpha=0.3)
    save_plot(figure, path)


def plot_lengths(rows: Sequence[dict[str, Any]], cost: float | None, path: Path) -> None:
    """accept_len by prompt length with intervals; drafting gains above the line of a step's cost, where it was timed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    plot_intervals(axes, [(i, row["accept_len"]) for i, row in enumerate(rows)], "o-", "accept_len")
    if cost is not None:
        axes.axhline(cost, linestyle="--", color="grey", label="cost of a step with drafts")
    axes.set(xlabel="prompt tokens", ylabel="accept_len")
    axes.set_xticks(range(len(rows)), [row["context"] for row in rows])
    axes.grid(alpha=0.3)
    axes.legend()
    save_plot(figure, path)


def plot_reliability(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Acceptance over confidence by depth, in bins, with intervals; on the dashed line confidence means what it says."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot((0, 1), (0, 1), linestyle="--", color="grey")
    for row in rows:
        found = [(held["confidence"], held["acceptance"]) for held in row["bins"] if held["confidence"] is not None]
        plot_intervals(axes, found, "o-", f"{row['draft']}, depth {row['depth']}")
    axes.set(xlabel="confidence", ylabel="accepted / judged", xlim=(0, 1.02), ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()
    save_plot(figure, path)


def plot_intervals(axes: Any, found: Sequence[tuple[float, Interval]], marker: str, label: str) -> None:
    """Values at their places, with a bar where there is an interval; what was not measured is left out."""
    known = [(x, value["value"]) for x, value in found if value["value"] is not None]
    if known:
        (line,) = axes.plot(*zip(*known, strict=True), marker, label=label)
        bars = [(x, value["low"], value["high"]) for x, value in found if value["low"] is not None]
        for x, low, high in bars:
            axes.vlines(x, low, high, color=line.get_color())


def save_plot(figure: Any, path: Path) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
