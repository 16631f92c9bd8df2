"""Charts as SVG text for a page, or as files of their own, drawn by matplotlib.

In a page text and axes take its colour (`currentColor`), so that one drawing serves light and
dark. Lines differ by dash and marker too, for readers who see few colours; the colours are Okabe
and Ito's.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import count
from typing import Any

from tidelog.bench.compare import OURS
from tidelog.bench.studies.results import Chart, Series

_WIDTH_INCHES, _HEIGHT_INCHES = 8.6, 4.2
_COLOURS = ("#2b8cc4", "#d9741f", "#1a9e76", "#c1649b", "#b08d00", "#6f7bd0")
_MARKERS = ("o", "s", "^", "D", "v", "P")
# Stands for the page's own colour while matplotlib draws.
_INK, _GRID = "#010203", "#7f7f7e"
_FILE_INK = "#24292f"
_MARKERS_UP_TO = 40
_STEPS_OF_A_DECADE = (1.0, 2.0, 5.0)


def as_svg(chart: Chart, number: int) -> str:
    """An <svg> element without width and height. `number` keeps ids of a page's charts apart."""
    return _for_page(_drawn(chart, f"chart-{number}", is_transparent=True), number)


def as_file(chart: Chart) -> str:
    """An SVG file with a title and a white background, for Markdown."""
    return _drawn(chart, "chart", is_transparent=False).replace(_INK, _FILE_INK)


def _drawn(chart: Chart, salt: str, *, is_transparent: bool) -> str:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.family": "sans-serif",
        "font.size": 10,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES))
        try:
            _draw(axes, chart)
            if not is_transparent:
                axes.set_title(chart.title, loc="left", fontsize=11)
            figure.tight_layout()
            drawn = io.StringIO()
            metadata = {"Date": None, "Creator": None}
            figure.savefig(drawn, format="svg", transparent=is_transparent, metadata=metadata)
        finally:
            plt.close(figure)
    return drawn.getvalue()


def _draw(axes: Any, chart: Chart) -> None:
    groups: dict[str, int] = {}
    places = count()
    for series in chart.series:
        if series.points:
            place = groups.setdefault(series.group or series.name, len(groups))
            _draw_series(axes, series, place, next(places))
    if chart.x_is_log:
        axes.set_xscale("log")
    if chart.y_is_log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    for mark in chart.marks:
        axes.axvline(mark.x, color=_INK, linewidth=0.8, linestyle=":")
        axes.annotate(
            mark.text, (mark.x, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -3),
            textcoords="offset points", rotation=90, va="top", fontsize=8,
        )  # fmt: skip
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    _tick(axes.xaxis, chart.x_is_log, [x for series in chart.series for x, _ in series.points])
    _tick(axes.yaxis, chart.y_is_log, [y for series in chart.series for _, y in series.points])
    axes.grid(axis="y", color=_GRID, linewidth=0.6, alpha=0.35)
    axes.spines[["top", "right"]].set_visible(False)
    if any(series.points for series in chart.series):
        axes.legend(frameon=False, fontsize=9, ncols=2)


def _tick(axis: Any, is_log: bool, values: Sequence[float]) -> None:
    """Plain numbers; on a logarithmic axis at 1, 2 and 5, on others at whole numbers where all are."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    if is_log:
        axis.set_major_locator(LogLocator(subs=_STEPS_OF_A_DECADE))
        axis.set_minor_formatter(NullFormatter())
    elif all(float(value).is_integer() for value in values):
        axis.set_major_locator(MaxNLocator(integer=True))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if float(value).is_integer() else f"{value:g}")


def _draw_series(axes: Any, series: Series, group: int, place: int) -> None:
    is_ours = series.broker == OURS
    axes.plot(
        *zip(*series.points),
        label=series.name,
        color=_COLOURS[group % len(_COLOURS)],
        linestyle="-" if is_ours else (0, (5, 2)),
        linewidth=2.0 if is_ours else 1.4,
        marker=_MARKERS[place % len(_MARKERS)] if len(series.points) <= _MARKERS_UP_TO else None,
        markersize=5,
        markerfacecolor=None if is_ours else "none",
    )


def _for_page(svg: str, number: int) -> str:
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # Ids that matplotlib does not salt would be the same in every chart of a page.
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>c{number}-", svg)
    return re.sub(
        r'<svg ([^>]*?)\s*width="[^"]*"\s*', r"<svg \1 ", svg.replace('height="', 'data-height="', 1), count=1
    )
