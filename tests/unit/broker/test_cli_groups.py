"""`tidelog groups` against a real node: what it prints, what it changes, and its exit codes."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tidelog import EmbeddedBroker
from tidelog.cli.main import main
from tidelog.client import Admin as AsyncAdmin
from tidelog.client import NewTopic, TopicPartition, sync
from tidelog.client.groups.model import GroupListing

Cli = Callable[..., tuple[int, str, str]]
_numbers = itertools.count(1)
_written_at_s: dict[str, float] = {}


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with EmbeddedBroker() as broker:
        yield broker.bootstrap_servers


@pytest.fixture(scope="module")
def admin(bootstrap: str) -> Iterator[sync.Admin]:
    with sync.Admin(bootstrap_servers=bootstrap) as client:
        yield client


@pytest.fixture
def cli(bootstrap: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("TIDELOG_BOOTSTRAP_SERVER", bootstrap)

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main(["groups", *words])
        return status, *capfd.readouterr()

    return run


@pytest.fixture
def topic(bootstrap: str, admin: sync.Admin) -> str:
    """Two partitions; the first has five records, written 50 to 10 seconds ago."""
    name = f"topic-{next(_numbers)}"
    admin.create_topics([NewTopic(name, 2)])
    now_ms = time.time_ns() // 1_000_000
    _written_at_s[name] = now_ms / 1000
    with sync.Producer(bootstrap_servers=bootstrap) as producer:
        for age_s in (50, 40, 30, 20, 10):
            producer.send_and_wait(name, b"x", partition=0, timestamp_ms=now_ms - age_s * 1000)
    return name


@pytest.fixture
def group(admin: sync.Admin, topic: str) -> str:
    """Without members, having read two of the records."""
    name = f"group-{next(_numbers)}"
    admin.alter_group_offsets(name, {TopicPartition(topic, 0): 2})
    return name


@pytest.fixture
def member(bootstrap: str, topic: str, group: str) -> Iterator[sync.Consumer]:
    options: dict[str, Any] = {"group_id": group, "client_id": "reader", "group_instance_id": "one"}
    with sync.Consumer(topic, bootstrap_servers=bootstrap, enable_auto_commit=False, **options) as consumer:
        deadline = time.monotonic() + PATIENCE_S
        while not consumer.assignment() and time.monotonic() < deadline:
            consumer.poll(50)
        yield consumer


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def test_groups_are_listed(cli: Cli, group: str):
    status, out, _ = cli("list", "--state", "empty", "--type", "classic")
    assert (status, out.splitlines()[0].split()) == (0, ["GROUP", "STATE", "TYPE", "PROTOCOL-TYPE"])
    assert [group, "Empty", "classic", "-"] in rows(out)
    assert group not in cli("list", "--state", "Stable")[1]
    listed = json.loads(cli("list", "--json")[1])
    assert {"group": group, "state": "Empty", "type": "classic", "protocol_type": ""} in listed


def test_the_lag_is_told_in_records_and_in_seconds(cli: Cli, topic: str, group: str):
    status, out, err = cli("describe", group)
    assert (status, err) == (0, f"Group {group} has no members.\n")
    header, row = rows(out)
    shown = dict(zip(header, row))
    assert (shown["TOPIC"], shown["PARTITION"], shown["CURRENT-OFFSET"]) == (topic, "0", "2")
    assert (shown["LOG-END-OFFSET"], shown["LAG"], shown["CONSUMER-ID"]) == ("5", "3", "-")
    rounding_s = 0.1
    assert 30 <= float(shown["LAG-SECONDS"]) <= 30 + time.time() - _written_at_s[topic] + rounding_s
    (told,) = json.loads(cli("describe", group, "--json")[1])
    assert (told["state"], told["members"], told["offsets"][0]["lag"]) == ("Empty", [], 3)
    assert told["coordinator"]["id"] == 1
    everything = json.loads(cli("describe", "--json")[1])
    assert group in [each["group"] for each in everything]


def test_many_groups_are_described_a_few_at_a_time(
    cli: Cli, admin: sync.Admin, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
):
    """Fifty at once, of three hundred partitions each, all came to their ends behind their limit of 5 s."""
    for number in range(20):
        admin.alter_group_offsets(f"{group}-{number}", {TopicPartition(topic, 0): 0})
    under_way, most = 0, 0

    async def group_lag(self: AsyncAdmin, group_id: str, *args: Any, **options: Any) -> dict[TopicPartition, Any]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.05)
        under_way -= 1
        return {}

    monkeypatch.setattr(AsyncAdmin, "group_lag", group_lag)
    assert cli("describe", *(f"{group}-{number}" for number in range(20)))[0] == 0
    assert 1 < most <= 4


def test_members_and_state_are_told(cli: Cli, topic: str, group: str, member: sync.Consumer):
    _, out, err = cli("describe", group, "--members", "--verbose")
    header, row = rows(out)
    assert err == ""
    assert header == ["GROUP", "CONSUMER-ID", "GROUP-INSTANCE-ID", "HOST", "CLIENT-ID", "#PARTITIONS", "ASSIGNMENT"]
    assert (row[0], *row[2:]) == (group, "one", "/127.0.0.1", "reader", "2", f"{topic}(0,1)")
    assert "ASSIGNMENT" not in cli("describe", group, "--members")[1]
    _, out, _ = cli("describe", group, "--state")
    assert rows(out)[1][-3:] == ["range", "Stable", "1"]
    _, out, _ = cli("describe", group)
    assert [row[1:6] for row in rows(out)[1:]] == [[topic, "0", "2", "5", "3"], [topic, "1", "-", "0", "-"]]
    assert [row[-1] for row in rows(out)[1:]] == ["reader", "reader"]
    (told,) = json.loads(cli("describe", group, "--members", "--json")[1])
    assert told["members"][0]["assignment"] == {topic: [0, 1]}
    assert "offsets" not in told


def test_a_group_that_is_read_is_left_alone(cli: Cli, topic: str, group: str, member: sync.Consumer):
    status, out, err = cli("reset-offsets", group, "--all-topics", "--to-earliest", "--execute")
    assert (status, out) == (1, "")
    assert err == f"tidelog: the offsets of group {group} can be reset while it has no members; it is Stable now\n"
    assert cli("delete", group)[0] == 1
    status, out, err = cli("delete-offsets", group, "--topic", f"{topic}:0")
    assert (status, rows(out)[1], err) == (1, [topic, "0", "GROUP_SUBSCRIBED_TO_TOPIC"], "tidelog: 1 partition kept\n")


def test_members_are_removed(cli: Cli, group: str, member: sync.Consumer):
    assert cli("remove-members", group)[0] == 2
    status, out, err = cli("remove-members", group, "--instance", "one", "--instance", "two")
    assert (status, out, err) == (1, "Removed one.\n", "tidelog: UNKNOWN_MEMBER_ID: member two\n")
    assert "Empty" in cli("describe", group, "--state")[1]
    assert cli("remove-members", group, "--all")[:2] == (0, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--to-earliest"], 0),
        (["--to-latest"], 5),
        (["--to-current"], 2),
        (["--to-offset", "3"], 3),
        (["--to-offset", "99"], 5),
        (["--shift-by", "2"], 4),
        (["--shift-by", "-9"], 0),
        (["--by-duration", "PT35S"], 2),
        (["--by-duration", "PT1S"], 5),
        (["--to-datetime", "2001-01-01T00:00:00.000"], 0),
        (["--to-datetime", "1969-12-31T23:59:59.999"], 0),
        (["--by-duration", "P99999D"], 0),
        (["--to-datetime", "2126-01-01T00:00:00.000"], 5),
    ],
)
def test_offsets_are_reset_once_that_is_meant(
    cli: Cli, admin: sync.Admin, topic: str, group: str, words: list[str], expected: int
):
    partition = TopicPartition(topic, 0)
    status, out, err = cli("reset-offsets", group, "--topic", f"{topic}:0", *words)
    assert (status, rows(out)) == (
        0,
        [["GROUP", "TOPIC", "PARTITION", "OLD-OFFSET", "NEW-OFFSET"], [group, topic, "0", "2", str(expected)]],
    )
    assert err.endswith("Nothing was changed; --execute does it.\n")
    assert admin.list_group_offsets(group)[partition].offset == 2
    assert cli("reset-offsets", group, "--all-topics", *words, "--execute")[:2] == (0, out)
    assert admin.list_group_offsets(group)[partition].offset == expected


def test_a_reset_is_exported_and_read_again(cli: Cli, admin: sync.Admin, topic: str, group: str, tmp_path: Path):
    file = tmp_path / "plan.csv"
    file.write_text(cli("reset-offsets", group, "--topic", topic, "--to-latest", "--export")[1])
    assert file.read_text() == f"{topic},0,5\n{topic},1,0\n"
    fresh = f"{group}-fresh"
    status, out, _ = cli("reset-offsets", fresh, "--from-file", str(file), "--execute", "--json")
    assert status == 0
    assert [(each["old_offset"], each["new_offset"]) for each in json.loads(out)] == [(None, 5), (None, 0)]
    assert admin.list_group_offsets(fresh)[TopicPartition(topic, 0)].offset == 5
    both = cli("reset-offsets", group, fresh, "--topic", f"{topic}:0", "--to-earliest", "--export")[1]
    assert both == f"{group},{topic},0,0\n{fresh},{topic},0,0\n"
    file.write_text(f"{group},{topic},0,1\n")
    status, out, err = cli("reset-offsets", group, fresh, "--from-file", str(file), "--execute")
    assert (status, err) == (1, f"tidelog: the file has nothing for group {fresh}\n")
    assert admin.list_group_offsets(group)[TopicPartition(topic, 0)].offset == 1
    file.write_bytes(b"\xff\xfe")
    status, out, err = cli("reset-offsets", group, "--from-file", str(file), "--execute")
    assert (status, out, err) == (1, "", f"tidelog: cannot read {file}: it is not UTF-8 text\n")


def test_a_file_with_a_byte_order_mark_names_its_topics(
    cli: Cli, admin: sync.Admin, topic: str, group: str, tmp_path: Path
):
    file = tmp_path / "plan.csv"
    file.write_text(f"{topic},0,3\n", encoding="utf-8-sig")
    assert cli("reset-offsets", group, "--from-file", str(file), "--execute")[0] == 0
    assert admin.list_group_offsets(group)[TopicPartition(topic, 0)].offset == 3


def test_all_groups_are_those_of_consumers(cli: Cli, topic: str, group: str, monkeypatch: pytest.MonkeyPatch):
    """A share group refused the reset of all, and the workers of Kafka Connect got offsets."""
    listed = AsyncAdmin.list_groups

    async def with_others(admin: AsyncAdmin) -> list[GroupListing]:
        others = [GroupListing("shared", "share", "Empty", "Share"), GroupListing("workers", "connect", "", "Classic")]
        return [*others, *await listed(admin)]

    monkeypatch.setattr(AsyncAdmin, "list_groups", with_others)
    out = cli("reset-offsets", "--all-groups", "--topic", topic, "--to-earliest", "--json")[1]
    groups = {each["group"] for each in json.loads(out)}
    assert group in groups
    assert not groups & {"shared", "workers"}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["g"],
        ["g", "--all-groups", "--all-topics", "--to-latest"],
        ["g", "--all-topics"],
        ["g", "--to-latest"],
        ["g", "--all-topics", "--topic", "t", "--to-latest"],
        ["g", "--all-topics", "--to-latest", "--shift-by", "1"],
        ["g", "--all-topics", "--to-datetime", "noon"],
        ["g", "--all-topics", "--by-duration", "1h"],
        ["g", "--all-topics", "--to-offset", "-1"],
        ["g", "--all-topics", "--to-latest", "--execute", "--dry-run"],
    ],
)
def test_wrong_usage(cli: Cli, words: list[str]):
    status, out, err = cli("reset-offsets", *words)
    assert (status, out) == (2, "")
    # A wrong value is one line, without the usage before it.
    assert "\nError: " in err or (err.startswith("tidelog: Invalid value for ") and err.count("\n") == 1)


def test_groups_and_offsets_are_deleted(cli: Cli, topic: str, group: str):
    status, out, _ = cli("delete-offsets", group, "--topic", f"{topic}:0", "--topic", topic, "--json")
    assert (status, json.loads(out)) == (
        0,
        [{"topic": topic, "partition": number, "error": None} for number in (0, 1)],
    )
    assert cli("delete-offsets", group, "--topic", f"{topic}:7")[0] == 2
    assert cli("delete", group)[:2] == (0, f"Deleted group {group}.\n")
    status, out, err = cli("delete", group, "--json")
    assert (status, json.loads(out)) == (1, [{"group": group, "error": "GROUP_ID_NOT_FOUND"}])
    assert err == f"tidelog: GROUP_ID_NOT_FOUND: group '{group}'\n"
    assert cli("describe", group)[0] == 1
