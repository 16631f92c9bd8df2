"""The comparison as a table for people, as Markdown for pages, as JSON for scripts. Measures nothing."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from tidelog.bench.compare import OURS, THEIRS, Row
from tidelog.bench.figures import number
from tidelog.bench.peers import KAFKA_VERSION
from tidelog.bench.scale import ScaleResult
from tidelog.bench.scenarios.base import Scenario


def table(rows: Sequence[Row]) -> Table:
    """One line per metric: ours, Kafka's, ours divided by Kafka's, the targets, the verdict."""
    out = Table(
        title=f"Tidelog beside Apache Kafka {KAFKA_VERSION}, same client, one run, medians", title_justify="left"
    )
    out.add_column("row")
    out.add_column("figure")
    for heading in ("tidelog", "kafka", "ratio"):
        out.add_column(heading, justify="right")
    out.add_column("target")
    out.add_column("")
    previous = None
    for row in rows:
        first = row.scenario is not previous
        previous = row.scenario
        out.add_row(
            row.scenario.title if first else "",
            f"{row.metric.name}, {row.metric.unit}",
            number(row.value(OURS)),
            number(row.value(THEIRS)),
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            target(row),
            {True: "[green]pass[/]", False: "[red]short[/]", None: ""}[row.passes],
            end_section=row is rows[-1] or rows[rows.index(row) + 1].scenario is not row.scenario,
        )
    return out


def target(row: Row) -> str:
    """The targets of a metric as they are judged."""
    parts = []
    if row.metric.at_most is not None:
        parts.append(f"<= {row.metric.at_most:g}")
    if row.metric.ratio_at_most is not None:
        parts.append(f"ratio <= {row.metric.ratio_at_most:.2f}")
    return ", ".join(parts)


def as_markdown(rows: Sequence[Row]) -> str:
    """The table for a page: the name of the row in place of its title."""
    lines = ["| row | figure | tidelog | kafka | ratio | target | |", "|---|---|---:|---:|---:|---|---|"]
    for row in rows:
        cells = (
            f"`{row.scenario.name}`",
            f"{row.metric.name}, {row.metric.unit}",
            number(row.value(OURS)),
            number(row.value(THEIRS)),
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            target(row),
            {True: "pass", False: "short", None: ""}[row.passes],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measurement(scenario: Scenario, name: str, figures: Mapping[str, float]) -> str:
    """One line for one measurement of one broker."""
    units = {metric.name: metric.unit for metric in scenario.metrics}
    shown = ", ".join(f"{metric} {number(value)} {units.get(metric, '')}".strip() for metric, value in figures.items())
    return f"{scenario.name}, {name}: {shown or 'not measured'}"


def failures(rows: Sequence[Row]) -> list[str]:
    """What could not be measured and why, once per row and broker."""
    reasons = {(row.scenario.name, name): reason for row in rows for name, reason in row.failures.items()}
    return [f"{scenario}, {name}: {reason}" for (scenario, name), reason in reasons.items()]


def as_json(rows: Sequence[Row]) -> str:
    """Every round's figures with the medians, ratios and verdicts, and the machine they were taken on."""
    entries: list[dict[str, Any]] = [
        {
            "row": row.scenario.name,
            "figure": row.metric.name,
            "unit": row.metric.unit,
            "medians": {name: row.value(name) for name in row.figures},
            "rounds": row.figures,
            "ratio": row.ratio,
            "at_most": row.metric.at_most,
            "ratio_at_most": row.metric.ratio_at_most,
            "passes": row.passes,
            "failures": row.failures,
        }
        for row in rows
    ]
    return json.dumps({"kafka": KAFKA_VERSION, "machine": machine(), "rows": entries}, indent=2)


def scale_table(results: Mapping[tuple[str, int], ScaleResult], brokers: int) -> Table:
    """One line per figure: a column for each broker and number of partitions, and how it grew from few to many."""
    out = Table(title=f"Many partitions on {brokers} broker{'s' if brokers > 1 else ''}", title_justify="left")
    out.add_column("figure")
    columns: list[tuple[str, Callable[[str], str]]] = []
    for name in dict.fromkeys(name for name, _ in results):
        sizes = [size for other, size in results if other == name]
        columns += [
            (f"{name}\n{size:,}", lambda figure, one=results[name, size]: number(one.figures.get(figure)))  # type: ignore[misc]
            for size in sizes
        ]
        if len(sizes) > 1:
            few, many = results[name, sizes[0]], results[name, sizes[-1]]
            columns.append(("growth", lambda figure, few=few, many=many: _growth(few, many, figure)))  # type: ignore[misc]
    for heading, _ in columns:
        out.add_column(heading, justify="right")
    for figure in dict.fromkeys(figure for one in results.values() for figure in one.figures):
        out.add_row(figure, *(cell(figure) for _, cell in columns))
    return out


def _growth(few: ScaleResult, many: ScaleResult, figure: str) -> str:
    before, after = few.figures.get(figure), many.figures.get(figure)
    return f"{after / before:.1f}x" if before and after is not None else "-"


def scale_json(results: Mapping[tuple[str, int], ScaleResult], brokers: int) -> str:
    """The same for scripts, with what failed."""
    entries = [
        {"broker": name, "partitions": size, "figures": one.figures, "failure": one.failure}
        for (name, size), one in results.items()
    ]
    return json.dumps({"brokers": brokers, "machine": machine(), "runs": entries}, indent=2)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
