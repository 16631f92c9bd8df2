"""`tidelog bench clients`: Python clients in turn on one node of Tidelog, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tidelog.bench import compare
from tidelog.bench.clients.worker import CLIENTS
from tidelog.bench.clusters import RunningCluster
from tidelog.bench.compare import FAILURES
from tidelog.bench.figures import number, one_line, percentile
from tidelog.bench.keeping import ResultFile, save_option, shown_at_the_end
from tidelog.bench.raw import BenchError
from tidelog.cli.common import IntegerRange
from tidelog.client.model import NewTopic
from tidelog.client.sync import Admin, Producer

_PARTITIONS = 6
_TIMEOUT_S = 300
_PACKAGES = {"aiokafka": "aiokafka", "kafka-python": "kafka", "confluent-kafka": "confluent_kafka"}
_EXTRAS = {
    "send_arrow": "numba",
    "poll_arrow": "numba",
    "asyncio": "confluent_kafka.aio",
    "asyncio poll": "confluent_kafka.aio",
}
_RECORDS = {"produce": 300_000, "consume": 2_000_000, "one at a time": 2_000}


@dataclass(slots=True)
class ClientCost:
    """What one client costs for one kind of work with records of one size: a value for each round."""

    kind: str
    size: int
    client: str
    cpu_us: list[float] = field(default_factory=list)
    """CPU of the client's process, microseconds a record."""
    rate: list[float] = field(default_factory=list)
    """Records a second."""
    p50_us: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)
    failure: str = ""
    """Why it could not be measured; it is not tried again then."""

    def add(self, measured: Mapping[str, Any]) -> None:
        """The figures of one round, as the worker has printed them."""
        self.cpu_us.append(measured["cpu_s"] * 1e6 / measured["records"])
        self.rate.append(measured["records"] / measured["elapsed_s"])
        if ordered := sorted(measured["latencies_us"]):
            self.p50_us.append(percentile(ordered, 50) or 0)
            self.p99_us.append(percentile(ordered, 99) or 0)

    def last_round(self) -> str:
        """What the last measurement has shown, in one line."""
        name = f"{self.kind}, {self.size:,} B: {self.client}"
        if self.failure:
            return f"{name} failed: {self.failure}"
        latencies = f", p50 {number(self.p50_us[-1])} us, p99 {number(self.p99_us[-1])} us" if self.p50_us else ""
        return f"{name}: CPU {number(self.cpu_us[-1])} us a record, {number(self.rate[-1])} records/s{latencies}"


