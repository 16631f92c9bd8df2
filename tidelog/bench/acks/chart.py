"""The study as one picture: records a second over the number of replicas, a line for each kind of acks.

The rates span two orders of magnitude, so their axis is logarithmic; lines are named where they end, not in a legend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidelog.bench.acks.contest import BROKERS, Measurements
from tidelog.bench.acks.settings import ALL, Setting, laws
from tidelog.bench.compare import OURS, THEIRS
from tidelog.bench.peers import KAFKA_VERSION

_INK, _MUTED, _GRID = "#1f2933", "#6b7783", "#e1e6ea"
_COLOURS = {0: "#c98a1b", 1: "#2f7f8f", ALL: "#c8553d"}
_STYLES: Mapping[str, Mapping[str, Any]] = {
    OURS: {"linestyle": "-", "linewidth": 2.2, "marker": "o", "markersize": 6},
    THEIRS: {"linestyle": (0, (4, 2)), "linewidth": 1.4, "marker": "o", "markersize": 5, "markerfacecolor": "white"},
}
_WIDTH, _HEIGHT = 11.0, 6.2


def draw(measured: Measurements, image: Path) -> None:
    """Writes `image`: a panel for one partition and one for twelve, as far as they were measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = {name: broker_rates for name in measured.rounds if (broker_rates := measured.rates(name))}
    partitions = sorted({setting.partitions for broker_rates in rates.values() for setting in broker_rates})
    image.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"font.family": ["DejaVu Sans"]}):
        figure, panels = plt.subplots(
            1, max(len(partitions), 1), figsize=(_WIDTH, _HEIGHT), dpi=150, sharey=True, squeeze=False
        )
        for panel, count in zip(panels[0], partitions):
            _panel(panel, count, rates)
        panels[0][0].set_ylabel("records a second, 1 KB, synchronous", color=_MUTED, fontsize=9.5)
        figure.text(0.065, 0.955, headline(rates), fontsize=14, weight="bold", color=_INK, va="top")
        figure.text(0.065, 0.898, _subtitle(list(rates)), fontsize=9.5, color=_MUTED, va="top")
        figure.text(0.065, 0.025, _footnote(rates), fontsize=8, color=_MUTED, va="bottom")
        figure.subplots_adjust(left=0.075, right=0.93, top=0.80, bottom=0.145, wspace=0.16)
        figure.savefig(image, facecolor="white")
        plt.close(figure)


def headline(rates: Mapping[str, Mapping[Setting, float]]) -> str:
    """What the picture shows, in a sentence."""
    kept = Setting(1, ALL, 3)
    ours, theirs = (rates.get(name, {}).get(kept) for name in (OURS, THEIRS))
    if ours and theirs:
        more = ours / theirs
        compared = f"{more:.1f} times" if more >= 1.05 else f"{more:.0%} of"
        return f"Three replicas, acks=all, one producer: {compared} Kafka's rate"
    if ours:
        return f"Three replicas, acks=all, one producer: {ours:,.0f} records a second"
    return "What acks and replicas cost"


def _subtitle(names: Sequence[str]) -> str:
    what = f"Rate by number of replicas on {BROKERS} nodes of one machine; one request in flight per producer"
    return what + (f". Solid: Tidelog. Dashed: Kafka {KAFKA_VERSION}" if THEIRS in names else "")


def _footnote(rates: Mapping[str, Mapping[Setting, float]]) -> str:
    verdicts = [law for name in rates for law in laws(rates[name])]
    held = sum(law.holds for law in verdicts)
    return (
        "Crosses: acks=all with a higher min.insync.replicas. acks=0 counts a record when the leader has it. "
        f"Laws that held: {held} of {len(verdicts)}."
    )


def _panel(panel: Any, partitions: int, rates: Mapping[str, Mapping[Setting, float]]) -> None:
    ends: list[tuple[float, str, str]] = []
    for name, broker_rates in rates.items():
        for acks, colour in _COLOURS.items():
            points = [(count, broker_rates.get(Setting(partitions, acks, count))) for count in (1, 2, 3, 4)]
            known = [(count, rate) for count, rate in points if rate]
            if known:
                panel.plot(*zip(*known), color=colour, zorder=3, **_STYLES.get(name, _STYLES[OURS]))
                if name == OURS or OURS not in rates:
                    ends.append((known[-1][1], f"acks={'all' if acks == ALL else acks}", colour))
        others = [
            (s.replicas, rate) for s, rate in broker_rates.items() if s.partitions == partitions and s.min_insync > 1
        ]
        if others:
            panel.scatter(*zip(*others), marker="x", s=34, color=_COLOURS[ALL], linewidth=1.3, zorder=4)
    panel.set_yscale("log")
    _name_ends(panel, ends)
    producers = f"{partitions} partitions, a producer on each" if partitions > 1 else "1 partition, 1 producer"
    panel.set_title(producers, fontsize=10.5, color=_INK, loc="left", pad=8)
    panel.set_xlim(0.8, 4.2)
    panel.set_xticks([1, 2, 3, 4])
    panel.set_xlabel("replicas", color=_MUTED, fontsize=9.5)
    panel.yaxis.set_major_formatter(lambda rate, _: f"{rate:,.0f}")
    panel.grid(axis="y", color=_GRID, linewidth=0.8, zorder=0)
    panel.grid(axis="y", which="minor", color=_GRID, linewidth=0.4, alpha=0.6, zorder=0)
    panel.tick_params(axis="both", which="both", length=0, labelsize=9, labelcolor=_MUTED)
    for spine in panel.spines.values():
        spine.set_visible(False)


def _name_ends(panel: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names beside the ends of the lines, pushed apart where they would meet."""
    lowest = 0.0
    for rate, name, colour in sorted(ends):
        place = max(rate, lowest)
        panel.text(4.12, place, name, color=colour, fontsize=9.5, weight="bold", va="center", clip_on=False)
        lowest = place * 1.22
