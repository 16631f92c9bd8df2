"""The comparison with Spark's connector, without Spark: names, targets, what counts, what is shown."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from tests.patience import PATIENCE_S, line_of
from tidelog.bench.command import command as bench
from tidelog.bench.spark import compare
from tidelog.bench.spark.rows import CPU, FORMATS, P50, P99, RATE, catalogue, select
from tidelog.bench.spark.worker import ProcessTimes, cpu_between, tree_times


def test_every_kind_size_and_codec_has_a_row_of_its_own():
    names = [row.name for row in catalogue()]
    assert len(names) == len(set(names)) == 3 * 2 * 3 + 1
    assert [row.name for row in select(["spark-sink-1kb", "latency"])] == [
        *("spark-sink-1kb-none", "spark-sink-1kb-lz4", "spark-sink-1kb-zstd"),
        "spark-latency",
    ]


@pytest.mark.parametrize(
    ("name", "rate", "cpu"),
    [
        ("spark-batch-100b-none", 3.0, 0.5),
        ("spark-stream-1kb-none", 2.5, 0.7),
        ("spark-batch-1kb-zstd", 2.0, 0.9),
        ("spark-sink-100b-lz4", 2.0, None),
        ("spark-latency", None, None),
    ],
)
def test_the_targets(name: str, rate: float | None, cpu: float | None):
    (row,) = select([name])
    assert (row.rate_ratio_min, row.cpu_ratio_max) == (rate, cpu)


def measured(name: str, **answers: list[dict]) -> compare.RowMeasurements:
    (row,) = select([name])
    result = compare.RowMeasurements(row)
    for format_name, rounds in answers.items():
        for answer in rounds:
            for metric, value in compare._figures(answer).items():
                result.figures.setdefault((format_name, metric), []).append(value)
    return result


def test_the_table_has_medians_ratios_and_targets():
    ours = [{"rows": 1000, "elapsed_s": 1 / rate, "cpu_s": 0.001} for rate in (3, 2, 4)]
    one = measured("spark-batch-100b-none", tidelog=ours, kafka=[{"rows": 1000, "elapsed_s": 1.0, "cpu_s": 0.0016}])
    assert compare.cells([one]) == [
        ("spark-batch-100b-none", RATE, "3,000", "1,000", "3.00", "at least 3", "yes"),
        ("spark-batch-100b-none", CPU, "1", "1.6", "0.62", "at most 0.5", "no"),
    ]


def test_latency_is_shown_by_percentiles_and_a_format_that_failed_by_a_dash():
    one = measured("spark-latency", tidelog=[{"latencies_ms": [float(each) for each in range(100)]}])
    assert compare.cells([one]) == [
        ("spark-latency", P50, "50", "-", "", "", ""),
        ("spark-latency", P99, "99", "-", "", "", ""),
    ]


@pytest.mark.slow
def test_cpu_of_a_tree_counts_children_that_run_and_that_have_ended():
    spin = "import time; end = time.process_time() + 0.4\nwhile time.process_time() < end: pass\n"
    program = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}], timeout={PATIENCE_S}); "
        f"{spin}print(1, flush=True); input()"
    )
    before = tree_times(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line_of(process)
        running = tree_times(os.getpid())
        process.communicate("\n")
    assert cpu_between(before, running) >= 0.75
    assert cpu_between(before, tree_times(os.getpid())) >= 0.75
    # Most of it was used before the second look, also where the process has ended since.
    assert cpu_between(running, tree_times(os.getpid())) < 0.4


def test_cpu_of_a_process_that_is_gone_unnoticed_is_not_taken_from_the_others():
    """Spark's daemon ignores the end of its workers, and ends those without work."""
    before = {1: ProcessTimes(0, 10.0, 1.0), 2: ProcessTimes(1, 5.0, 0.0), 3: ProcessTimes(2, 7.0, 2.0)}
    unnoticed = {1: ProcessTimes(0, 11.0, 1.0), 2: ProcessTimes(1, 5.5, 0.0), 4: ProcessTimes(2, 0.25, 0.0)}
    assert cpu_between(before, unnoticed) == 1.75
    waited_for = {1: ProcessTimes(0, 11.0, 1.0), 2: ProcessTimes(1, 5.5, 9.125)}
    assert cpu_between(before, waited_for) == 1.625
    all_below_the_first = {1: ProcessTimes(0, 11.0, 1.0 + 5.0 + 9.0 + 0.5)}
    assert cpu_between(before, all_below_the_first) == 1.5


def test_a_row_that_is_unknown_is_named_with_those_there_are():
    for arguments in (["spark", "--rows", "spark-nothing"], ["compare", "--rows", "spark-nothing"]):
        ended = CliRunner().invoke(bench, arguments)
        assert ended.exit_code == 2
        assert "spark-latency" in ended.output


def test_the_rows_are_listed():
    listed = CliRunner().invoke(bench, ["rows"]).output
    assert all(row.name in listed for row in catalogue())
    assert FORMATS == ("tidelog", "kafka")
