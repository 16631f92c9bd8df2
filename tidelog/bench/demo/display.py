"""Progress bars of the demo: the producer, each member of the group, and Spark's tasks.

This module only draws. `changes` counts the updates that moved a bar, so that the demo notices a stall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Display:
    """Bars on a terminal; on anything else their last state, once, at the end."""

    def __init__(self, console: Console, rows: int, members: int) -> None:
        self._console = console
        self._rows = rows
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description:<11}"),
            BarColumn(bar_width=32),
            TextColumn("{task.percentage:>4.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        add = self._progress.add_task
        self._producer = add("producer", total=rows, note="", start=False)
        self._consumers = [add(f"consumer {n + 1}", total=None, note="", start=False) for n in range(members)]
        self._spark = add("Spark", total=None, note="starting its JVM meanwhile")
        self._seen: dict[int, tuple[Any, ...]] = {}
        self.changes = 0

    def __enter__(self) -> Display:
        self._console.print(f"\n[bold]Tidelog demo[/]: {self._rows:,} flights from New York City in 2013\n")
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def ready(self, bootstrap: str, ready_s: float, topic: str, replicas: int) -> None:
        what = "node" if "," not in bootstrap else "cluster"
        each = f", {replicas} replicas each" if replicas > 1 else ""
        self._console.print(f"  {what} ready in {ready_s:.2f} s at {bootstrap}")
        self._console.print(f"  {topic}{each}")

    def produced(self, acknowledged: int) -> None:
        self._start(self._producer)
        note = f"{acknowledged:,} of {self._rows:,} acknowledged"
        self._update(self._producer, acknowledged, self._rows, note)

    def consumer(self, number: int, partitions: Sequence[int], records: int, expected: int) -> None:
        task = self._consumers[number - 1]
        if records:
            self._start(task)
        held = f"partitions {' '.join(map(str, partitions))}" if partitions else "joining the group"
        self._update(task, records, expected or None, f"{records:,} records, {held}")

    def spark(self, said: Mapping[str, Mapping[str, Any]]) -> None:
        if "done" in said:
            self._update(self._spark, 1, 1, f"topic read and summed in {said['done']['seconds']:.1f} s")
        elif "tasks" in said:
            done, every = said["tasks"]["done"], said["tasks"]["every"]
            self._update(self._spark, done, every, f"{done} of {every} tasks")
        elif "reading" in said:
            self._update(self._spark, 0, None, "reading the topic")
        elif "session" in said:
            self._update(
                self._spark, 0, None, f"{said['session']['version']} up after {said['session']['seconds']:.1f} s"
            )

    def _start(self, task: Any) -> None:
        if not self._progress.tasks[task].started:
            self._progress.start_task(task)

    def _update(self, task: Any, completed: int, total: int | None, note: str) -> None:
        state = (completed, total, note)
        if self._seen.get(task) != state:
            self._seen[task] = state
            self.changes += 1
            self._progress.update(task, completed=completed, total=total, note=note)
