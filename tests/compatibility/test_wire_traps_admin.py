"""More traps of other Kafka-compatible brokers: administration, groups that rebalance, and what a hard kill leaves.

As in `test_wire_traps.py`, every test holds on Apache Kafka too, but for the one about our own log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.conftest import SERVERS, create_topic, start
from tests.compatibility.test_wire_traps import batch, find_coordinator, idempotent, init_producer_id, list_offset
from tests.compatibility.test_wire_traps import produce as produce_batch
from tests.compatibility.wire import Wire
from tests.patience import wait_until
from tidelog.testing.ports import free_port
from tidelog.testing.processes import ServerProcess, TidelogProcess

NewTopic = Callable[..., str]
NONE, INVALID_PARTITIONS, UNKNOWN_TOPIC_OR_PARTITION = 0, 37, 3
MEMBER_ID_REQUIRED, UNKNOWN_MEMBER_ID, REBALANCE_IN_PROGRESS, ILLEGAL_GENERATION = 79, 25, 27, 22
SET, DELETE, APPEND, SUBTRACT = range(4)
TOPIC = 2


class TestCreatePartitions:
    def test_every_topic_has_its_own_result(self, wire: Wire, new_topic: NewTopic) -> None:
        grows, shrinks = new_topic(partitions=2), new_topic(partitions=2)
        wanted = [{"name": grows, "count": 4}, {"name": shrinks, "count": 1}, {"name": "not-there", "count": 3}]
        topics = [{**one, "assignments": None} for one in wanted]
        answer = wire.ask("create_partitions", 3, topics=topics, timeout=10_000, validate_only=False)
        assert {one.name: int(one.error_code) for one in answer.results} == {
            grows: NONE,
            shrinks: INVALID_PARTITIONS,
            "not-there": UNKNOWN_TOPIC_OR_PARTITION,
        }
        assert {one.name for one in answer.results if one.error_message} == {shrinks}


class TestIncrementalConfigs:
    def change(self, wire: Wire, topic: str, operation: int, value: str | None) -> Any:
        config = {"name": "cleanup.policy", "config_operation": operation, "value": value}
        resource = {"resource_type": TOPIC, "resource_name": topic, "configs": [config]}
        answer = wire.ask("incremental_alter_configs", 1, resources=[resource], validate_only=False)
        assert answer.responses[0].error_code == NONE, answer
        return self.policy(wire, topic)

    def policy(self, wire: Wire, topic: str) -> set[str]:
        resource = {"resource_type": TOPIC, "resource_name": topic, "configuration_keys": ["cleanup.policy"]}
        return set(wire.ask("describe_configs", 4, resources=[resource]).results[0].configs[0].value.split(","))

    def test_values_of_lists_are_appended_and_subtracted(self, wire: Wire, new_topic: NewTopic) -> None:
        topic = new_topic()
        assert self.change(wire, topic, APPEND, "compact") == {"delete", "compact"}
        assert self.change(wire, topic, APPEND, "compact") == {"delete", "compact"}
        assert self.change(wire, topic, SUBTRACT, "delete") == {"compact"}
        assert self.change(wire, topic, DELETE, None) == {"delete"}


# -------------------------------------------------------------------------------------------------------------- groups


class Member:
    """A member of a group that does what a client must, over a connection of its own."""

    def __init__(self, port: int, group: str) -> None:
        self.wire = Wire(port)
        self.group = group
        self.member_id = ""
        self.generation = -1
        self.codes: list[int] = []

    def rejoin(self) -> Any:
        """Join until the join is answered with a generation; every answer's code is kept."""
        while True:
            answer = self.wire.ask(
                "join_group",
                7,
                group_id=self.group,
                session_timeout=10_000,
                rebalance_timeout=10_000,
                member_id=self.member_id,
                protocol_type="consumer",
                protocols=[{"name": "range", "metadata": b"same"}],
            )
            self.codes.append(int(answer.error_code))
            self.member_id = answer.member_id
            if answer.error_code == NONE:
                self.generation = answer.generation_id
                return answer
            assert len(self.codes) < 100, self.codes

    def sync(self, joined: Any) -> int:
        """Take part in the sync; the leader gives everybody its own id as assignment."""
        mine = joined.leader == self.member_id
        given = [{"member_id": one.member_id, "assignment": one.member_id.encode()} for one in joined.members]
        answer = self.wire.ask(
            "sync_group",
            5,
            group_id=self.group,
            generation_id=self.generation,
            member_id=self.member_id,
            protocol_type="consumer",
            protocol_name="range",
            assignments=given if mine else [],
        )
        self.codes.append(int(answer.error_code))
        assert answer.error_code != NONE or bytes(answer.assignment) == self.member_id.encode()
        return int(answer.error_code)

    def settle(self) -> None:
        """Join and sync until there is an assignment, rebalances by others included."""
        while self.sync(self.rejoin()) != NONE:
            assert len(self.codes) < 100, self.codes

    def live(self, together: list[Member]) -> None:
        """Beat, and rejoin when told to, until all are in one generation."""
        deadline = time.monotonic() + 90
        self.settle()
        while (code := self.beat()) != NONE or len({member.generation for member in together}) > 1:
            assert time.monotonic() < deadline, self.codes
            if code != NONE:
                self.settle()
            time.sleep(0.02)

    def beat(self) -> int:
        answer = self.wire.ask(
            "heartbeat", 4, group_id=self.group, generation_id=self.generation, member_id=self.member_id
        )
        self.codes.append(int(answer.error_code))
        return int(answer.error_code)


