"""`tidelog top`: what two snapshots say together, one view for scripts, and the live view of a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.patience import PATIENCE_S, readable
from tidelog import EmbeddedBroker
from tidelog.cli.common import end_signals
from tidelog.cli.groups.command import _describe_all
from tidelog.cli.main import main
from tidelog.cli.top import command as top_command
from tidelog.cli.top.command import _screen
from tidelog.cli.top.rates import view
from tidelog.cli.top.snapshot import Snapshot, _add_groups
from tidelog.client import Admin, TopicPartition
from tidelog.client.groups.model import GROUP_TYPES, GroupDescription, GroupListing
from tidelog.client.model import ClusterDescription, Node, OffsetAndMetadata, PartitionDescription, TopicDescription
from tidelog.client.sync import Consumer, Producer

ROOT = Path(__file__).resolve().parents[3]
F0, F1 = TopicPartition("flights", 0), TopicPartition("flights", 1)
Cli = Callable[..., tuple[int, str, str]]


def snapshot(at_s: float, ends: tuple[int, int], committed: int, size_bytes: int) -> Snapshot:
    """Two brokers and one that is down; partition 1 has no leader."""
    nodes = (Node(1, "a", 9092), Node(2, "b", 9092), Node(3, "c", 9092, fenced=True))
    topics = {
        "flights": TopicDescription(
            "flights",
            bytes(16),
            False,
            (PartitionDescription(0, 1, 0, (1, 2), (1, 2)), PartitionDescription(1, None, 0, (2, 3), (2,))),
        ),
        "airports": TopicDescription("airports", bytes(16), False, (PartitionDescription(0, 2, 0, (2,), (2,)),)),
        "__consumer_offsets": TopicDescription("__consumer_offsets", bytes(16), True, ()),
    }
    return Snapshot(
        at_s,
        ClusterDescription("c", 1, nodes),
        topics,
        2,
        {F0: ends[0], TopicPartition("airports", 0): ends[1]},
        {1: {F0: size_bytes}},
        {"g": GroupDescription("g", "Stable", "consumer", "range", ())},
        {"g": {F0: committed, F1: 7}},
    )


def test_rates_are_what_changed_in_the_time_between():
    shown = view(snapshot(10.0, (100, 5), 50, 1000), snapshot(14.0, (140, 5), 60, 3000))
    flights, airports = shown.topics
    assert (flights.topic, flights.records_per_s, flights.bytes_per_s, flights.size_bytes) == (
        "flights",
        10.0,
        500.0,
        3000,
    )
    assert (flights.partitions, flights.under_replicated, flights.without_leader) == (2, 1, 1)
    assert (airports.topic, airports.records_per_s, airports.bytes_per_s) == ("airports", 0.0, 0.0)
    (group,) = shown.groups
    assert (group.lag, group.records_per_s, group.topics) == (80, 2.5, 1)
    assert [(each.broker, each.state, each.records_per_s, each.bytes_per_s) for each in shown.brokers] == [
        (1, "running", 10.0, 500.0),
        (2, "unreachable", 0.0, None),
        (3, "fenced", 0.0, None),
    ]


def test_what_was_deleted_or_reset_has_not_grown():
    shown = view(snapshot(10.0, (100, 5), 50, 1000), snapshot(11.0, (20, 5), 10, 500))
    assert (shown.topics[0].records_per_s, shown.topics[0].bytes_per_s, shown.groups[0].records_per_s) == (
        0.0,
        0.0,
        0.0,
    )


def test_the_first_view_has_no_rates_and_what_is_new_has_grown_by_nothing():
    now = snapshot(10.0, (100, 5), 50, 1000)
    assert {each.records_per_s for each in view(None, now).topics} == {None}
    before = snapshot(9.0, (100, 5), 50, 1000)
    before.end_offsets.clear()
    assert {each.records_per_s for each in view(before, now).topics} == {0.0}


def test_rows_are_chosen_and_sorted():
    before, now = snapshot(10.0, (100, 5), 50, 1000), snapshot(11.0, (101, 15), 50, 1000)
    assert [each.topic for each in view(before, now).topics] == ["airports", "flights"]
    assert [each.topic for each in view(before, now, sort="size").topics] == ["flights", "airports"]
    assert [each.topic for each in view(before, now, sort="name", internal=True).topics] == [
        "__consumer_offsets",
        "airports",
        "flights",
    ]
    assert [each.topic for each in view(before, now, pattern="fl.*").topics] == ["flights"]
    assert view(before, now, pattern="fl.*").groups == []


def test_a_small_terminal_shows_the_first_rows_and_how_many_there_are():
    now = snapshot(10.0, (100, 5), 50, 1000)
    now.topics.update({f"t{each}": now.topics["airports"] for each in range(50)})
    console = Console(width=100, height=24, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(_screen(view(None, now, sort="name"), "NETWORK_EXCEPTION: gone", 24))
    text = console.export_text()
    assert "controller 2" in text
    assert "NETWORK_EXCEPTION: gone" in text
    assert "airports" in text
    assert "and 49 more" in text
    assert _screen(None, "gone", 24) is not None


# ------------------------------------------------------------------------------------------------------ on a real node


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as running:
        yield running


@pytest.fixture
def cli(broker: EmbeddedBroker, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("TIDELOG_BOOTSTRAP_SERVER", broker.bootstrap_servers)

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main(list(words))
        return (status, *capfd.readouterr())

    return run


@pytest.mark.slow
def test_one_view_of_a_node(cli: Cli, broker: EmbeddedBroker):
    with Producer(bootstrap_servers=broker.bootstrap_servers, acks="all") as producer:
        for _ in range(5):
            producer.send_and_wait("watched", b"v")
    with Consumer(
        "watched", bootstrap_servers=broker.bootstrap_servers, group_id="watchers", auto_offset_reset="earliest"
    ) as consumer:
        while not consumer.poll(timeout_ms=500, max_records=2):
            continue
        consumer.commit()
        status, out, _ = cli("top", "--once", "--delay", "0.2", "--json")
        shown = json.loads(out)
        assert status == 0
        assert shown["topics"][0] | {"size_bytes": 0} == {
            "topic": "watched",
            "partitions": 1,
            "under_replicated": 0,
            "without_leader": 0,
            "size_bytes": 0,
            "records_per_s": 0.0,
            "bytes_per_s": 0.0,
        }
        assert [(each["group"], each["lag"], each["members"]) for each in shown["groups"]] == [("watchers", 3, 1)]
        assert [each["state"] for each in shown["brokers"]] == ["running"]
    tables = cli("top", "--once", "-d", "0.1", "--include", "watch.*")[1].split("\n\n")
    assert [table.split()[0] for table in tables] == ["BROKER", "TOPIC", "GROUP"]
    assert "__consumer_offsets" not in "".join(tables)


def test_a_delay_that_is_no_number_is_wrong_usage(cli: Cli):
    status, out, err = cli("top", "--delay", "nan", "--once")
    assert (status, out) == (2, "")
    assert "'nan' is not a number" in err


def test_an_output_that_is_no_terminal_has_one_view(cli: Cli):
    status, out, _ = cli("top", "-d", "0.1")
    assert (status, out.split()[0]) == (0, "BROKER")
    assert cli("top", "--json")[0] == 2
    assert cli("top", "--include", "(")[0] == 2


@pytest.mark.slow
def test_a_terminal_that_cannot_draw_has_one_view(broker: EmbeddedBroker):
    """As the shell of an editor. It showed nothing until Ctrl-C."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tidelog", "top", "-d", "0.2", "-b", broker.bootstrap_servers],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    try:
        assert process.wait(PATIENCE_S) == 0
        assert os.read(ours, 65536).startswith(b"BROKER")
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        os.close(theirs)
        os.close(ours)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_the_live_view_ends_with_ctrl_c(broker: EmbeddedBroker, columns: int):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "tidelog", "top", "-d", "0.2", "-b", broker.bootstrap_servers],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": str(columns), "LINES": "40"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        deadline = time.monotonic() + PATIENCE_S
        while shown.count(b"BROKER") < 2 and time.monotonic() < deadline:
            if readable(ours, 0.2):
                shown += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        while process.poll() is None and time.monotonic() < deadline:
            if readable(ours, 0.2):
                try:
                    shown += os.read(ours, 65536)
                except OSError:  # the terminal's other end is closed
                    break
        assert process.wait(PATIENCE_S) == 0
        assert b"Traceback" not in shown
        assert shown.count(b"BROKER") >= 2
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        os.close(ours)


