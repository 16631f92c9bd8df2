"""Figures and failures as text, and the percentile of all benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_CHARACTERS = 300


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile of values in rising order; None without values."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def number(value: float | None) -> str:
    """Three significant digits, thousands separated; a dash for what was not measured."""
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def one_line(error: BaseException) -> str:
    """An error's message on one line of at most 300 characters."""
    return " ".join(str(error).split())[:_MOST_CHARACTERS]


def one_line_with_type(error: BaseException) -> str:
    """As `one_line`, after the name of the error's class."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_CHARACTERS]
