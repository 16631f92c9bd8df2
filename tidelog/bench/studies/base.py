"""The interface of a study, and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidelog.bench.studies.results import StudyResult


@dataclass(frozen=True, slots=True)
class Context:
    """`brokers` are names of `compare.MAKERS`; `is_quick` shows that all runs, not how fast."""

    brokers: Sequence[str]
    is_quick: bool
    progress: Callable[[str], None]


class Study(Protocol):
    """`number` is that of the scenario in docs/benchmarks.md."""

    number: int
    title: str
    question: str

    def measure(self, context: Context, result: StudyResult) -> None:
        """Fill in `result` while measuring, so that an interrupt keeps what is there.

        A broker that fails goes into `result.failures`; the others go on.
        """
