"""`tidelog bench`, also `python -m tidelog.bench`: comparisons with Kafka, acks and replicas, scale, profiles."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import click
from rich.console import Console

from tidelog.bench import compare as comparison
from tidelog.bench import peers, profiling, report, scale, scale_node
from tidelog.bench.acks.command import acks
from tidelog.bench.clients.command import clients
from tidelog.bench.figures import number
from tidelog.bench.keeping import InterruptibleGroup, ResultFile, save_option, shown_at_the_end
from tidelog.bench.micro import hot_path
from tidelog.bench.scenarios.base import Scenario
from tidelog.bench.spark.command import run as run_spark
from tidelog.bench.spark.command import spark
from tidelog.bench.spark.rows import catalogue as spark_catalogue
from tidelog.bench.studies.command import plan as plan_command
from tidelog.bench.studies.command import report as report_command
from tidelog.cli.common import IntegerRange

_NOTES = """CPU is the broker's own, all threads, from its process clock. Latency is taken at the client's socket.
Every round deletes its topic; before each that writes, as much memory as it writes is touched and freed, for both."""


@click.group(cls=InterruptibleGroup, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure brokers from outside, on nodes started for it.

    Ctrl-C, SIGTERM and SIGHUP end the nodes and keep what was measured.

    Example: tidelog bench compare --rows produce-200b --rounds 5
    """


@command.command()
@click.option("--rows", multiple=True, metavar="TEXT", help="Only rows whose name contains TEXT; may be repeated.")
@click.option("--rounds", default=3, show_default=True, type=IntegerRange(1), help="Rounds per row; medians are shown.")
@click.option(
    "--minutes", default=14.0, show_default=True, help="No round begins, but each first one, that would end later."
)
@click.option("--quick", is_flag=True, help="One short round: shows that everything runs, not how fast.")
@click.option("--only", type=click.Choice(list(comparison.MAKERS)), help="Measure one broker alone.")
@click.option("--json", "json_", is_flag=True, help="Print JSON with every round instead of the table.")
@click.option("--markdown", is_flag=True, help="Print the table as docs/benchmarks.md has it.")
@save_option
@click.option("--strict", is_flag=True, help="Exit with 1 when a target is missed.")
def compare(
    rows: Sequence[str],
    rounds: int,
    minutes: float,
    quick: bool,
    only: str | None,
    json_: bool,
    markdown: bool,
    save: Path | None,
    strict: bool,
) -> None:
    """Tidelog beside Apache Kafka, interleaved in one run, as ratios.

    Kafka needs Java 17 and Maven; without them it is left out with a line that says so. Rows of Spark
    (`--rows spark`) are those of `tidelog bench spark`; they run only where they are named.

    Example: tidelog bench compare --rows produce --rounds 1
    """
    spark_rows = [text for text in rows if text.startswith("spark")]
    other_rows = [text for text in rows if text not in spark_rows]
    if spark_rows and other_rows and (save is not None or json_):
        raise click.UsageError("--json and --save take rows of Spark or other rows: measure them one after the other")
    spark_failed = False
    if spark_rows:
        spark_failed = run_spark(spark_rows, rounds=rounds, quick=quick, json_=json_, markdown=markdown, save=save)
    if not spark_rows or other_rows:
        _compare(other_rows, rounds, minutes, quick, only, json_, markdown, save, strict)
    if spark_failed:
        raise SystemExit(1)


def _compare(
    rows: Sequence[str],
    rounds: int,
    minutes: float,
    quick: bool,
    only: str | None,
    json_: bool,
    markdown: bool,
    save: Path | None,
    strict: bool,
) -> None:
    errors = Console(stderr=True)
    if find_spec("confluent_kafka") is None:
        raise click.ClickException("the benchmark's client is not installed: pip install confluent-kafka")
    scenarios = comparison.select(rows)
    if not scenarios:
        known = ", ".join([one.name for one in comparison.catalogue()] + [row.name for row in spark_catalogue()])
        raise click.UsageError(f"no row matches; there are: {known}")
    names = [only] if only else [comparison.OURS, *_kafka_or_none(errors)]
    if quick:
        rounds = 1
    measured = comparison.rows_of(scenarios)
    file = ResultFile(save, lambda: report.as_json(measured), errors)

    def show() -> None:
        if json_:
            click.echo(report.as_json(measured))
        elif markdown:
            click.echo(report.as_markdown(measured))
        else:
            Console(width=None if sys.stdout.isatty() else 120).print(report.table(measured))
            click.echo(_NOTES)
        for failure in report.failures(measured):
            errors.print(failure, style="red", markup=False)

    def keep(scenario: Scenario, name: str, figures: Mapping[str, float]) -> None:
        file.note(report.measurement(scenario, name, figures))

    with shown_at_the_end(show, errors), errors.status("starting", spinner="dots") as status:
        comparison.run(
            scenarios,
            names,
            rounds=rounds,
            scale=0.1 if quick else 1.0,
            minutes=minutes,
            progress=lambda text: status.update(text),
            rows=measured,
            on_figures=keep,
        )
    if strict and any(row.passes is False for row in measured):
        raise SystemExit(1)


