"""Runs studies one after another and keeps their results, also when it is interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from importlib import metadata

from tidelog.bench.compare import FAILURES
from tidelog.bench.figures import one_line
from tidelog.bench.studies.acks_replicas import all_studies
from tidelog.bench.studies.assignors import Assignors
from tidelog.bench.studies.base import Context, Study
from tidelog.bench.studies.curves import Curves
from tidelog.bench.studies.endurance import Endurance
from tidelog.bench.studies.kills import Kills
from tidelog.bench.studies.latency import Latency
from tidelog.bench.studies.loads import Loads
from tidelog.bench.studies.planning import Planning
from tidelog.bench.studies.results import Report, StudyResult
from tidelog.bench.studies.three_clients import ThreeClients

ONLY_BY_NUMBER = frozenset({Endurance.number})
"""Studies that a report has only where they are asked for: they take an hour for each broker."""


def catalogue() -> list[Study]:
    """Every study by its number."""
    return [*all_studies(), Kills(), Latency(), Assignors(), Curves(), Planning(), Endurance(), Loads(), ThreeClients()]


def select(numbers: Collection[int]) -> list[Study]:
    """The studies of these numbers; without any, all but those of `ONLY_BY_NUMBER`."""
    return [
        study for study in catalogue() if (study.number in numbers if numbers else study.number not in ONLY_BY_NUMBER)
    ]


def run(studies: Sequence[Study], context: Context, report: Report, save: Callable[[Report], None]) -> None:
    """Fill `report`, and save it after each study. An interrupt is saved too, and raised again."""
    try:
        for place, study in enumerate(studies):
            result = StudyResult(study.number, study.title, study.question)
            report.studies.append(result)
            report.studies.sort(key=lambda each: each.number)
            start_s = time.monotonic()
            its_context = Context(
                context.brokers,
                context.is_quick,
                lambda text, place=place: context.progress(f"study {place + 1} of {len(studies)}: {text}"),  # type: ignore[misc]
            )
            try:
                study.measure(its_context, result)
                result.is_complete = not result.failures
            except FAILURES as error:
                result.failures.append(one_line(error))
            finally:
                result.elapsed_s = round(time.monotonic() - start_s, 1)
            save(report)
    except KeyboardInterrupt:
        report.is_interrupted = True
        save(report)
        raise


def versions(kafka: str | None) -> dict[str, str]:
    """Versions of the brokers that are measured and of the client that measures; `kafka` is None if it does not run."""
    version_of = {}
    for package in ("tidelog", "confluent-kafka"):
        try:
            version_of[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            version_of[package] = "not installed"
    return version_of if kafka is None else {**version_of, "Apache Kafka": kafka}
