"""`tidelog bench report`: all scenarios as one HTML page, with JSON and Markdown beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console

from tidelog.bench.compare import FAILURES, OURS, THEIRS
from tidelog.bench.keeping import INTERRUPTED
from tidelog.bench.page.charts import as_file
from tidelog.bench.page.html import as_html
from tidelog.bench.page.markdown import as_markdown, chart_files
from tidelog.bench.peers import KAFKA_VERSION, bring_kafka
from tidelog.bench.report import machine
from tidelog.bench.studies import plan_model, planning, runner
from tidelog.bench.studies.base import Context
from tidelog.bench.studies.results import Report
from tidelog.cli.common import IntegerRange, NumberRange


@click.command("report")
@click.option("--quick", "is_quick", flag_value=True, default=False, help="Shows that everything runs, not how fast.")
@click.option("--full", "is_quick", flag_value=False, help="The default: the sizes that the report is meant for.")
@click.option(
    "--scenario", "numbers", multiple=True, type=IntegerRange(1, 12),
    help="Only this one; may be repeated. 10, an hour for each broker, runs only so.",
)  # fmt: skip
@click.option("--only", type=click.Choice([OURS, THEIRS]), help="Measure one broker alone.")
@click.option(
    "--output", default="bench-out/report", show_default=True, type=click.Path(file_okay=False, path_type=Path),
    help="Directory for report.html, report.json, report.md and its charts.",
)  # fmt: skip
@click.option("--keep", is_flag=True, help="Keep the other scenarios of the report that is in the output directory.")
@click.option(
    "--from-json",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Draw this report again; measure nothing.",
)
def report(
    is_quick: bool, numbers: Sequence[int], only: str | None, output: Path, keep: bool, from_json: Path | None
) -> None:
    """All benchmark scenarios but the tenth on this machine, beside Apache Kafka where Java and Maven are, as one page.

    Ctrl-C ends what was started and keeps what was measured; --keep goes on from there.

    Example: tidelog bench report --quick
    """
    errors = Console(stderr=True)
    for package, name in (("confluent_kafka", "confluent-kafka"), ("matplotlib", "matplotlib")):
        if find_spec(package) is None:
            raise click.ClickException(f"{name} is not installed: pip install {name}")
    if from_json is not None:
        write(_read(from_json), output)
        click.echo(output / "report.html")
        return
    brokers = [only] if only else [OURS, THEIRS]
    if THEIRS in brokers and (reason := bring_kafka()) is not None:
        errors.print(reason, style="yellow", markup=False)
        brokers.remove(THEIRS)
    if not brokers:
        raise SystemExit(1)
    chosen = runner.select(numbers)
    arguments = ["tidelog bench report", "--quick" if is_quick else "--full"]
    arguments += [f"--scenario {number}" for number in numbers] + ([f"--only {only}"] if only else [])
    result = Report(
        datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), " ".join(arguments), machine(),
        runner.versions(KAFKA_VERSION if THEIRS in brokers else None),
    )  # fmt: skip
    if keep and (output / "report.json").exists():
        result.keep(_read(output / "report.json"), [study.number for study in chosen])
    start_s = time.monotonic()
    try:
        with errors.status("starting", spinner="dots") as status:

            def progress(text: str) -> None:
                status.update(f"{time.monotonic() - start_s:5.0f} s  {text}")

            runner.run(chosen, Context(brokers, is_quick, progress), result, lambda it: write(it, output))
    except KeyboardInterrupt:
        errors.print("interrupted: what was measured is kept", style="yellow")
        click.echo(output / "report.html")
        raise SystemExit(INTERRUPTED) from None
    for study in result.studies:
        for failure in study.failures:
            errors.print(f"{study.number}. {study.title}: {failure}", style="red", markup=False)
    click.echo(output / "report.html")
    if any(study.failures for study in result.studies):
        raise SystemExit(1)


@click.command("plan")
@click.option("--mb-in", required=True, type=NumberRange(0, min_open=True), help="Megabytes a second produced.")
@click.option("--fan-out", default=1.0, show_default=True, type=NumberRange(0), help="How often each is read.")
@click.option("--rf", "replicas", default=3, show_default=True, type=IntegerRange(1), help="Replicas.")
@click.option(
    "--batch-bytes", default=16_384, show_default=True, type=IntegerRange(100), help="Size of a producer's batch."
)
@click.option("--retention-hours", default=168.0, show_default=True, type=NumberRange(0))
@click.option(
    "--report", "report_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take the costs from this report.json; else they are measured now, for half a minute.",
)  # fmt: skip
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def plan(
    mb_in: float,
    fan_out: float,
    replicas: int,
    batch_bytes: int,
    retention_hours: float,
    report_file: Path | None,
    json_: bool,
) -> None:
    """How many nodes a load needs, from costs measured on this machine. A node is one process on one core.

    Example: tidelog bench plan --mb-in 500 --fan-out 3 --rf 3
    """
    costs = _costs(report_file)
    load = plan_model.Load(mb_in, fan_out, replicas, batch_bytes, retention_hours)
    answer = plan_model.plan(costs, load)
    if json_:
        click.echo(json.dumps({"load": asdict(load), "costs": asdict(costs), "plan": asdict(answer)}, indent=2))
        return
    share = f"{plan_model.BUSY_SHARE:.0%}"
    click.echo(f"cores      {answer.cores:.1f} busy on average")
    click.echo(f"nodes      {answer.nodes}, a core each at {share} or less, {replicas} replicas")
    click.echo(
        f"network    {answer.in_mb_per_node:,.0f} MB/s in and {answer.out_mb_per_node:,.0f} MB/s out of each node"
    )
    click.echo(f"disk       {answer.disk_gb_per_node:,.0f} GB on each node for {retention_hours:g} hours")


def _costs(report_file: Path | None) -> plan_model.Costs:
    """From a report, else measured. Raises ClickException."""
    if report_file is None:
        errors = Console(stderr=True)
        with errors.status("measuring", spinner="dots") as status:
            try:
                return planning.measure_costs(
                    OURS, planning.FULL, Context([OURS], False, lambda text: status.update(text))
                )
            except FAILURES as error:
                raise click.ClickException(f"cannot measure the costs: {error}") from error
    for study in _read(report_file).studies:
        costs = planning.costs_of(study, OURS)
        if costs is not None:
            return costs
    raise click.ClickException(f"{report_file} has no costs: tidelog bench report --scenario 9")


def _read(file: Path) -> Report:
    """Raises ClickException."""
    try:
        return Report.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{file}: {error}") from error


def write(report: Report, output: Path) -> None:
    """report.json, report.html and report.md, with the charts of the latter, into the directory `output`."""
    (output / "charts").mkdir(parents=True, exist_ok=True)
    for study in report.studies:
        for chart, file in zip(study.charts, chart_files(study)):
            (output / file).write_text(as_file(chart), encoding="utf-8")
    (output / "report.json").write_text(report.to_json(), encoding="utf-8")
    (output / "report.md").write_text(as_markdown(report), encoding="utf-8")
    (output / "report.html").write_text(as_html(report, "report.json"), encoding="utf-8")
