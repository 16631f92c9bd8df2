"""The report as Markdown: a summary for a README and for pages."""

from __future__ import annotations

from tidelog.bench.figures import number
from tidelog.bench.studies.results import Cell, Report, StudyResult, Table


def as_markdown(report: Report) -> str:
    """Every study's tables, verdicts and charts; the charts are the files of `chart_files`."""
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    versions = ", ".join(f"{name} {value}" for name, value in report.versions.items())
    lines = [f"`{report.command}`, {report.started}; {machine}; {versions}.", ""]
    if report.is_interrupted:
        lines += ["The run was interrupted: studies that are not complete say so.", ""]
    for study in report.studies:
        lines += _study(study)
    return "\n".join(lines).rstrip() + "\n"


def _study(study: StudyResult) -> list[str]:
    lines = [f"## {study.number}. {study.title}", "", study.question, ""]
    if study.kept_from:
        lines += [f"Kept from an earlier run: {study.kept_from}.", ""]
    if not study.is_complete:
        lines += ["Not complete.", ""]
    lines += [f"- {name}: {value}" for name, value in study.parameters.items()]
    for table in study.tables:
        lines += ["", *as_table(table)]
    for chart, file in zip(study.charts, chart_files(study)):
        lines += ["", f"![{_escaped(chart.title)}]({file})"]
    if study.verdicts:
        judged = Table("Verdicts", ["law", "broker", "holds", "figures"])
        judged.rows = [
            [verdict.statement, verdict.broker, verdict_word(verdict.holds), verdict.evidence]
            for verdict in study.verdicts
        ]
        lines += ["", *as_table(judged)]
    lines += ["", *(f"- Failed: {failure}" for failure in study.failures)]
    return [*lines, ""]


def chart_files(study: StudyResult) -> list[str]:
    """The name of the file of each chart, relative to the report's."""
    return [f"charts/{study.number}-{place}.svg" for place in range(1, 1 + len(study.charts))]


def as_table(table: Table) -> list[str]:
    """The table's title and its lines."""
    lines = [f"**{table.title}**", ""] if table.title else []
    lines.append(f"| {' | '.join(table.columns)} |")
    lines.append("|" + "---|" * len(table.columns))
    lines += [f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in table.rows]
    if table.note:
        lines += ["", table.note]
    return lines


def verdict_word(holds: bool | None) -> str:
    return {True: "yes", False: "no", None: "not judged"}[holds]


def shown(cell: Cell) -> str:
    """A cell as text: numbers as `figures.number` writes them."""
    return cell if isinstance(cell, str) else number(cell)


def _escaped(cell: Cell) -> str:
    return shown(cell).replace("|", "\\|").replace("\n", " ")
