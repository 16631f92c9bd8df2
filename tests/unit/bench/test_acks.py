"""The study of acks: its settings, synchronous sending that counts only what is there, and laws that can be broken."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from tests.patience import join
from tidelog.bench.acks import chart, report, sending
from tidelog.bench.acks.contest import Measurements
from tidelog.bench.acks.settings import ALL, Setting, all_settings, laws, studies
from tidelog.bench.raw import BenchError
from tidelog.bench.scenarios.base import Topic

SETTINGS = all_settings(studies())
Offset = Callable[[int], int]


def rates(spoiled: Mapping[Setting, float] | None = None) -> dict[Setting, float]:
    """Rates that obey every law, but for those given."""
    lawful = {}
    for one in SETTINGS:
        slower = 1.0 if one.acks != ALL else 1.0 / one.replicas
        lawful[one] = {0: 90_000.0, 1: 9_000.0, ALL: 8_000.0}[one.acks] * slower + one.min_insync
    return lawful | dict(spoiled or {})


def test_the_studies_are_those_of_the_reference():
    assert [len(study.settings) for study in studies()] == [16, 7, 12]
    for study in studies():
        assert len(set(study.settings)) == len(study.settings)
        assert all(one.min_insync <= one.replicas for one in study.settings)
    known = studies()[0].reference
    assert set(known) <= set(SETTINGS)
    assert (known[Setting(12, ALL, 4)], known[Setting(1, ALL, 4, 2)], known[Setting(1, 0, 1)]) == (
        16_194,
        8_217,
        76_696,
    )


def test_lawful_rates_obey_every_law():
    found = laws(rates())
    assert len(found) == 2 * (3 + 1 + 3)
    assert [law for law in found if not law.holds] == []


@pytest.mark.parametrize(
    ("spoiled", "broken"),
    [
        ({Setting(12, 1, 2): 95_000.0}, "12 partitions, 2 replicas: acks 0 > 1 > all"),
        ({Setting(1, 1, 4): 100.0}, "1 partition, 4 replicas: acks 0 > 1 > all"),
        ({Setting(1, ALL, 4, 4): 100.0}, "1 partition, 4 replicas: min.insync.replicas does not matter"),
        ({Setting(12, ALL, 3, 2): 6_000.0}, "12 partitions, 3 replicas: min.insync.replicas does not matter"),
    ],
)
def test_a_rate_that_breaks_a_law_is_told(spoiled: dict[Setting, float], broken: str):
    assert [law.statement for law in laws(rates(spoiled)) if not law.holds] == [broken]


def test_replicas_that_cost_nothing_break_the_law_and_noise_does_not():
    slower = "12 partitions: more replicas, slower at acks=all"
    free = {one: 8_000.0 for one in SETTINGS if one.partitions == 12 and one.acks == ALL}
    assert slower in [law.statement for law in laws(rates(free)) if not law.holds]
    noisy = {Setting(12, ALL, 3): 2_000.0, Setting(12, ALL, 4): 2_100.0}
    assert slower in [law.statement for law in laws(rates(noisy)) if law.holds]


def test_the_reference_obeys_the_laws():
    found = laws(dict(studies()[0].reference))
    assert found
    assert [law for law in found if not law.holds] == []


def test_what_was_not_measured_is_not_judged():
    assert laws({Setting(1, ALL, 1): 10.0, Setting(1, 0, 2): 10.0}) == []


@contextmanager
def broker(offset_of: Offset, delay_s: float = 0.0) -> Iterator[tuple[int, list[int]]]:
    """Answers produce requests with the offsets that `offset_of` gives for each number; keeps the acks it was asked."""
    asked: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            number = 0
            while size := stream.read(4):
                body = stream.read(struct.unpack(">i", size)[0])
                acks = struct.unpack_from(">h", body, 8 + 2 + len("tidelog-bench") + 1 + 1)[0]
                asked.append(acks)
                time.sleep(delay_s)
                if acks:
                    partition = struct.pack(">ihqqq", 0, 0, offset_of(number), -1, 0) + b"\x01\x00\x00"
                    answer = body[4:8] + b"\x00\x02\x02t\x02" + partition + b"\x00" + bytes(4) + b"\x00"
                    connection.sendall(struct.pack(">i", len(answer)) + answer)
                number += 1

    def accept() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield listener.getsockname()[1], asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in threads:
            join(thread)


@pytest.mark.parametrize("acks", [1, ALL])
def test_a_producer_waits_for_each_answer(acks: int):
    with broker(lambda number: number, delay_s=0.002) as (port, asked):
        sent = sending.send(Topic("t", {0: port, 1: port, 2: port}), acks, 0.1)
    assert asked[: 3 * sending.FIRST_RECORDS] == [ALL] * 3 * sending.FIRST_RECORDS
    assert asked[3 * sending.FIRST_RECORDS :] == [acks] * sent.records
    assert len(sent.latencies_ns) == sent.records
    # Three producers, 2 ms each: far fewer than one after the other could not explain.
    assert 3 <= sent.records <= 3 * 0.1 / 0.002 + 3
    assert min(sent.latencies_ns) >= 2_000_000


def test_without_answers_the_records_are_counted_by_a_last_one_with_an_answer():
    with broker(lambda number: number) as (port, asked):
        sent = sending.send(Topic("t", {0: port, 1: port}), 0, 0.05)
    assert asked.count(1) == 2
    assert asked.count(0) == sent.records - 2
    assert sent.percentile_us(50) is None


def test_a_record_that_is_missing_at_the_end_is_an_error():
    def one_lost(number: int) -> int:
        return number if number < sending.FIRST_RECORDS else number - 1

    with broker(one_lost) as (port, _), pytest.raises(BenchError, match="has offset"):
        sending.send(Topic("t", {0: port}), 0, 0.02)


def measured() -> Measurements:
    found = rates()
    return Measurements(
        {
            name: {
                one: [sending.Sent(int(rate * share), 1.0, array("q", [] if one.acks == 0 else [250_000]))]
                for one, rate in found.items()
            }
            for name, share in (("tidelog", 1.0), ("kafka", 0.25))
        }
    )


def test_the_tables_and_the_json_say_rates_ratios_and_laws():
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for study in studies():
        console.print(report.table(study, measured()))
    console.print(report.law_table(measured()))
    console.file.close()
    text = console.export_text()
    for cell in ("8,001", "2,000", "4.0", "250", "28,511", "held"):
        assert cell in text
    found = json.loads(report.as_json(studies(), SETTINGS, measured()))
    assert len(found["settings"]) == len(SETTINGS)
    assert found["settings"][0]["tidelog"]["records_per_s"] == 8001.0
    assert all(law["held"] for law in found["laws"])


@pytest.mark.slow
def test_the_chart_is_drawn_and_says_the_figures(tmp_path: Path):
    pytest.importorskip("matplotlib")
    chart.draw(measured(), tmp_path / "deep" / "acks.png")
    assert (tmp_path / "deep" / "acks.png").read_bytes().startswith(b"\x89PNG")
    both = {name: measured().rates(name) for name in ("tidelog", "kafka")}
    assert chart.headline(both) == "Three replicas, acks=all, one producer: 4.0 times Kafka's rate"
    assert chart.headline({"kafka": both["tidelog"], "tidelog": both["kafka"]}).endswith("25% of Kafka's rate")
    assert "2,667" in chart.headline({"tidelog": both["tidelog"]})


@pytest.mark.slow
def test_the_command_measures_four_nodes(tmp_path: Path):
    words = ["bench", "acks", "--study", "2", "--rounds", "1", "--seconds", "0.05", "--json", "--chart", "acks.png"]
    done = subprocess.run(
        [sys.executable, "-m", "tidelog", *words],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert [one["replicas"] for one in found["settings"]] == [2, 2, 3, 3, 4, 4, 4]
    assert all(one["tidelog"]["records_per_s"] > 0 for one in found["settings"])
    assert (tmp_path / "acks.png").exists()
