"""The costs of the planning model, and its error on clusters of one to four nodes.

The model is solved from requests of 4 KB and of 64 KB with one replica and with two, and from
reading on one node. It is then asked for requests of 16 KB, which it has not seen, on one, two,
three and four nodes with one to three replicas. Smaller requests in flight are read and appended
together: they cost less than a line through two points can say.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tidelog.bench.clusters import RunningCluster
from tidelog.bench.compare import FAILURES, MAKERS
from tidelog.bench.figures import one_line
from tidelog.bench.scenarios.base import GIGABYTE, Contestant, Metric
from tidelog.bench.scenarios.fetch_raw import FetchRaw
from tidelog.bench.scenarios.produce_raw import Load, ProduceRaw
from tidelog.bench.studies.base import Context
from tidelog.bench.studies.plan_model import Costs, Point, solve
from tidelog.bench.studies.results import StudyResult, Table, Verdict

_WINDOW = 16
_VALUE_BYTES = {4_000: (4, 1000), 16_000: (16, 1000), 64_000: (64, 1000)}
_SMALL, _UNSEEN, _LARGE = _VALUE_BYTES
NODES = (1, 2, 3, 4)
TOLERANCE = 0.3


@dataclass(frozen=True, slots=True)
class Parameters:
    """`scale` multiplies the requests of each point."""

    requests: int
    scale: float


QUICK, FULL = Parameters(300, 0.05), Parameters(5_000, 1.0)


class Planning:
    number = 9
    title = "A model for planning"
    question = "What does a load cost on more nodes than this machine has, and how far off is the model?"

    def measure(self, context: Context, result: StudyResult) -> None:
        chosen = QUICK if context.is_quick else FULL
        result.parameters = {
            "model": "requests x (a + b x bytes) + followers x requests x (c + d x bytes) + bytes read x e",
            "load": f"Produce requests, acks=all, {_WINDOW} in flight, one batch each",
            "solved from": "requests of 4 KB and 64 KB; smaller ones are appended together and cost less",
            "checked on": "requests of 16 KB, which the model has not seen",
        }
        costs_table = Table("Costs", ["broker", *Costs.__dataclass_fields__])
        error_table = Table(
            "The model's error",
            ["broker", "nodes", "replicas", "measured, us/request", "model, us/request", "error, %"],
        )
        result.tables = [costs_table, error_table]
        for name in context.brokers:
            try:
                costs = measure_costs(name, chosen, context)
                costs_table.rows.append([name, *asdict(costs).values()])
                errors = []
                for nodes in NODES:
                    for point in _points(name, nodes, range(1, min(nodes, 3) + 1), (_UNSEEN,), chosen, context):
                        expected = costs.request_cpu_us(point.batch_bytes, point.replicas)
                        errors.append(expected / point.cpu_us - 1)
                        error_table.rows.append(
                            [name, nodes, point.replicas, point.cpu_us, expected, round(errors[-1] * 100, 1)]
                        )
                worst = max(errors, key=abs)
                evidence = f"worst error {worst:+.0%} of {len(errors)} runs"
                result.verdicts.append(
                    Verdict(f"the model is within {TOLERANCE:.0%} everywhere", name, abs(worst) <= TOLERANCE, evidence)
                )
            except FAILURES as error:
                result.failures.append(f"{name}: {one_line(error)}")


def measure_costs(name: str, chosen: Parameters, context: Context) -> Costs:
    """The model's costs of one broker on this machine."""
    points = [
        *_points(name, 1, (1,), (_SMALL, _LARGE), chosen, context),
        *_points(name, 2, (2,), (_SMALL, _LARGE), chosen, context),
    ]
    context.progress(f"planning: reading: {name}")
    with _cluster(name, 1) as contestant:
        FetchRaw().warm(contestant, chosen.scale)
        out_s_per_gb = FetchRaw().measure(contestant, chosen.scale)["cpu"]
    return solve(points, out_s_per_gb * 1e6 / GIGABYTE)


def costs_of(result: StudyResult, broker: str) -> Costs | None:
    """The costs that a report's study has measured; None where it has none."""
    rows = [row for table in result.tables if table.title == "Costs" for row in table.rows if row[0] == broker]
    numbers = [float(cell) for cell in rows[0][1:] if cell is not None] if rows else []
    return Costs(*numbers) if len(numbers) == len(Costs.__dataclass_fields__) else None


def _points(
    name: str, nodes: int, replicas: Sequence[int], sizes: Sequence[int], chosen: Parameters, context: Context
) -> Iterator[Point]:
    with _cluster(name, nodes) as contestant:
        for count in replicas:
            for size in sizes:
                context.progress(f"planning: {nodes} nodes, {count} replicas, {size:,} bytes: {name}")
                contestant.replicas = count
                records, value_bytes = _VALUE_BYTES[size]
                load = Load(str(size), str(size), 1, records, value_bytes, chosen.requests, chosen.requests)
                scenario = ProduceRaw(load, _WINDOW, Metric("cpu", "us/request"))
                scenario.warm(contestant, 1.0)
                yield Point(size, count, scenario.measure(contestant, 1.0)["cpu"])


@contextmanager
def _cluster(name: str, nodes: int) -> Iterator[Contestant]:
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-") as scratch:
        cluster = MAKERS[name](Path(scratch, "cluster"), nodes)
        with RunningCluster(cluster):
            yield Contestant(name, cluster, lambda _: cluster, Path(scratch))
