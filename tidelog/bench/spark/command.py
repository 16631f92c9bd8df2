"""`tidelog bench spark`: our Spark source and sink beside Spark's own Kafka connector."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import click
from rich.console import Console
from rich.table import Table

from tidelog.bench.keeping import ResultFile, save_option, shown_at_the_end
from tidelog.bench.spark import compare as comparison
from tidelog.bench.spark.rows import OURS, catalogue, select
from tidelog.cli.common import IntegerRange


@click.command("spark")
@click.option("--rows", multiple=True, metavar="TEXT", help="Only rows whose name contains TEXT; may be repeated.")
@click.option(
    "--rounds", default=2, show_default=True, type=IntegerRange(1), help="Rounds per row, after one that is ignored."
)
@click.option("--quick", is_flag=True, help="One round of few records: shows that everything runs, not how fast.")
@click.option("--json", "json_", is_flag=True, help="Print JSON with every round instead of the table.")
@click.option("--markdown", is_flag=True, help="Print the table as docs/spark.md has it.")
@save_option
def spark(rows: Sequence[str], rounds: int, quick: bool, json_: bool, markdown: bool, save: Path | None) -> None:
    """Spark's batch reads, streams and writes with Tidelog, beside Spark's own connector with Apache Kafka.

    One session on local[2]. Needs PySpark and Java 17, and Maven once for the connector. A job that Spark does not end
    in five minutes fails alone.

    Example: tidelog bench spark --rows batch-100b
    """
    if run(rows, rounds=rounds, quick=quick, json_=json_, markdown=markdown, save=save):
        raise SystemExit(1)


def run(rows: Sequence[str], *, rounds: int, quick: bool, json_: bool, markdown: bool, save: Path | None) -> bool:
    """Measure and print; whether a row of ours has failed. Raises ClickException where Spark cannot run."""
    chosen = select(rows)
    if not chosen:
        raise click.UsageError(f"no row matches; there are: {', '.join(row.name for row in catalogue())}")
    if find_spec("pyspark") is None or which("java") is None:
        raise click.ClickException("Spark cannot run here: it needs Java 17 and pip install 'tidelog[spark]'")
    errors = Console(stderr=True)
    measured = [comparison.RowMeasurements(row) for row in chosen]
    file = ResultFile(save, lambda: comparison.as_json(measured), errors)

    def show() -> None:
        if json_:
            click.echo(comparison.as_json(measured))
        elif markdown:
            click.echo(comparison.as_markdown(measured))
        else:
            Console(width=None if sys.stdout.isatty() else 120).print(_table(measured))
        for each in measured:
            for name, failure in each.failures.items():
                errors.print(f"{each.row.name}, {name}: {failure}", style="red", markup=False)

    def keep(each: comparison.RowMeasurements, format_name: str) -> None:
        file.note(each.last_round(format_name))

    with shown_at_the_end(show, errors), errors.status("starting", spinner="dots") as status:
        comparison.run(
            measured,
            rounds=1 if quick else rounds,
            scale=0.01 if quick else 1.0,
            progress=status.update,
            on_measured=keep,
        )
    return any(OURS in each.failures for each in measured)


def _table(measured: Sequence[comparison.RowMeasurements]) -> Table:
    table = Table(title="Spark, local[2], medians", title_justify="left")
    for column in comparison.COLUMNS:
        table.add_column(column, justify="right" if column in comparison.COLUMNS[2:5] else "left")
    for line in comparison.cells(measured):
        table.add_row(*line)
    return table
