"""The studies of the report: their verdicts, their figures made from samples, and what an interrupt keeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from tests.patience import PATIENCE_S, wait_until
from tidelog.bench.acks.settings import ALL, Setting
from tidelog.bench.compare import OURS, THEIRS
from tidelog.bench.figures import percentile
from tidelog.bench.raw import BenchError
from tidelog.bench.studies import (
    assignors,
    endurance,
    kills,
    latency,
    loads,
    plan_model,
    planning,
    runner,
    three_clients,
)
from tidelog.bench.studies.acks_replicas import PARTITIONS, partition_verdicts
from tidelog.bench.studies.base import Context
from tidelog.bench.studies.command import report as report_command
from tidelog.bench.studies.histogram import Histogram
from tidelog.bench.studies.reader import Order
from tidelog.bench.studies.results import Report, StudyResult, Table, Verdict


def holding(verdicts: list[Verdict]) -> list[bool | None]:
    return [verdict.holds for verdict in verdicts]


def rates(*values: float) -> dict[Setting, float]:
    return {Setting(count, ALL, 2, 2): rate for count, rate in zip(PARTITIONS, values)}


def test_a_rate_that_grows_and_flattens_obeys_the_partition_curve() -> None:
    assert holding(partition_verdicts(OURS, rates(100, 180, 240, 260, 250))) == [True, True]
    assert holding(partition_verdicts(OURS, rates(100, 100, 100, 100, 100))) == [False, True]
    assert holding(partition_verdicts(OURS, rates(100, 110, 130, 200, 400))) == [True, False]
    assert partition_verdicts(OURS, rates(100, 110)) == []


def test_kills_are_judged_by_what_was_read_back() -> None:
    chosen = kills.FULL
    case = kills.Case(2, True, True)
    sent = kills.Sent(count=10)
    assert holding(kills.verdicts(case, OURS, sent, 0, 0, chosen.records_per_s, chosen)) == [True] * 4
    sent.failed_s[3] = 1.0
    assert holding(kills.verdicts(case, OURS, sent, 1, 1, 0.0, chosen)) == [False] * 4
    # Without retries failures are expected, without idempotence doubles are.
    assert holding(kills.verdicts(kills.Case(2, False, False), OURS, sent, 0, 5, chosen.records_per_s, chosen)) == [
        True,
        True,
    ]


def test_the_longest_pause_counts_the_start_and_the_end() -> None:
    assert kills._longest_pause_s([1.0, 2.0, 2.5, 11.0], 10.0) == 7.5
    assert kills._longest_pause_s([], 10.0) == 10.0


def test_percentiles_are_compared_one_by_one() -> None:
    ours, theirs = [1.0] * 99 + [50.0], [2.0] * 100
    assert holding(latency.ahead_verdicts("send", ours, theirs)) == [True, True, False, False]
    assert latency.ahead_verdicts("send", ours, []) == []


def test_a_load_is_judged_by_rate_and_by_cost() -> None:
    both = {OURS: 100.0, THEIRS: 90.0}
    assert holding(loads.verdicts("keys", both, both)) == [True, False]
    assert holding(loads.verdicts("keys", {OURS: None, THEIRS: 90.0}, both)) == [False]


def test_medians_of_the_loads_are_shown_also_when_some_are_missing() -> None:
    result = StudyResult(11, "", "")
    first = loads.Figures([3.0, 1.0, 2.0], [6.0, 4.0, 5.0])
    cold = loads.Figures([9.0], [1.0], [0.25])
    loads.show(result, {(loads.FIRST, OURS): first, (loads.LOADS[-1].name, THEIRS): cold}, [OURS, THEIRS])
    (table,) = result.tables
    assert table.rows[0] == [loads.FIRST, 2.0, 5.0, None, None, None, None]
    assert table.rows[-1][3:5] == [9.0, 1.0]
    assert "kafka: 25% of the cold row's pages" in table.note
    assert result.verdicts == []


def test_dropped_pages_are_counted(tmp_path: Path) -> None:
    written, empty = tmp_path / "written", tmp_path / "empty"
    written.write_bytes(bytes(300_001))
    empty.touch()
    with written.open("r+b") as file:
        assert loads.resident_pages(file.fileno()) == bytes([1]) * 74
    assert loads.drop_pages([empty]) == 0
    assert 0 <= loads.drop_pages([written, empty]) <= 1


def test_rates_are_read_from_the_output_of_javas_tools() -> None:
    produced = (
        "4096 records sent, 819.0 records/sec (0.08 MB/sec), 1.2 ms avg latency, 3.0 ms max latency.\n"
        "300000 records sent, 91234.5 records/sec (8.70 MB/sec), 1.2 ms avg latency\n"
        "270000 steady state records sent, 99000.5 records/sec (9.44 MB/sec), 1.1 ms avg latency\n"
    )
    assert three_clients.produced_rate(produced) == 99000.5
    consumed = (
        "2026-11-23 19:00:00:000, 2026-11-23 19:00:01:000, 28.6, 28.6, 300000, 300000.0, 200, 800, 35.7, 375000.0\n"
    )
    assert three_clients.consumed_rate(consumed) == 375000.0
    for parse in (three_clients.produced_rate, three_clients.consumed_rate):
        with pytest.raises(BenchError, match="no rate"):
            parse("an error, in a line")


def samples(*values: tuple[float, int, float, list[str]]) -> list[dict[str, Any]]:
    return [{"time_s": at, "records": records, "cpu_s": cpu, "assigned": owned} for at, records, cpu, owned in values]


def test_a_timeline_is_made_of_windows_of_all_members() -> None:
    chosen = assignors.Parameters(100, 1, 2, 2, 1)
    one = samples((100.0, 0, 1.0, ["a", "b"]), (101.0, 50, 1.5, ["a"]), (102.0, 50, 1.5, ["a"]))
    two = samples(
        (99.0, 10, 0.0, ["c"]), (100.0, 10, 0.0, ["c"]), (101.0, 20, 0.0, ["b", "c"]), (103.0, 40, 1.0, ["b", "c"])
    )
    found = assignors.timeline_of([one, two], 100.0, chosen)
    assert found.rates == [(0.5, 60.0), (1.5, 10.0)]
    assert found.cpu_shares == [(0.5, 50.0), (1.5, 50.0)]
    assert found.moved == 1
    assert found.gains == [-50.0]
    assert found.largest_change == 50.0


def test_sticky_is_judged_against_the_smoother_of_the_others() -> None:
    calm = {"range": 100.0, "roundrobin": 200.0, "sticky": 90.0, "cooperative-sticky": 10.0}
    assert holding(assignors.smoothness(OURS, calm)) == [True, True]
    assert holding(assignors.smoothness(OURS, calm | {"sticky": 150.0})) == [False, True]
    assert assignors.smoothness(OURS, {"sticky": 1.0}) == []


def test_sticky_is_judged_by_what_those_that_stay_keep() -> None:
    assert holding(assignors.stickiness(OURS, {"roundrobin": 10, "sticky": 0, "cooperative-sticky": 0})) == [True, True]
    assert holding(assignors.stickiness(OURS, {"sticky": 1, "cooperative-sticky": 0})) == [False, True]
    assert assignors.stickiness(OURS, {"range": 3}) == []


class Failing:
    """A study that measures something and then fails."""

    number, title, question = 1, "failing", "?"

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def measure(self, context: Context, result: StudyResult) -> None:
        context.progress("half way")
        result.tables.append(Table("t", ["x"], [[1]]))
        if self.error is not None:
            raise self.error


def empty_report() -> Report:
    return Report("now", "command", {}, {})


def test_a_study_that_fails_keeps_its_figures_and_the_others_go_on() -> None:
    found, saved, lines = empty_report(), list[int](), list[str]()
    context = Context([OURS], True, lines.append)
    runner.run(
        [Failing(BenchError("broken")), Failing(None)], context, found, lambda each: saved.append(len(each.studies))
    )
    assert saved == [1, 2]
    assert [study.failures for study in found.studies] == [["broken"], []]
    assert [study.is_complete for study in found.studies] == [False, True]
    assert [len(study.tables) for study in found.studies] == [1, 1]
    assert lines == ["study 1 of 2: half way", "study 2 of 2: half way"]


def test_an_interrupt_keeps_what_was_measured() -> None:
    found, saved = empty_report(), list[Report]()
    with pytest.raises(KeyboardInterrupt):
        runner.run([Failing(KeyboardInterrupt())], Context([OURS], True, lambda _: None), found, saved.append)
    assert saved == [found]
    assert found.is_interrupted
    assert not found.studies[0].is_complete
    assert found.studies[0].tables


def test_studies_are_numbered_in_order() -> None:
    assert [study.number for study in runner.catalogue()] == list(range(1, 13))


def test_a_file_that_is_no_report_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    done = CliRunner().invoke(report_command, ["--from-json", str(tmp_path / "x.json"), "--output", str(tmp_path)])
    assert done.exit_code == 1
    assert "not a benchmark report" in done.output
    assert len(done.output.strip().splitlines()) == 1


COSTS = plan_model.Costs(20.0, 0.001, 15.0, 0.0005, 0.0003)


def points(costs: plan_model.Costs, sizes: tuple[int, ...] = (200, 64_000)) -> list[plan_model.Point]:
    return [
        plan_model.Point(size, replicas, costs.request_cpu_us(size, replicas)) for replicas in (1, 2) for size in sizes
    ]


def test_the_model_is_solved_from_its_own_points() -> None:
    found = plan_model.solve(points(COSTS), COSTS.out_byte_us)
    assert found.request_cpu_us(16_000, 3) == pytest.approx(COSTS.request_cpu_us(16_000, 3))
    assert found.byte_us == pytest.approx(COSTS.byte_us)
    assert found.replica_request_us == pytest.approx(COSTS.replica_request_us)


def test_noise_makes_no_cost_negative() -> None:
    noisy = [plan_model.Point(200, 1, 30), plan_model.Point(64_000, 1, 20), plan_model.Point(200, 2, 29)]
    found = plan_model.solve([*noisy, plan_model.Point(64_000, 2, 10)], 0.0)
    assert min(found.request_us, found.byte_us, found.replica_request_us, found.replica_byte_us) >= 0


def test_the_model_needs_its_four_points() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        plan_model.solve(points(COSTS)[:3], 0.0)
    with pytest.raises(ValueError, match="two sizes"):
        plan_model.solve(points(COSTS, (1, 2, 3)), 0.0)


def test_a_plan_adds_up() -> None:
    load = plan_model.Load(mb_in=100, fan_out=2, replicas=3, batch_bytes=10_000, retention_hours=10)
    found = plan_model.plan(COSTS, load)
    # 10,000 requests a second of 20 + 10 + 2 x (15 + 5) us, and 200 MB a second out at 0.3 ns a byte.
    assert found.cores == pytest.approx(0.7 + 0.06)
    assert found.nodes == 3
    assert found.in_mb_per_node == 100.0
    assert found.disk_gb_per_node == pytest.approx(3600.0)
    assert found.out_mb_per_node == pytest.approx(400 / 3)
    ten_times = plan_model.plan(COSTS, plan_model.Load(1000, 2, 3, 10_000, 10))
    assert ten_times.nodes == 11


def test_costs_are_found_in_a_report() -> None:
    result = StudyResult(9, "planning", "?")
    assert planning.costs_of(result, OURS) is None
    result.tables.append(Table("Costs", ["broker"], [["kafka", 9, 9, 9, 9, 9], [OURS, 20, 0.001, 15, 0.0005, 0.0003]]))
    assert planning.costs_of(result, OURS) == COSTS


def test_a_reader_notes_what_comes_again_and_what_is_passed_over() -> None:
    order = Order(2)
    for number in (0, 1, 2, 2, 0, 3, 8, 7):
        order.add(number)
    assert (order.records, order.doubled) == (6, 2)
    assert (order.missing, order.missing_count) == ([(4, 6), (5, 5)], 3)


def an_hour(**changes: Any) -> endurance.Run:
    """Of nine windows, all alike, and all records read."""
    windows = [endurance.Window(60.0 * n, 10, [1.0, 2.0, 3.0, 4.0], [40.0, 40.0, 40.0], 0) for n in range(1, 10)]
    run = endurance.Run(due=90, acknowledged=90, windows=windows, read={"records": 90, "doubled": 0, "missing": []})
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def test_an_hour_is_judged_by_its_thirds_and_by_what_was_read() -> None:
    assert holding(endurance.verdicts(OURS, an_hour())) == [True] * 6
    passed_over = {"records": 88, "doubled": 1, "missing": [(12, 24)]}
    assert holding(endurance.verdicts(OURS, an_hour(read=passed_over))) == [False, False, True, True, True, True]
    # What was refused to the producer may be missing; that it was refused is a verdict of its own.
    run = an_hour(acknowledged=88, failed={12, 24}, read={**passed_over, "doubled": 0})
    assert holding(endurance.verdicts(OURS, run)) == [True, True, False, True, True, True]
    run = an_hour(read={"records": 90, "doubled": 0, "missing": [], "missing_count": 1})
    assert holding(endurance.verdicts(OURS, run)) == [False, True, True, True, True, True]
    run = an_hour(acknowledged=91)
    assert holding(endurance.verdicts(OURS, run)) == [False, True, True, True, True, True]
    # An interrupt leaves records on their way.
    assert holding(endurance.verdicts(OURS, an_hour(acknowledged=91, due=0)))[0] is None
    run = an_hour(ends=["node 2 at 90 s with 1: a message"])
    assert holding(endurance.verdicts(OURS, run)) == [True, True, True, False, True, True]
    run = an_hour()
    for window in run.windows[-3:]:
        window.latencies[2], window.memory_mib = 6.1, [40.0, 40.0, 52.1]
    assert holding(endurance.verdicts(OURS, run)) == [True, True, True, True, False, False]
    # A node that is down at the end of a window does not make it small.
    run.windows[-1].memory_mib[0] = 0.0
    assert holding(endurance.verdicts(OURS, run)) == [True, True, True, True, False, False]


def test_percentiles_of_a_histogram_are_those_of_the_sorted_latencies() -> None:
    values_us = [
        0,
        1,
        2047,
        2048,
        2049,
        4095,
        4096,
        10**6,
        2**40,
        *(number * 7919 % 100_003 for number in range(5_000)),
    ]
    histogram = Histogram()
    for value_us in values_us:
        histogram.add(value_us * 1000 + 999)
    ordered = [value_us / 1000 for value_us in sorted(values_us)]
    for percent in (0, 0.05, 1, 50, 99, 99.9, 100):
        exact = percentile(ordered, percent)
        assert histogram.percentile_ms(percent) == pytest.approx(exact, rel=0.001)
    assert (histogram.count, histogram.max_us) == (len(values_us), 2**40)
    assert Histogram().percentile_ms(50) is None


def test_a_node_that_ends_by_itself_is_noted_once_and_a_killed_one_is_not() -> None:
    class Node:
        alive, exit_code = True, 0

        def kill(self) -> None:
            self.alive, self.exit_code = False, -9

        def launch(self) -> None:
            self.alive = True

        def output_tail(self, size_bytes: int) -> str:
            return "tidelog: cannot\n go on"

    nodes = [Node(), Node(), Node()]
    run = endurance.Run()
    kills = endurance._Kills(cast(Any, SimpleNamespace(nodes=dict(enumerate(nodes)))), endurance.QUICK, run)
    kills.at(3.1)
    assert (run.kills_s, nodes[0].alive) == ([3.1], False)
    kills.at(3.2)
    assert run.ends == []
    nodes[2].alive, nodes[2].exit_code = False, 1
    for now_s in (3.3, 3.4, 4.2):
        kills.at(now_s)
    assert run.ends == ["node 3 at 3 s with 1: tidelog: cannot go on"]
    assert nodes[0].alive


def test_the_study_of_an_hour_runs_only_when_asked_for() -> None:
    assert endurance.Endurance.number not in [study.number for study in runner.select(())]
    assert [study.number for study in runner.select((10, 2))] == [2, 10]


@pytest.mark.slow
def test_an_interrupted_report_leaves_no_process_and_keeps_what_it_has(tmp_path: Path) -> None:
    pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed (pip install 'tidelog[dev]')")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    # Where the tests run in the background, they and what they start ignore SIGINT.
    program = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('tidelog', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, "bench", "report", "--only", OURS, "--scenario", "10"]
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path / "report")], env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: len(processes_naming(scratch)) > 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    assert processes_naming(scratch) == []
    report = Report.from_json((tmp_path / "report" / "report.json").read_text())
    assert report.is_interrupted
    assert [study.is_complete for study in report.studies] == [False]


def processes_naming(path: Path) -> list[int]:
    """The processes whose command line has this path in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(path).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


