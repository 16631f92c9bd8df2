"""The results of a study as plain values: tables, charts and verdicts, to JSON and back.

Pure. A report holds several studies; `bench/page` draws it. Units are in the names of columns and
axes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

Cell = str | float | int | None
FORMAT_VERSION = 1


@dataclass(slots=True)
class Table:
    """Rows of cells under `columns`. A cell that was not measured is None."""

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""


@dataclass(slots=True)
class Series:
    """One line of a chart. `broker` chooses the line's style, `group` its colour."""

    name: str
    broker: str
    points: list[tuple[float, float]]
    group: str = ""


@dataclass(slots=True)
class Mark:
    """An event at `x`, for instance the kill of a node."""

    x: float
    text: str


@dataclass(slots=True)
class Chart:
    """Lines over a common x axis."""

    title: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    x_is_log: bool = False
    y_is_log: bool = False


@dataclass(slots=True)
class Verdict:
    """A law, whether one broker's figures obey it (None: not to be judged), and the figures."""

    statement: str
    broker: str
    holds: bool | None
    evidence: str


@dataclass(slots=True)
class StudyResult:
    """All that one study has to show. `parameters` are what was set, in order, as text."""

    number: int
    title: str
    question: str
    parameters: dict[str, str] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0
    is_complete: bool = False
    kept_from: str = ""
    """The time and the command of an earlier report that this was measured in; empty when it is of this run."""


@dataclass(slots=True)
class Report:
    """One run of `tidelog bench report`."""

    started: str
    """UTC, ISO 8601."""
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    studies: list[StudyResult] = field(default_factory=list)
    is_interrupted: bool = False

    def keep(self, earlier: Report, but: Collection[int]) -> None:
        """Take over the studies of an earlier report that have figures, but those of the numbers `but`.

        One in which a point failed names it among its failures.
        """
        for study in earlier.studies:
            if study.tables and study.number not in but:
                study.kept_from = study.kept_from or f"{earlier.started}, {earlier.command}"
                self.studies.append(study)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT_VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Report:
        """Raises ValueError when the text is not a report of this format."""
        try:
            values = json.loads(text)
            if values.pop("format") != FORMAT_VERSION:
                raise ValueError("a report of another format")
            values["studies"] = [_study(each) for each in values["studies"]]
            return Report(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a benchmark report: {error}") from error


def _study(values: dict[str, Any]) -> StudyResult:
    values["tables"] = [Table(**each) for each in values["tables"]]
    values["charts"] = [_chart(each) for each in values["charts"]]
    values["verdicts"] = [Verdict(**each) for each in values["verdicts"]]
    return StudyResult(**values)


def _chart(values: dict[str, Any]) -> Chart:
    values["series"] = [Series(**{**each, "points": [(x, y) for x, y in each["points"]]}) for each in values["series"]]
    values["marks"] = [Mark(**each) for each in values["marks"]]
    return Chart(**values)


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Ours divided by Kafka's; None where one of them is missing or Kafka's is zero."""
    return ours / theirs if ours is not None and theirs else None


def rate_over_time(times_s: Iterable[float], width_s: float, end_s: float) -> list[tuple[float, float]]:
    """Events a second in steps of `width_s` from 0 to `end_s`, each at the middle of its step."""
    counts = [0] * max(1, int(end_s / width_s))
    for time_s in times_s:
        place = int(time_s / width_s)
        if 0 <= place < len(counts):
            counts[place] += 1
    return [((place + 0.5) * width_s, count / width_s) for place, count in enumerate(counts)]