@command.command()
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def rows(json_: bool) -> None:
    """The names of the rows that `compare` knows.

    Example: tidelog bench rows
    """
    if json_:
        known = comparison.catalogue()
        click.echo(
            json.dumps(
                [
                    {"name": one.name, "title": one.title, "metrics": [each.name for each in one.metrics]}
                    for one in known
                ],
                indent=2,
            )
        )
        return
    for scenario in comparison.catalogue():
        click.echo(f"{scenario.name:22} {scenario.title}: {', '.join(one.name for one in scenario.metrics)}")
    for row in spark_catalogue():
        click.echo(f"{row.name:22} Spark beside its own Kafka connector: {', '.join(row.metrics)}")


@command.command()
@click.option("--row", required=True, metavar="NAME", help="A row of `compare`, e.g. produce-16kb-w1.")
@click.option("--lines", default=25, show_default=True, help="How many functions to show.")
def profile(row: str, lines: int) -> None:
    """Where a row's CPU goes: user and kernel time, and the functions of the node.

    Example: tidelog bench profile --row produce-16kb-w1
    """
    scenarios = [scenario for scenario in comparison.catalogue() if scenario.name == row]
    if not scenarios:
        raise click.UsageError(f"no row {row!r}; `tidelog bench rows` lists them")
    figures, splits = profiling.measure_split(scenarios[0])
    for metric in scenarios[0].metrics:
        click.echo(f"{metric.name:16} {number(figures[metric.name])} {metric.unit}")
    for place, split in enumerate(splits):
        name = f"CPU of node {place + 1}" if len(splits) > 1 else "CPU"
        click.echo(f"{name:16} {split.user_s + split.kernel_s:.2f} s, {split.kernel_share:.0%} of it in the kernel")
    click.echo(profiling.functions(scenarios[0], lines))


@command.command(name="scale")
@click.option(
    "--partitions",
    default=10_000,
    show_default=True,
    type=IntegerRange(1),
    help="Each with as many replicas as there are brokers, but at most three.",
)
@click.option("--few", default=1_000, show_default=True, type=IntegerRange(0), help="Measured first; 0 for not.")
@click.option("--brokers", default=3, show_default=True, type=IntegerRange(1, 9))
@click.option("--connections", default=5_000, show_default=True, type=IntegerRange(0), help="To one broker alone.")
@click.option("--only", type=click.Choice(list(comparison.MAKERS)), default=comparison.OURS, show_default=True)
@click.option("--with-kafka", is_flag=True, help="Apache Kafka after it.")
@click.option("--json", "json_", is_flag=True, help="Print JSON instead of the table.")
@save_option
def scale_(
    partitions: int,
    few: int,
    brokers: int,
    connections: int,
    only: str,
    with_kafka: bool,
    json_: bool,
    save: Path | None,
) -> None:
    """Many partitions: creation, idle cost, a start; and the growth of each.

    With several brokers also the loss of one and its return, with one broker its death and many connections.

    Example: tidelog bench scale --partitions 10000 --brokers 1 --few 100 --with-kafka
    """
    errors = Console(stderr=True)
    names = [only, *(_kafka_or_none(errors) if with_kafka and only != comparison.THEIRS else [])]
    sizes = [few, partitions] if 0 < few < partitions else [partitions]
    results: dict[tuple[str, int], scale.ScaleResult] = {}
    file = ResultFile(save, lambda: report.scale_json(results, brokers), errors)

    def show() -> None:
        if json_:
            click.echo(report.scale_json(results, brokers))
        else:
            Console(width=None if sys.stdout.isatty() else 120).print(report.scale_table(results, brokers))
        for (name, size), one in results.items():
            if one.failure:
                errors.print(f"{name}, {size:,} partitions: {one.failure}", style="red", markup=False)

    with shown_at_the_end(show, errors), errors.status("starting", spinner="dots") as status:

        def progress(text: str) -> None:
            file.write()
            status.update(text)

        for name, size in product(names, sizes):
            one = results[name, size] = scale.ScaleResult()
            if brokers > 1:
                scale.run(name, brokers, size, progress, result=one)
            else:
                scale_node.run(name, size, connections, progress, result=one)
            file.write()
    if any(one.failure for one in results.values()):
        raise SystemExit(1)


@command.command()
@click.option("--only", default="", metavar="TEXT", help="Only those whose name contains TEXT.")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def micro(only: str, json_: bool) -> None:
    """CPU microseconds of single functions on the hot path, in this process.

    Example: tidelog bench micro --only fetch
    """
    costs: dict[str, float] = {}
    for name, call in hot_path.calls().items():
        if only in name:
            costs[name] = hot_path.cost_us(call)
            if not json_:
                click.echo(f"{name:32} {costs[name]:10.2f} us")
    if json_:
        click.echo(json.dumps(costs, indent=2))


def _kafka_or_none(errors: Console) -> list[str]:
    reason = peers.bring_kafka()
    if reason is None:
        return [comparison.THEIRS]
    errors.print(reason, style="yellow", markup=False)
    return []


command.add_command(clients)
command.add_command(acks)
command.add_command(spark)
command.add_command(report_command)
command.add_command(plan_command)