@pytest.fixture
def members(server: ServerProcess, wire: Wire) -> Iterator[list[Member]]:
    group = f"many-{time.time_ns()}"
    find_coordinator(wire, group)
    made = [Member(server.port, group) for _ in range(12)]
    yield made
    for member in made:
        member.wire.close()


def test_joins_at_the_same_time_never_make_a_live_member_unknown(members: list[Member]) -> None:
    """Twelve join at once, and again whenever the others make the group rebalance."""
    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(lambda member: member.live(members), members))
    assert len({member.generation for member in members}) == 1
    seen = {code for member in members for code in member.codes}
    assert seen <= {NONE, MEMBER_ID_REQUIRED, REBALANCE_IN_PROGRESS, ILLEGAL_GENERATION}, seen
    assert UNKNOWN_MEMBER_ID not in seen


# --------------------------------------------------------------------------------------------------- kills and the log


def halve(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def preallocate(file: Path) -> None:
    """As an index is while its segment is active: entries, then zeros."""
    file.write_bytes(file.read_bytes() + bytes(8000))


@pytest.mark.parametrize("spoil", [halve, zero, preallocate])
@pytest.mark.parametrize("name", SERVERS)
def test_a_node_starts_with_what_a_hard_kill_left_beside_the_log(
    name: str, spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    """Indexes and snapshots are made anew from the log, records and producers are as they were."""
    with start(name, tmp_path, **{"log.index.interval.bytes": "100"}) as node:
        topic = create_topic(node.port, "kept", segment_bytes="1048576")
        with Wire(node.port) as wire:
            producer = init_producer_id(wire)
            for sequence in range(60):
                records = idempotent(batch(1, 50_000), producer.producer_id, producer.producer_epoch, sequence)
                assert produce_batch(wire, topic, records).error_code == NONE
        node.kill()
        beside = [file for file in node.data_directory.glob("kept-0/0*") if file.suffix in (".index", ".timeindex")]
        snapshots = list(node.data_directory.glob("kept-0/*.snapshot"))
        assert len(beside) >= 4, "indexes of two segments at least"
        for file in (*beside, *snapshots):
            spoil(file)
        node.start()
        with Wire(node.port) as wire:
            assert list_offset(wire, topic, -1).offset == 60
            again = idempotent(batch(1, 50_000), producer.producer_id, producer.producer_epoch, 59)
            answer = produce_batch(wire, topic, again)
            assert (answer.error_code, answer.base_offset) == (NONE, 59)
            for offset in (0, 30, 59):
                partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1}
                fields = {"min_bytes": 1, "max_wait": 0, "max_bytes": 1}
                answer = wire.ask("fetch", 11, **fields, topics=[{"topic": topic, "partitions": [partition]}])
                found = bytes(answer.responses[0].partitions[0].records)
                assert int.from_bytes(found[:8], "big") == offset


def test_the_address_clients_must_reach_is_in_the_first_line_of_the_log(tmp_path: Path) -> None:
    port = free_port()
    with TidelogProcess(tmp_path, options={"advertised.listeners": f"PLAINTEXT://localhost:{port}"}) as node:
        # The port answers before the node is ready: the other nodes need it before they name this one to clients.
        wait_until(lambda: "\n" in node.output_file.read_text())
        first = node.output_file.read_text().splitlines()[0]
        assert f"PLAINTEXT://localhost:{port}" in first
