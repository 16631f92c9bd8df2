"""The comparison of Python clients: what counts, what is shown, and a run with real clients."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tidelog.bench.clients import command
from tidelog.bench.clients.worker import CLIENTS, Meter
from tidelog.bench.command import command as bench
from tidelog.bench.raw import BenchError


def test_the_first_tenth_of_what_is_sent_does_not_count():
    meter = Meter(1000, 100)
    parts = []
    for count in meter.parts():
        parts.append(count)
        meter.latencies_us += [1.0] * count
    assert parts == [100, 900]
    found = json.loads(meter.as_json())
    assert (found["records"], len(found["latencies_us"])) == (900, 900)


@pytest.mark.parametrize(
    ("batches", "counted"), [([50, 60, 500, 500], 1000), ([1000], 1000), ([99, 900, 1], 1), ([10] * 100, 890)]
)
def test_reading_counts_from_the_first_batch_beyond_a_tenth(batches: list[int], counted: int):
    meter, left = Meter(1000, 100), list(batches)
    count = 0
    while meter.wants_more(count):
        count = left.pop(0)
    assert not left
    assert json.loads(meter.as_json())["records"] == counted


def test_the_table_has_medians_and_no_latency_where_none_was_taken():
    cost = command.ClientCost("produce", 1024, "aiokafka", [3.0, 1.0, 2.0], [100.0, 300.0, 200_000.0])
    one = command.ClientCost("one at a time", 100, "aiokafka", [1.0], [2.0], [400.0], [900.0])
    assert command.as_markdown([cost, one]).splitlines()[2:] == [
        "| produce | 1,024 B | aiokafka | 2 | 300 |  |  |",
        "| one at a time | 100 B | aiokafka | 1 | 2 | 400 | 900 |",
    ]


def test_clients_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "find_spec", lambda package: None)
    assert [name for name in CLIENTS["produce"] if command._is_installed(name)] == [
        "tidelog",
        "tidelog, send_many",
        "tidelog, blocking",
    ]


def test_a_client_that_fails_is_one_line():
    cost = command.ClientCost("consume", 10, "no client")
    with pytest.raises(BenchError, match=r"^KeyError: 'no client'$"):
        command._run(cost, "127.0.0.1:1", "t", 10)


@pytest.mark.slow
def test_every_client_does_the_work():
    ended = CliRunner().invoke(bench, ["clients", "--quick", "--size", "100", "--json"], catch_exceptions=False)
    assert ended.exit_code == 0
    found = json.loads(ended.stdout)
    assert [(each["kind"], each["client"]) for each in found] == [
        (kind, name) for kind in CLIENTS for name in CLIENTS[kind]
    ]
    for each in found:
        assert each["cpu_us"][0] > 0
        assert each["rate"][0] > 0
        assert bool(each["p50_us"]) == (each["kind"] == "one at a time")
