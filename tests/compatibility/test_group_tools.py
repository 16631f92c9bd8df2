"""Groups by Kafka's ConsumerGroupCommand and by `tidelog groups`: on either broker both tell and do the same."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.test_java_clients import run
from tidelog.client import TopicPartition, sync
from tidelog.testing.processes import ServerProcess

pytestmark = pytest.mark.usefixtures("need_java")

NewTopic = Callable[..., str]
ROOT = Path(__file__).parents[2]
JAVA = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
_numbers = itertools.count(1)


def ours(server: ServerProcess, *words: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "tidelog", "groups", *words, "-b", server.bootstrap_servers]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def theirs(server: ServerProcess, *words: str) -> str:
    return run(JAVA, "--bootstrap-server", server.bootstrap_servers, *words)


@pytest.fixture
def topic(server: ServerProcess, new_topic: NewTopic) -> str:
    """Ten records in the first of three partitions, a second apart; the second has none, the third two."""
    name = new_topic(3)
    start_ms = time.time_ns() // 1_000_000 - 60_000
    with sync.Producer(bootstrap_servers=server.bootstrap_servers) as producer:
        for number in range(10):
            producer.send_and_wait(name, b"x", partition=0, timestamp_ms=start_ms + number * 1000)
        for number in range(2):
            producer.send_and_wait(name, b"x", partition=2, timestamp_ms=start_ms + number * 1000)
    return name


@pytest.fixture
def admin(server: ServerProcess) -> Iterator[sync.Admin]:
    with sync.Admin(bootstrap_servers=server.bootstrap_servers) as client:
        yield client


@pytest.fixture
def group(admin: sync.Admin, topic: str) -> str:
    name = f"tools-{time.time_ns()}-{next(_numbers)}"
    admin.alter_group_offsets(name, {TopicPartition(topic, 0): 4, TopicPartition(topic, 2): 2})
    return name


def rows(text: str, starting: str) -> list[list[str]]:
    return sorted(line.split() for line in text.splitlines() if line.startswith(starting))


SELECTORS = {
    "current": ["--to-current"],
    "offset": ["--to-offset", "3"],
    "shift": ["--shift-by", "1"],
    "shift far back": ["--shift-by", "-100"],
    "duration": ["--by-duration", "PT55.5S"],
    "in the future": ["--to-datetime", "2126-01-01T00:00:00.000+02:00"],
}


def test_both_tools_reset_to_the_same_offsets(server: ServerProcess, topic: str, group: str, tmp_path: Path) -> None:
    everything, some = ["--all-topics"], ["--topic", f"{topic}:0,1", "--topic", f"{topic}:2"]
    for name, selector in SELECTORS.items():
        scope = everything if "shift" in name else some
        planned = theirs(server, "--reset-offsets", "--group", group, *scope, *selector, "--dry-run", "--export")
        lines = sorted(
            line.replace('"', "") for line in planned.splitlines() if line.replace('"', "").startswith(topic)
        )
        assert len(lines) == (2 if scope is everything else 3)
        assert sorted(ours(server, "reset-offsets", group, *scope, *selector, "--export").splitlines()) == lines, name
    file = tmp_path / "theirs.csv"
    file.write_text("\n" + "\n".join(lines) + "\n\n")  # as their tool prints it, less its warnings
    ours(server, "reset-offsets", group, "--from-file", str(file), "--execute")
    file.write_text(ours(server, "reset-offsets", group, "--all-topics", "--to-offset", "1", "--export"))
    theirs(server, "--reset-offsets", "--group", group, "--from-file", str(file), "--execute")
    offsets = [row[1:4] for row in rows(ours(server, "describe", group), group)]
    assert offsets == [[topic, "0", "1"], [topic, "1", "0"], [topic, "2", "1"]]


def test_both_tools_describe_the_same(server: ServerProcess, topic: str, group: str) -> None:
    def without_seconds(row: list[str]) -> list[str]:
        return row[:6] + row[7:]

    options: dict[str, Any] = {"group_id": group, "client_id": "reader", "enable_auto_commit": False}
    with sync.Consumer(topic, bootstrap_servers=server.bootstrap_servers, **options) as consumer:
        deadline = time.monotonic() + 90
        while not consumer.assignment() and time.monotonic() < deadline:
            consumer.poll(100)
        described = rows(theirs(server, "--describe", "--group", group), group)
        assert [without_seconds(row) for row in rows(ours(server, "describe", group), group)] == described
        assert len(described) == 3
        members = rows(theirs(server, "--describe", "--group", group, "--members"), group)
        # Without static members their table has no column for instance ids.
        assert [row[:2] + row[3:] for row in rows(ours(server, "describe", group, "--members"), group)] == members
        state = rows(theirs(server, "--describe", "--group", group, "--state"), group)
        assert rows(ours(server, "describe", group, "--state"), group) == state
        listed = theirs(server, "--list", "--state", "Stable", "--type", "classic")
        assert [group, "Classic", "Stable"] in rows(listed, group) or group in listed
        assert rows(ours(server, "list", "--state", "Stable"), group) == [[group, "Stable", "classic", "consumer"]]


def test_kafkas_tool_forgets_offsets_and_deletes_groups(server: ServerProcess, topic: str, group: str) -> None:
    forgotten = theirs(server, "--delete-offsets", "--group", group, "--topic", f"{topic}:0")
    assert rows(forgotten, topic) == [[topic, "0", "Successful"]]
    assert [row[2] for row in rows(ours(server, "describe", group), group)] == ["2"]
    assert "successful" in theirs(server, "--delete", "--group", group)
    assert group not in theirs(server, "--list").split()
    assert group not in ours(server, "list")
    ours(server, "describe", group, status=1)