def quick_study(number: int, directory: Path) -> StudyResult:
    arguments = ["--quick", "--only", OURS, "--scenario", str(number), "--output", str(directory)]
    done = CliRunner().invoke(report_command, arguments)
    assert done.exit_code == 0, done.output
    (study,) = Report.from_json((directory / "report.json").read_text()).studies
    assert study.is_complete
    return study


@pytest.mark.slow
def test_a_quick_hour_with_kills_loses_nothing(tmp_path: Path) -> None:
    pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed (pip install 'tidelog[dev]')")
    study = quick_study(10, tmp_path)
    assert holding(study.verdicts[:3]) == [True] * 3, study.verdicts
    assert study.tables[0].rows[0][-1] == 2, "both kills"


@pytest.mark.slow
def test_a_quick_report_of_one_scenario_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed (pip install 'tidelog[dev]')")
    study = quick_study(5, tmp_path)
    laws = {verdict.statement: (verdict.holds, verdict.evidence) for verdict in study.verdicts}
    kept = [statement for statement in laws if "acknowledged record" in statement or "doubled" in statement]
    assert len(kept) == 4
    assert [laws[statement] for statement in kept if not laws[statement][0]] == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "rows"), [(11, len(loads.LOADS)), (12, 4)])
def test_each_load_and_client_is_measured(
    number: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed (pip install 'tidelog[dev]')")
    monkeypatch.setattr(three_clients, "bring_kafka", lambda: "no Java in this test")
    study = quick_study(number, tmp_path)
    (table,) = study.tables
    assert len(table.rows) == rows
    assert all(all(row) for row in table.rows), table.rows