async def test_ctrl_c_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch):
    """It waited for the requests' time limits, and one before the first connection ended with an error."""

    class Hanging(Admin):
        async def start(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(top_command, "Admin", Hanging)
    try:
        async with asyncio.timeout(PATIENCE_S):
            asyncio.get_running_loop().call_later(0.1, signal.raise_signal, signal.SIGTERM)
            await top_command._live({}, 1.0, {})
    finally:
        for number in end_signals():
            asyncio.get_running_loop().remove_signal_handler(number)


class AdminOfGroups:
    """An admin client of a cluster with a group of each type."""

    async def list_groups(self) -> list[GroupListing]:
        return [GroupListing(kind, "consumer", "Stable", kind) for kind in (*GROUP_TYPES, "")]

    async def describe_groups(self, group_ids: list[str]) -> dict[str, GroupDescription]:
        return {group: GroupDescription(group, "Stable", "consumer", "range", ()) for group in group_ids}

    async def list_group_offsets(self, group_id: str) -> dict[TopicPartition, OffsetAndMetadata]:
        return {}


async def test_groups_of_no_consumers_keep_no_others_from_the_screen():
    """No call describes a share group or one of Kafka Streams: the first one of these failed all."""
    admin: Any = AdminOfGroups()
    looked = snapshot(0.0, (0, 0), 0, 0)
    await _add_groups(admin, looked)
    assert set(looked.groups) == set((await _describe_all(admin))[0]) == {"classic", "consumer", ""}