@click.command("clients")
@click.option("--rounds", default=3, show_default=True, type=IntegerRange(1), help="Rounds; medians are shown.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(CLIENTS)), help="Only this; may be repeated.")
@click.option("--size", "sizes", multiple=True, default=(100, 1024), show_default=True, type=IntegerRange(1, 100_000))
@click.option("--quick", is_flag=True, help="One short round: shows that everything runs, not how fast.")
@click.option("--json", "json_", is_flag=True, help="Print JSON with every round instead of the tables.")
@click.option("--markdown", is_flag=True, help="Print the tables as docs/client.md has them.")
@save_option
def clients(
    rounds: int,
    kinds: Sequence[str],
    sizes: Sequence[int],
    quick: bool,
    json_: bool,
    markdown: bool,
    save: Path | None,
) -> None:
    """Python clients beside each other: Tidelog's, aiokafka, kafka-python, confluent-kafka.

    Those that are not installed are left out. Each runs in a process of its own, in turn, on one node. Every
    measurement is a line on standard error at once; Ctrl-C shows the tables of what was measured until then.

    Example: tidelog bench clients --kind produce --size 100
    """
    errors = Console(stderr=True)
    costs = [
        ClientCost(kind, size, client)
        for kind in kinds or CLIENTS
        for size in sizes
        for client in CLIENTS[kind]
        if _is_installed(client)
    ]
    file = ResultFile(save, lambda: as_json(costs), errors)

    def show() -> None:
        measured = [cost for cost in costs if cost.rate]
        if json_:
            click.echo(as_json(costs))
        elif markdown:
            click.echo(as_markdown(measured))
        else:
            Console().print(_table(measured))

    with shown_at_the_end(show, errors), errors.status("starting", spinner="dots") as status:

        def keep(cost: ClientCost) -> None:
            file.note(cost.last_round(), "red" if cost.failure else None)

        _measure_all(costs, 1 if quick else rounds, 0.01 if quick else 1.0, status.update, keep)
    if any(cost.failure for cost in costs):
        raise SystemExit(1)


def _measure_all(
    costs: Sequence[ClientCost],
    rounds: int,
    scale: float,
    progress: Callable[[str], None],
    on_measured: Callable[[ClientCost], None],
) -> None:
    """Measure the clients on one node, in turn, then the next size and kind."""
    with (
        TemporaryDirectory(prefix="tidelog-bench-") as directory,
        RunningCluster(compare.tidelog(Path(directory), 1)) as node,
    ):
        for (kind, size), group in groupby(costs, lambda cost: (cost.kind, cost.size)):
            together = list(group)
            records = int(_RECORDS[kind] * scale)
            if size > 500 and kind != "one at a time":
                records //= 2
            for at in range(rounds):
                for cost in together:
                    if cost.failure:
                        continue
                    progress(f"{kind}, {size} B, round {at + 1}: {cost.client}")
                    try:
                        cost.add(_measure(cost, node.cluster.bootstrap_servers, records))
                    except FAILURES as error:
                        cost.failure = one_line(error)
                    on_measured(cost)


def _is_installed(client: str) -> bool:
    name, _, way = client.partition(", ")
    packages = (_PACKAGES.get(name), _EXTRAS.get(way))
    return all(find_spec(package) is not None for package in packages if package is not None)


def _measure(cost: ClientCost, bootstrap: str, records: int) -> dict[str, Any]:
    """One round, in a topic of its own. Raises BenchError when the client fails."""
    topic = "bench-clients"
    with Admin(bootstrap_servers=bootstrap) as admin:
        admin.create_topics([NewTopic(topic, _PARTITIONS, 1)])
        try:
            if cost.kind == "consume":
                _fill(bootstrap, topic, records, cost.size)
            return _run(cost, bootstrap, topic, records)
        finally:
            admin.delete_topics([topic])


def _fill(bootstrap: str, topic: str, records: int, size: int) -> None:
    value = b"v" * size
    with Producer(bootstrap_servers=bootstrap) as producer:
        for _ in range(0, records, 1000):
            producer.send_many(topic, [value] * 1000)
        producer.flush()


def _run(cost: ClientCost, bootstrap: str, topic: str, records: int) -> dict[str, Any]:
    arguments = [cost.kind, cost.client, bootstrap, topic, str(records), str(cost.size)]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tidelog.bench.clients.worker", *arguments],
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BenchError(f"not done after {_TIMEOUT_S} s") from None
    if ended.returncode != 0:
        raise BenchError((ended.stderr.strip().splitlines() or ["without a word"])[-1])
    figures: dict[str, Any] = json.loads(ended.stdout)
    return figures


def _cells(cost: ClientCost) -> list[str]:
    values = (cost.cpu_us, cost.rate, cost.p50_us, cost.p99_us)
    return [cost.kind, f"{cost.size:,} B", cost.client, *(number(median(each)) if each else "" for each in values)]


_COLUMNS = ["work", "records of", "client", "CPU us a record", "records/s", "p50 us", "p99 us"]


def _table(costs: Sequence[ClientCost]) -> Table:
    table = Table(title="Python clients on one node, medians", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _COLUMNS[:3] else "right", no_wrap=column == "client")
    for at, cost in enumerate(costs):
        is_last = at + 1 == len(costs) or (costs[at + 1].kind, costs[at + 1].size) != (cost.kind, cost.size)
        table.add_row(*_cells(cost), end_section=is_last)
    return table


def as_markdown(costs: Sequence[ClientCost]) -> str:
    """One table, as the documentation has it."""
    rows = [_COLUMNS, ["---"] * 3 + ["---:"] * 4, *(_cells(cost) for cost in costs)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def as_json(costs: Sequence[ClientCost]) -> str:
    """Every round's figures; the lists of a client that was not measured are empty."""
    return json.dumps([_as_dict(cost) for cost in costs], indent=2)


def _as_dict(cost: ClientCost) -> dict[str, Any]:
    return {
        "kind": cost.kind, "size_bytes": cost.size, "client": cost.client, "cpu_us": cost.cpu_us, "rate": cost.rate,
        "p50_us": cost.p50_us, "p99_us": cost.p99_us, "failure": cost.failure,
    }  # fmt: skip
