"""`tidelog bench acks`: what acks and replicas cost, on clusters started for it, as tables, chart and JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console

from tidelog.bench.acks import chart, contest, report
from tidelog.bench.acks.settings import all_settings, studies
from tidelog.bench.compare import OURS, THEIRS
from tidelog.bench.keeping import ResultFile, save_option, shown_at_the_end
from tidelog.bench.peers import bring_kafka
from tidelog.cli.common import IntegerRange, NumberRange

_NOTE = """Each producer waits for the answer to its record before it sends the next; with acks=0 there is no answer,
and a record counts when the leader has it. All nodes share this machine: compare lines, not machines."""


@click.command("acks")
@click.option("--study", "numbers", multiple=True, type=IntegerRange(1, 3), help="Only this table; may be repeated.")
@click.option("--rounds", default=3, show_default=True, type=IntegerRange(1), help="Medians of so many rounds.")
@click.option("--seconds", default=1.5, show_default=True, type=NumberRange(0.05), help="Each setting, in each round.")
@click.option("--with-kafka", is_flag=True, help="Apache Kafka beside it, in turn (needs Java 17 and Maven).")
@click.option("--json", "json_wanted", is_flag=True, help="Print JSON with every round instead of the tables.")
@click.option(
    "--chart",
    "image",
    default="bench-out/acks.png",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to draw the picture.",
)
@save_option
def acks(
    numbers: Sequence[int],
    rounds: int,
    seconds: float,
    with_kafka: bool,
    json_wanted: bool,
    image: Path,
    save: Path | None,
) -> None:
    """What acks and replicas cost: synchronous producers, acks 0, 1 and all, one to four replicas.

    Starts four nodes on loopback with data in a temporary directory, and ends them. The three laws (acks 0 > 1 > all;
    more replicas, slower at acks=all; min.insync.replicas does not matter) are judged by what was measured.

    Example: tidelog bench acks --study 3 --with-kafka
    """
    errors = Console(stderr=True)
    chosen = [study for study in studies() if not numbers or study.number in numbers]
    brokers = [OURS]
    if with_kafka:
        reason = bring_kafka()
        if reason is None:
            brokers.append(THEIRS)
        else:
            errors.print(reason, style="yellow", markup=False)
    settings = all_settings(chosen)
    measured = contest.Measurements()
    file = ResultFile(save, lambda: report.as_json(chosen, settings, measured), errors)

    def show() -> None:
        if json_wanted:
            click.echo(report.as_json(chosen, settings, measured))
        else:
            console = Console(width=None if sys.stdout.isatty() else 120)
            for study in chosen:
                console.print(report.table(study, measured))
            console.print(report.law_table(measured))
            click.echo(_NOTE)
        if find_spec("matplotlib") is None:
            errors.print("no chart: matplotlib is not installed (pip install matplotlib)", style="yellow")
        elif any(measured.rates(name) for name in brokers):
            chart.draw(measured, image)
            errors.print(f"chart: {image}", highlight=False, markup=False)
        for failure in measured.failures:
            errors.print(failure, style="red", markup=False)

    with shown_at_the_end(show, errors), errors.status("starting", spinner="dots") as status:

        def progress(text: str) -> None:
            file.write()
            status.update(text)

        contest.run(settings, brokers, rounds=rounds, seconds=seconds, progress=progress, measured=measured)
        file.write()
    if measured.failures:
        raise SystemExit(1)
