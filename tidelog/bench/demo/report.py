"""What the demo concludes: the table of delays, and the checks that the source, the group and Spark agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tidelog.bench.demo.tally import LATE_AFTER_MINUTES, Tallies, Tally, differences, from_json, merged, total


@dataclass(frozen=True, slots=True)
class Outcome:
    """What each side saw: the consumers' last reports, where each partition ends, where the group committed to."""

    rows: int
    source: Tallies
    members: list[dict[str, Any]]
    ends: dict[int, int]
    committed: dict[int, int]
    spark: Tallies
    seconds: dict[str, float]

    @property
    def group(self) -> Tallies:
        return merged(*(from_json(member["tallies"]) for member in self.members))


def by_delay(tallies: Mapping[str, Tally]) -> list[tuple[str, Tally]]:
    """Carriers, the latest first."""
    return sorted(tallies.items(), key=lambda item: -item[1].mean_delay_minutes)


def table(tallies: Mapping[str, Tally], airlines: Mapping[str, str]) -> Table:
    drawn = Table(
        title="Arrival delay by carrier, as Spark read it from the topic", title_justify="left", show_footer=True
    )
    whole = total(tallies)
    drawn.add_column("Carrier", "All", no_wrap=True)
    drawn.add_column("Airline", f"{len(tallies)} carriers", no_wrap=True)
    drawn.add_column("Flights", f"{whole.flights:,}", justify="right")
    drawn.add_column("Arrived", f"{whole.arrived:,}", justify="right")
    drawn.add_column("Mean delay (min)", f"{whole.mean_delay_minutes:+.1f}", justify="right")
    drawn.add_column(f"Later than {LATE_AFTER_MINUTES} min", f"{whole.late_share:.1%}", justify="right")
    for carrier, tally in by_delay(tallies):
        drawn.add_row(
            carrier,
            airlines.get(carrier, ""),
            f"{tally.flights:,}",
            f"{tally.arrived:,}",
            f"{tally.mean_delay_minutes:+.1f}" if tally.arrived else "-",
            f"{tally.late_share:.1%}" if tally.arrived else "-",
        )
    return drawn


def checks(outcome: Outcome) -> Iterator[tuple[str, list[str]]]:
    """Every check in words, with what is wrong about it: nothing when it holds."""
    rows = outcome.rows
    yield f"the source gave {rows:,} flights", _unequal(rows, total(outcome.source).flights)
    yield (
        f"the topic holds {rows:,} records in {len(outcome.ends)} partitions",
        _unequal(rows, sum(outcome.ends.values())),
    )
    yield "two consumers together read every offset exactly once", offset_faults(outcome.members, outcome.ends)
    yield "the group's committed offsets are the ends of the partitions", _uncommitted(outcome)
    carriers = len(outcome.source)
    yield (
        f"the group's counts and sums equal the source's, {carriers} carriers",
        differences(outcome.source, outcome.group),
    )
    yield f"Spark's counts and sums equal the source's, {carriers} carriers", differences(outcome.source, outcome.spark)


def _unequal(want: int, got: int) -> list[str]:
    return [] if want == got else [f"expected {want:,}, got {got:,}"]


def _uncommitted(outcome: Outcome) -> list[str]:
    return [
        f"partition {partition}: committed {outcome.committed.get(partition)}, its end is {end}"
        for partition, end in sorted(outcome.ends.items())
        if outcome.committed.get(partition, 0) != end
    ]


def offset_faults(members: list[dict[str, Any]], ends: Mapping[int, int]) -> list[str]:
    """Partitions of which the members' ranges do not join into exactly [0, end)."""
    faults = []
    for partition, end in sorted(ends.items()):
        spans = sorted(span for member in members if (span := member["ranges"].get(str(partition))) is not None)
        reached = 0
        for first, following, records in spans:
            if first != reached or records != following - first:
                faults.append(
                    f"partition {partition}: {records} records for offsets {first} to {following}, after {reached}"
                )
            reached = following
        if reached != end:
            faults.append(f"partition {partition}: read up to {reached}, its end is {end}")
    return faults


def print_checks(console: Console, outcome: Outcome) -> bool:
    """Prints each check with its result; whether all hold."""
    good = True
    console.print()
    for what, faults in checks(outcome):
        console.print(f"  [green]✓[/] {what}" if not faults else f"  [red]✗[/] {what}")
        for fault in faults[:5]:
            console.print(f"      {fault}")
        good = good and not faults
    return good


def timings(outcome: Outcome) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in outcome.seconds.items())
