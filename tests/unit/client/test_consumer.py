"""The consumer against brokers that move, forget and answer late, and in groups that deal anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import DROP, SILENCE, FakeCluster, FakeNode
from tidelog.client import Consumer, OffsetAndMetadata, OffsetAndTimestamp, RebalanceListener, TopicPartition
from tidelog.client.consuming import fetcher as fetcher_module
from tidelog.client.consuming.fetcher import _NodeFetches
from tidelog.client.consuming.record_decoder import RecordDecoder
from tidelog.client.network.connection import Connection
from tidelog.protocol.batches.compression import GZIP
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchableTopicResponse, FetchRequest, FetchResponse
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from tidelog.protocol.messages.leave_group import LeaveGroupRequest
from tidelog.protocol.messages.list_offsets import ListOffsetsRequest
from tidelog.protocol.messages.metadata import MetadataRequest
from tidelog.protocol.messages.offset_commit import OffsetCommitRequest

FAST = {
    "retry_backoff_ms": 5,
    "retry_backoff_max_ms": 10,
    "reconnect_backoff_ms": 5,
    "reconnect_backoff_max_ms": 10,
    "heartbeat_interval_ms": 10,
    "fetch_max_wait_ms": 30,
    "auto_offset_reset": "earliest",
}
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def consumer(cluster: FakeCluster, *topics: str, **options: Any) -> Consumer:
    return Consumer(*topics, **{"bootstrap_servers": cluster.bootstrap, **FAST, **options})


def fill(cluster: FakeCluster, topic: str, partition: int, count: int, per_batch: int = 3) -> None:
    log = cluster.topics[topic][partition]
    numbers = list(range(log.end_offset, log.end_offset + count))
    for at in range(0, count, per_batch):
        log.append(bytes(encode_batch([(1000 + n, None, b"%d" % n, ()) for n in numbers[at : at + per_batch]])))
    cluster.appended.set()


async def read(consuming: Consumer, count: int, timeout_s: float = PATIENCE_S) -> list[int]:
    """The offsets of the next `count` records, in the order in which they came."""
    found: list[int] = []
    async with asyncio.timeout(timeout_s):
        while len(found) < count:
            for records in (await consuming.poll(1000, max_records=count - len(found))).values():
                assert all(int(record.value or b"") == record.offset for record in records)
                found.extend(record.offset for record in records)
    return found


async def until(condition: Any, consuming: Consumer | None = None, timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await (asyncio.sleep(0.005) if consuming is None else consuming.poll(5))


class Told(RebalanceListener):
    def __init__(self) -> None:
        self.events: list[tuple[str, set[TopicPartition]]] = []

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self.events.append(("revoked", set(revoked)))

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self.events.append(("assigned", set(assigned)))

    def on_partitions_lost(self, lost: Collection[TopicPartition]) -> None:
        self.events.append(("lost", set(lost)))


class TestWithoutAGroup:
    async def test_all_partitions_of_a_topic_are_read_from_the_earliest(self):
        async with FakeCluster(t=2) as cluster:
            fill(cluster, "t", 0, 10)
            fill(cluster, "t", 1, 10)
            async with consumer(cluster, "t") as consuming:
                assert sorted(await read(consuming, 20)) == sorted([*range(10), *range(10)])
                assert consuming.assignment() == {T0, T1}

    async def test_the_latest_is_what_comes_from_now_on(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 5)
            async with consumer(cluster, "t", auto_offset_reset="latest") as consuming:
                await until(lambda: cluster.sent(FetchRequest), consuming)
                fill(cluster, "t", 0, 3)
                assert await read(consuming, 3) == [5, 6, 7]

    async def test_no_more_records_than_asked_for_come_in_one_poll(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 50)
            async with consumer(cluster, "t", max_poll_records=7) as consuming:
                sizes: list[int] = []
                while sum(sizes) < 50:
                    sizes.append(sum(len(records) for records in (await consuming.poll(1000)).values()))
                assert max(sizes) <= 7
                assert await consuming.position(T0) == 50

    @pytest.mark.parametrize("record_bytes", [100, 400_000])
    async def test_a_large_answer_goes_on_arriving_while_the_one_before_it_is_decoded(self, record_bytes: int):
        """And after that, which may be an exception, the connection reads as before."""
        calls: list[bool] = []
        decoded_while: list[list[bool]] = []

        class Refused(Exception):
            pass

        def decode(value: bytes) -> bytes:
            decoded_while.append(calls[-1:])
            if len(decoded_while) == 2:
                raise Refused
            return value

        async with FakeCluster(t=1) as cluster:
            for _ in range(5):
                cluster.topics["t"][0].append(bytes(encode_batch([(1000, None, b"v" * record_bytes, ())])))
            limits = {"max_partition_fetch_bytes": record_bytes + 100, "max_poll_records": 1}
            async with consumer(cluster, "t", value_deserializer=decode, **limits) as consuming:
                with patch.object(Connection, "set_reads_later", lambda _, reads_later: calls.append(reads_later)):
                    while len(decoded_while) < 5:
                        with suppress(Refused):
                            await asyncio.wait_for(consuming.poll(1000), PATIENCE_S)
                        assert calls[-1:] in ([], [False])
                        if len(decoded_while) == 2:
                            consuming.seek(T0, 2)
        assert ([True] in decoded_while) is (record_bytes == 400_000)
        assert calls == [True, False] * (len(calls) // 2)

    async def test_every_connection_reads_again_after_an_interrupt_among_those_that_read_later(self):
        """One that does not is told of no answer below 2 MiB until a request times out."""
        reads_later = [False] * 2

        class Connecting:
            def __init__(self, number: int) -> None:
                self._number = number

            def set_reads_later(self, later: bool) -> None:
                if later and self._number:
                    raise KeyboardInterrupt
                reads_later[self._number] = later

        async with FakeCluster(t=1) as cluster, consumer(cluster, "t") as consuming:
            fetcher = consuming._fetcher
            assert fetcher is not None
            for number in range(2):
                node = fetcher._nodes[100 + number] = _NodeFetches(100 + number)
                node.in_flight = node.answers_are_large = True
            ready = patch.object(fetcher._cluster, "ready", lambda number: Connecting(number - 100))
            with ready, pytest.raises(KeyboardInterrupt), fetcher._reading_later():
                raise AssertionError("it goes on")
            for number in range(2):
                del fetcher._nodes[100 + number]
        assert reads_later == [False] * 2

    async def test_an_empty_poll_returns_when_its_time_is_over(self):
        async with FakeCluster(t=1) as cluster, consumer(cluster, "t", fetch_max_wait_ms=120_000) as consuming:
            began = asyncio.get_running_loop().time()
            assert await consuming.poll(60) == {}
            assert 0.05 < asyncio.get_running_loop().time() - began < PATIENCE_S

    async def test_partitions_that_come_later_are_read_too(self):
        async with FakeCluster(t=1) as cluster, consumer(cluster, "t", metadata_max_age_ms=20) as consuming:
            fill(cluster, "t", 0, 1)
            assert await read(consuming, 1) == [0]
            cluster.topics["t"].append(type(cluster.topics["t"][0])(1))
            fill(cluster, "t", 1, 2)
            assert await read(consuming, 2) == [0, 1]

    async def test_a_broker_that_does_not_know_of_new_partitions_yet_takes_none_away(self):
        """They would be read again from where `auto_offset_reset` says."""

        def lagging(request: MetadataRequest, node: FakeNode) -> Any:
            response: Any = node.on_metadata(request)
            for topic in response.topics:
                topic.partitions = topic.partitions[:1]
            return response

        async with FakeCluster(t=2) as cluster:
            fill(cluster, "t", 1, 6)
            async with consumer(cluster, "t") as consuming:
                assert await read(consuming, 6) == list(range(6))
                cluster.script(MetadataRequest, lagging)
                before = len(cluster.sent(MetadataRequest))
                assert consuming._cluster is not None
                for answers in (1, 2):
                    consuming._cluster.request_refresh()
                    await until(lambda wanted=before + answers: len(cluster.sent(MetadataRequest)) >= wanted, consuming)
                fill(cluster, "t", 1, 3)
                assert await read(consuming, 3) == [6, 7, 8]

    async def test_a_topic_that_is_not_there_is_said_once(self, caplog):
        async with FakeCluster() as cluster:
            async with consumer(cluster, "mispelt", allow_auto_create_topics=False) as reading:
                await reading.poll(100)
            assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
                "cannot read topic 'mispelt': UNKNOWN_TOPIC_OR_PARTITION"
            ]

    @pytest.mark.parametrize(
        ("wanted", "text"),
        [
            (TopicPartition("mispelt", 0), "cannot read topic 'mispelt': UNKNOWN_TOPIC_OR_PARTITION"),
            (TopicPartition("t", 9), "cannot read partition 9 of topic 't': the topic has no such partition"),
        ],
    )
    async def test_an_assigned_partition_that_is_not_there_is_said_once(self, caplog, wanted, text):
        async with FakeCluster(t=2) as cluster:
            async with consumer(cluster, allow_auto_create_topics=False, metadata_max_age_ms=20) as reading:
                reading.assign([T0, wanted])
                await until(lambda: len(cluster.sent(MetadataRequest)) >= 4, reading)
            assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [text]

    async def test_names_and_partitions_of_the_wrong_type_are_said(self):
        with pytest.raises(TypeError, match=r"expected topic names and named options, .*, not \(\['t'\],\)"):
            Consumer(["t"])  # type: ignore[arg-type]
        wrong: Any
        for wrong in ("t", ["t"], [("t", "0")], [[T0]]):
            with pytest.raises(TypeError, match=r"partitions must be (a|a list of) TopicPartition"):
                Consumer().assign(wrong)
        async with FakeCluster(t=1) as cluster, consumer(cluster, "t", group_id="g") as reading:
            wrong = "0"
            with pytest.raises(TypeError, match="t-0: an offset is a number or an OffsetAndMetadata"):
                await reading.commit({T0: wrong})
            wrong = [T0]
            with pytest.raises(TypeError, match="an item of partitions must be a TopicPartition, not "):
                reading.pause(wrong)

    async def test_a_consumer_without_topics_says_so(self):
        async with FakeCluster(t=1) as cluster, consumer(cluster) as consuming:
            with pytest.raises(RuntimeError, match="subscribe"):
                await consuming.poll()
            with pytest.raises(RuntimeError, match="group_id"):
                await consuming.commit()


class TestPositions:
    async def test_seek_goes_there_whatever_was_fetched_before(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 30)
            async with consumer(cluster) as consuming:
                consuming.assign([T0])
                assert await read(consuming, 4) == [0, 1, 2, 3]
                consuming.seek(T0, 20)
                assert await consuming.position(T0) == 20
                assert await read(consuming, 3) == [20, 21, 22]
                consuming.seek(T0, 1)
                assert await read(consuming, 2) == [1, 2]
                await consuming.seek_to_end(T0)
                fill(cluster, "t", 0, 1)
                assert await read(consuming, 1) == [30]
                await consuming.seek_to_beginning()
                assert await read(consuming, 1) == [0]

    async def test_an_answer_that_is_late_for_its_position_is_dropped(self):
        async def slowly(request: FetchRequest, node: FakeNode) -> Any:
            await asyncio.sleep(0.05)
            return await node.on_fetch(request)

        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 10)
            cluster.script(FetchRequest, slowly)
            async with consumer(cluster) as consuming:
                consuming.assign([T0])
                await until(lambda: cluster.sent(FetchRequest), consuming)
                consuming.seek(T0, 6)
                assert await read(consuming, 4) == [6, 7, 8, 9]

    async def test_paused_partitions_rest_and_lose_nothing(self):
        async with FakeCluster(t=2) as cluster:
            fill(cluster, "t", 0, 6)
            fill(cluster, "t", 1, 6)
            async with consumer(cluster) as consuming:
                consuming.assign([T0, T1])
                first = await consuming.poll(1000, max_records=1)
                [held] = first
                consuming.pause(held)
                other = T1 if held == T0 else T0
                for _ in range(8):
                    assert set(await consuming.poll(20)) <= {other}
                assert await consuming.position(other) == 6
                consuming.resume(held)
                assert await read(consuming, 5) == [1, 2, 3, 4, 5]

    async def test_ends_and_times_are_found_for_any_partition(self):
        async with FakeCluster(t=2) as cluster:
            fill(cluster, "t", 0, 10, per_batch=1)
            async with consumer(cluster) as consuming:
                assert await consuming.end_offsets([T0, T1]) == {T0: 10, T1: 0}
                assert await consuming.beginning_offsets([T0]) == {T0: 0}
                found = await consuming.offsets_for_times({T0: 1005, T1: 5})
                assert found[T0] == OffsetAndTimestamp(5, 1005, 0)
                assert found[T1] is None
                assert await consuming.partitions_for_topic("t") == {0, 1}
                assert await consuming.partitions_for_topic("nowhere") is None
                with pytest.raises(KafkaError, match="has 2 partitions, not one numbered 9"):
                    await consuming.end_offsets([TopicPartition("t", 9)])

    async def test_an_offset_that_is_gone_is_reset_as_configured(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 10)
            cluster.topics["t"][0].start_offset = 6
            async with consumer(cluster, auto_offset_reset="earliest") as consuming:
                consuming.assign([T0])
                consuming.seek(T0, 2)
                assert await read(consuming, 4) == [6, 7, 8, 9]

    async def test_an_offset_that_is_gone_is_not_asked_for_without_pause_while_older_records_wait(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 10)
            async with consumer(cluster, retry_backoff_ms=50, retry_backoff_max_ms=50) as consuming:
                consuming.assign([T0])
                assert await read(consuming, 3) == [0, 1, 2]
                cluster.topics["t"][0].start_offset = 99
                cluster.appended.set()  # ends the wait of a fetch that the old start of the log has let wait
                began, before = time.monotonic(), len(cluster.requests)
                await until(lambda: len(cluster.requests) - before >= 8)
                assert time.monotonic() - began > 0.15, "a pause of 50 ms, or a fifth less, follows each refusal"
                cluster.topics["t"][0].start_offset = 0
                fill(cluster, "t", 0, 5)
                refused = len(cluster.sent(FetchRequest))  # the answer to the last of them may be still on its way
                await until(lambda: len(cluster.sent(FetchRequest)) > refused)
                assert await read(consuming, 12) == list(range(3, 15))

    async def test_without_a_reset_it_is_an_error_that_a_seek_cures(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 10)
            async with consumer(cluster, auto_offset_reset="none", group_id="g") as consuming:
                consuming.assign([T0])
                with pytest.raises(KafkaError, match="t-0 has no committed offset, auto_offset_reset=none"):
                    await read(consuming, 1)
                consuming.seek(T0, 99)
                with pytest.raises(KafkaError, match="t-0 has no offset 99"):
                    await read(consuming, 1)
                consuming.seek(T0, 9)
                assert await read(consuming, 1) == [9]

    async def test_an_iteration_counts_only_what_it_has_handed_out(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 20)
            async with consumer(cluster, group_id="g", enable_auto_commit=False) as consuming:
                consuming.assign([T0])
                seen = []
                async for record in consuming:
                    seen.append(record.offset)
                    if len(seen) == 7:
                        break
                assert await consuming.position(T0) == 7
                await consuming.commit()
                assert await consuming.committed(T0) == {T0: OffsetAndMetadata(7, "", 0)}
                assert await read(consuming, 2) == [7, 8]

    @pytest.mark.parametrize("call", ["pause", "seek"])
    async def test_an_iteration_keeps_the_records_of_other_partitions_at_a_pause_or_a_seek(self, call):
        """It fetched those of all partitions again."""
        async with FakeCluster(t=2) as cluster:
            fill(cluster, "t", 0, 6)
            fill(cluster, "t", 1, 6)
            async with consumer(cluster, group_id="g", enable_auto_commit=False) as consuming:
                consuming.assign([T0, T1])
                records = aiter(consuming)
                first = await anext(records)
                held = TopicPartition("t", first.partition)
                other = T1 if held == T0 else T0
                if call == "pause":
                    consuming.pause(held)
                else:
                    consuming.seek(held, 4)
                expected = {held: 1 if call == "pause" else 4, other: 0}
                assert {each: await consuming.position(each) for each in (T0, T1)} == expected
                await consuming.commit()
                assert {each: at.offset for each, at in (await consuming.committed()).items() if at} == expected
                requests = len(cluster.sent(FetchRequest))
                kept = [await anext(records) for _ in range(6)]
                assert [(each.partition, each.offset) for each in kept] == [(other.partition, n) for n in range(6)]
                assert len(cluster.sent(FetchRequest)) == requests
                consuming.resume(held)
                left = [await anext(records) for _ in range(6 - expected[held])]
                assert [each.offset for each in left] == list(range(expected[held], 6))
                assert {each: await consuming.position(each) for each in (T0, T1)} == {T0: 6, T1: 6}


class TestTrouble:
    @pytest.mark.parametrize("answer", [DROP, SILENCE])
    async def test_a_fetch_that_is_not_answered_is_made_again(self, answer):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 3)
            cluster.script(FetchRequest, lambda request, node: answer)
            async with consumer(cluster, "t", request_timeout_ms=50) as consuming:
                assert await read(consuming, 3) == [0, 1, 2]

    async def test_a_moved_leader_is_followed_without_loss(self):
        async with FakeCluster(nodes=2, t=1) as cluster:
            fill(cluster, "t", 0, 3)
            async with consumer(cluster, "t") as consuming:
                assert await read(consuming, 3) == [0, 1, 2]
                cluster.move_leader("t", 0, 2)
                fill(cluster, "t", 0, 3)
                assert await read(consuming, 3) == [3, 4, 5]

    async def test_a_broker_that_forgot_the_session_is_told_everything_again(self):
        async with FakeCluster(t=2) as cluster:
            fill(cluster, "t", 0, 3)
            async with consumer(cluster, "t") as consuming:
                assert await read(consuming, 3) == [0, 1, 2]
                cluster.nodes[1].sessions.clear()
                fill(cluster, "t", 1, 3)
                assert await read(consuming, 3) == [0, 1, 2]

    async def test_later_fetches_name_only_what_changed(self):
        async with FakeCluster(t=5) as cluster:
            async with consumer(cluster, "t") as consuming:
                await consuming.poll(150)
                fill(cluster, "t", 3, 3)
                await read(consuming, 3)
                await consuming.poll(60)
            full, *later = cluster.sent(FetchRequest)
            assert sum(len(topic.partitions) for topic in full.topics) == 5
            told = [
                each.partition
                for request in later
                if request.session_epoch > 0
                for t in request.topics
                for each in t.partitions
            ]
            assert set(told) == {3}
            await until(lambda: not cluster.nodes[1].sessions)

    async def test_a_corrupt_batch_is_an_error_until_it_is_passed(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 9)
            broken = bytearray(cluster.topics["t"][0].batches[1])
            broken[-1] ^= 1
            cluster.topics["t"][0].batches[1] = bytes(broken)
            async with consumer(cluster) as consuming:
                consuming.assign([T0])
                assert await read(consuming, 3) == [0, 1, 2]
                for _ in range(2):
                    with pytest.raises(KafkaError, match="offset 3 fails its CRC"):
                        await read(consuming, 1)
                consuming.seek(T0, 6)
                assert await read(consuming, 3) == [6, 7, 8]

    async def test_a_record_that_cannot_be_deserialized_hides_no_others(self):
        """Neither those around it nor those of other partitions are lost, however often it is polled."""

        def only_others(value: bytes) -> bytes:
            if value == b"4":
                raise ValueError("not this one")
            return value

        async with FakeCluster(t=2) as cluster:
            fill(cluster, "t", 0, 9)
            fill(cluster, "t", 1, 4, per_batch=1)
            async with consumer(cluster, value_deserializer=only_others) as consuming:
                consuming.assign([T0, T1])
                found: dict[TopicPartition, list[int]] = {T0: [], T1: []}
                async with asyncio.timeout(PATIENCE_S):
                    while sum(map(len, found.values())) < 8:
                        try:
                            polled = await consuming.poll(1000)
                        except ValueError:
                            await asyncio.sleep(0.01)
                            continue
                        for partition, records in polled.items():
                            found[partition].extend(record.offset for record in records)
                assert found == {T0: [0, 1, 2, 3], T1: [0, 1, 2, 3]}
                for _ in range(2):
                    with pytest.raises(ValueError, match="not this one"):
                        await read(consuming, 1)
                    assert await consuming.position(T0) == 4
                consuming.seek(T0, 5)
                assert await read(consuming, 4) == [5, 6, 7, 8]

    @pytest.mark.parametrize("is_in_range", [True, False])
    async def test_what_cannot_be_read_is_said_while_other_partitions_have_records(self, is_in_range):
        """As Java does: behind a backlog of another partition the error was never raised."""

        def refuse(value: bytes) -> bytes:
            if value == b"900":
                raise ValueError("not this one")
            return value

        async with FakeCluster(t=2) as cluster:
            fill(cluster, "t", 0, 901, per_batch=901)
            fill(cluster, "t", 1, 200, per_batch=1)
            async with consumer(cluster, auto_offset_reset="none", value_deserializer=refuse) as consuming:
                consuming.assign([T0, T1])
                consuming.seek(T0, 900 if is_in_range else 2000)
                consuming.seek(T1, 0)
                errors, numbers = 0, list[int]()
                async with asyncio.timeout(PATIENCE_S):
                    while len(numbers) < 200:
                        try:
                            for records in (await consuming.poll(1000, 1)).values():
                                numbers += [record.offset for record in records]
                        except (ValueError, KafkaError):
                            errors += 1
                assert numbers == list(range(200)), "an error costs no record"
                assert errors

    async def test_a_program_that_polls_again_after_each_error_lets_its_event_loop_run(self):
        """The exception of a deserializer came back without a turn: no time limit, heartbeat or signal got through."""
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 1)
            async with consumer(cluster, "t", value_deserializer=lambda value: int(value) // 0) as consuming:
                with pytest.raises(ZeroDivisionError):
                    await read(consuming, 1)
                turns = list[None]()
                asyncio.get_running_loop().call_soon(turns.append, None)
                for _ in range(3):
                    with pytest.raises(ZeroDivisionError):
                        await consuming.poll(1000)
                assert turns

    async def test_records_for_which_there_was_no_memory_are_fetched_again(self, monkeypatch):
        """Each later poll raised the error of the first."""

        def fail(*_: Any) -> Any:
            raise MemoryError

        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 9, per_batch=3)
            async with consumer(cluster) as consuming:
                consuming.assign([T0])
                assert await read(consuming, 2) == [0, 1]
                with monkeypatch.context() as patch:
                    patch.setattr(RecordDecoder, "decode", fail)
                    with pytest.raises(MemoryError):
                        await read(consuming, 2)
                assert await read(consuming, 6) == [3, 4, 5, 6, 7, 8]

    async def test_a_damaged_answer_is_an_error_of_its_partition_and_the_others_are_read(self):
        async def damaged(request: FetchRequest, node: FakeNode) -> Any:
            answer: Any = await node.on_fetch(request)
            for topic in answer.responses:
                for data in topic.partitions:
                    if data.partition_index == 0 and data.records:
                        broken = bytearray(data.records)
                        broken[8:12] = (5).to_bytes(4, "big")
                        data.records = bytes(broken)
            return answer

        async with FakeCluster(t=2) as cluster:
            fill(cluster, "t", 0, 6)
            fill(cluster, "t", 1, 6)
            cluster.script(FetchRequest, *[damaged] * 40)
            async with consumer(cluster) as consuming:
                consuming.assign([T0, T1])
                found: dict[TopicPartition, list[int]] = {T0: [], T1: []}
                errors, codes = 0, set[ErrorCode]()
                async with asyncio.timeout(PATIENCE_S):
                    while len(found[T0]) < 6 or len(found[T1]) < 6:
                        try:
                            polled = await consuming.poll(1000)
                        except KafkaError as error:
                            codes.add(error.code)
                            errors += 1
                            assert errors < 5 or found[T1] == list(range(6)), "the other partition waits for this one"
                            if errors == 8:
                                cluster.scripts.clear()
                            continue
                        for partition, records in polled.items():
                            found[partition] += [record.offset for record in records]
                assert found == {T0: list(range(6)), T1: list(range(6))}
                assert errors == 8
                assert codes == {ErrorCode.CORRUPT_MESSAGE}

    async def test_a_batch_with_a_wrong_crc_is_fetched_again(self):
        """The leader may have repaired it meanwhile, or another replica leads: the damaged bytes were kept for ever,
        and a program that polled again at once never let its event loop run."""

        async def damaged(request: FetchRequest, node: FakeNode) -> Any:
            answer: Any = await node.on_fetch(request)
            for topic in answer.responses:
                for data in topic.partitions:
                    if data.records:
                        data.records = bytes(data.records[:-1]) + b"~"
            return answer

        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 6)
            cluster.script(FetchRequest, *[damaged] * 40)
            async with consumer(cluster) as consuming:
                consuming.assign([T0])
                found: list[int] = []
                codes: list[ErrorCode] = []
                while len(found) < 6:
                    try:
                        polled = await consuming.poll(1000)
                    except KafkaError as error:
                        codes.append(error.code)
                        if len(codes) > 100:
                            pytest.fail("it is not fetched again")
                        if len(codes) == 3:
                            cluster.scripts.clear()
                        continue
                    found += [record.offset for record in polled.get(T0, [])]
                assert found == list(range(6))
                assert codes == [ErrorCode.CORRUPT_MESSAGE] * 3

    @pytest.mark.parametrize("code", [ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.CORRUPT_MESSAGE])
    async def test_an_error_that_does_not_pass_is_raised(self, code: ErrorCode):
        """CORRUPT_MESSAGE is retriable for producers. To consumers it says that no replica has the records whole."""

        def refuse(request: FetchRequest, node: FakeNode) -> FetchResponse:
            response = FetchResponse()
            for topic in request.topics:
                for each in topic.partitions:
                    data = node._read((topic.topic, topic.topic_id, each.partition), each)
                    data.error_code, data.records = code, None
                    answer = FetchableTopicResponse(topic=topic.topic, topic_id=topic.topic_id, partitions=[data])
                    response.responses.append(answer)
            return response

        async with FakeCluster(t=1) as cluster:
            cluster.script(FetchRequest, refuse)
            async with consumer(cluster, "t") as consuming:
                with pytest.raises(KafkaError) as caught:
                    await read(consuming, 1)
                assert caught.value.code is code
                fill(cluster, "t", 0, 3)
                assert await read(consuming, 3) == [0, 1, 2]

    async def test_memory_is_bounded_by_two_answers_however_long_nobody_polls(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 300)
            async with consumer(cluster, "t") as consuming:
                assert await read(consuming, 1) == [0]
                before = len(cluster.sent(FetchRequest))
                for _ in range(10):
                    fill(cluster, "t", 0, 3)
                    await asyncio.sleep(0.01)
                assert len(cluster.sent(FetchRequest)) - before <= 2
                assert await read(consuming, 329) == list(range(1, 330))

    async def test_memory_is_bounded_however_often_partitions_are_paused_and_resumed(self):
        async with FakeCluster(t=2) as cluster, consumer(cluster) as consuming:
            consuming.assign([T0, T1])
            taken: dict[TopicPartition, list[int]] = {T0: [], T1: []}
            for number in range(40):
                held, other = (T0, T1) if number % 2 else (T1, T0)
                consuming.pause(held)
                consuming.resume(other)
                fill(cluster, "t", 0, 3)
                fill(cluster, "t", 1, 3)
                for partition, records in (await consuming.poll(1000, max_records=1)).items():
                    taken[partition] += [record.offset for record in records]
                await asyncio.sleep(0.01)
                assert consuming._fetcher is not None
                waiting = consuming._fetcher._buffer._fetches
                assert all(len(answers) <= 2 for answers in waiting.values())
            consuming.resume(T0, T1)
            async with asyncio.timeout(PATIENCE_S):
                while sum(map(len, taken.values())) < 240:
                    for partition, records in (await consuming.poll(1000)).items():
                        taken[partition] += [record.offset for record in records]
            assert taken == {T0: list(range(120)), T1: list(range(120))}

    async def test_a_partition_without_a_leader_does_not_keep_others_from_being_read(self):
        async with FakeCluster(t=2, nodes=2) as cluster:
            fill(cluster, "t", 0, 6)
            fill(cluster, "t", 1, 6)
            cluster.topics["t"][1].leader = -1
            async with consumer(cluster, "t") as consuming:
                assert await read(consuming, 6) == list(range(6))
                cluster.topics["t"][1].leader = cluster.topics["t"][0].leader
                assert await read(consuming, 6) == list(range(6))

    async def test_a_leader_that_does_not_answer_does_not_keep_partitions_of_others_from_being_read(self):
        async with FakeCluster(t=2, nodes=2) as cluster:
            fill(cluster, "t", 0, 6)
            fill(cluster, "t", 1, 6)
            first, second = (cluster.topics["t"][number].leader for number in range(2))
            assert first != second

            def silent(request: ListOffsetsRequest, node: FakeNode) -> Any:
                return node.on_list_offsets(request) if node.node_id == first else SILENCE

            cluster.script(ListOffsetsRequest, silent, silent)
            async with consumer(cluster, "t") as consuming:
                assert await read(consuming, 6) == list(range(6))

    async def test_a_quiet_partition_does_not_hold_up_a_busy_one(self):
        async with FakeCluster(t=2) as cluster, consumer(cluster, "t", fetch_max_wait_ms=120_000) as consuming:
            for _ in range(5):
                fill(cluster, "t", 0, 3)
                await read(consuming, 3)

    async def test_old_brokers_are_read_by_topic_name(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 3)
            cluster.versions = {1: (4, 6), 2: (1, 2), 3: (0, 4), 18: (0, 0)}
            async with consumer(cluster, "t") as consuming:
                assert await read(consuming, 3) == [0, 1, 2]
            assert cluster.versions_of(FetchRequest) == {6}
            assert cluster.versions_of(ListOffsetsRequest) == {2}


class TestInAGroup:
    async def test_a_member_reads_commits_and_goes_on_where_it_stopped(self):
        async with FakeCluster(t=2) as cluster:
            fill(cluster, "t", 0, 5)
            async with consumer(cluster, "t", group_id="g", enable_auto_commit=False) as consuming:
                assert await read(consuming, 5) == [0, 1, 2, 3, 4]
                await consuming.commit({T0: 3})
                assert await consuming.committed(T0, T1) == {T0: OffsetAndMetadata(3), T1: None}
            async with consumer(cluster, "t", group_id="g", enable_auto_commit=False) as consuming:
                assert await read(consuming, 2) == [3, 4]
                task = await consuming.commit_async()
                await task
                assert cluster.groups.group("g").offsets["t", 0] == (5, "")

    async def test_positions_are_committed_by_themselves_and_at_the_end(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 5)
            offsets = cluster.groups.group("g").offsets
            async with consumer(cluster, "t", group_id="g", auto_commit_interval_ms=600_000) as consuming:
                await read(consuming, 1)
                assert not offsets
            assert offsets["t", 0][0] == 1
            async with consumer(cluster, "t", group_id="g", auto_commit_interval_ms=20) as consuming:
                await read(consuming, 2)
                await asyncio.sleep(0.03)
                await consuming.poll(0, max_records=1)
                await until(lambda: offsets["t", 0][0] > 2)
                assert offsets["t", 0][0] == 3, "what the last poll returned is not consumed yet"
                await read(consuming, 1)
            assert offsets["t", 0][0] == 5

    @pytest.mark.parametrize("strategy", ["range", "roundrobin", "sticky", "cooperative-sticky"])
    async def test_two_members_share_and_the_second_leaves_all_to_the_first(self, strategy):
        async with FakeCluster(t=4) as cluster:
            options = {"group_id": "g", "partition_assignment_strategy": strategy}
            first, told = consumer(cluster, **options), Told()
            async with first:
                first.subscribe(["t"], listener=told)
                await until(lambda: len(first.assignment()) == 4, first)
                async with consumer(cluster, "t", **options) as second:
                    await asyncio.wait_for(self._both(first, second), PATIENCE_S)
                    assert not first.assignment() & second.assignment()
                    assert first.assignment() | second.assignment() == {TopicPartition("t", n) for n in range(4)}
                await until(lambda: len(first.assignment()) == 4, first)
            revoked = [partitions for what, partitions in told.events if what == "revoked"]
            if strategy == "cooperative-sticky":
                assert len(revoked[0]) == 2, "a cooperative member gives up only what must move"
            else:
                assert len(revoked[0]) == 4
            assert len(revoked[-1]) == 4, "closing gives up all"

    @staticmethod
    async def _both(first: Consumer, second: Consumer) -> None:
        while len(first.assignment()) != 2 or len(second.assignment()) != 2:
            await asyncio.gather(first.poll(20), second.poll(20))

    async def test_no_record_is_skipped_or_read_twice_over_a_rebalance(self):
        async with FakeCluster(t=4) as cluster:
            for number in range(4):
                fill(cluster, "t", number, 200)
            seen: list[tuple[int, int]] = []

            async def work(consuming: Consumer, polls: int) -> None:
                for _ in range(polls):
                    for partition, records in (await consuming.poll(20, max_records=10)).items():
                        seen.extend((partition.partition, record.offset) for record in records)
                    await asyncio.sleep(0.001)

            async with consumer(cluster, "t", group_id="g") as first:
                await work(first, 15)
                async with consumer(cluster, "t", group_id="g") as second:
                    await asyncio.gather(work(first, 25), work(second, 15))
                async with asyncio.timeout(PATIENCE_S):
                    while len(set(seen)) < 800:
                        await work(first, 1)
            assert len(seen) == len(set(seen))

    async def test_positions_are_committed_before_partitions_are_given_up(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 5)
            async with consumer(cluster, "t", group_id="g") as consuming:
                await read(consuming, 4)
                cluster.script(HeartbeatRequest, lambda request, node: HeartbeatResponse(error_code=27))
                before = len(cluster.sent(JoinGroupRequest))
                await until(lambda: len(cluster.sent(JoinGroupRequest)) > before, consuming)
                kinds = [type(request) for _, _, request in cluster.requests]
                assert OffsetCommitRequest in kinds[: len(kinds) - kinds[::-1].index(JoinGroupRequest)]

    async def test_a_member_that_was_expelled_loses_its_partitions_and_joins_again(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 5)
            consuming, told = consumer(cluster, group_id="g", enable_auto_commit=False), Told()
            async with consuming:
                consuming.subscribe(["t"], listener=told)
                await read(consuming, 2)
                [member] = cluster.groups.group("g").members
                cluster.groups.expel("g", member)
                await until(lambda: ("lost", {T0}) in told.events, consuming)
                await until(lambda: consuming.assignment() == {T0}, consuming)

    async def test_a_commit_after_being_expelled_says_why(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 5)
            async with consumer(cluster, "t", group_id="g", heartbeat_interval_ms=5_000) as consuming:
                await read(consuming, 2)
                [member] = cluster.groups.group("g").members
                cluster.groups.expel("g", member)
                with pytest.raises(
                    KafkaError, match="no longer a member of its group: nothing was committed"
                ) as caught:
                    await consuming.commit()
                assert caught.value.code is ErrorCode.UNKNOWN_MEMBER_ID
                await read(consuming, 1)

    async def test_a_consumer_that_does_not_poll_leaves_its_group(self):
        async with FakeCluster(t=1) as cluster:
            consuming = consumer(cluster, "t", group_id="g", max_poll_interval_ms=300)
            async with consuming:
                await until(lambda: consuming.assignment(), consuming)
                await until(lambda: cluster.sent(LeaveGroupRequest))
                await until(lambda: not cluster.groups.group("g").members)
                await until(lambda: cluster.groups.group("g").members and consuming.assignment(), consuming)

    async def test_a_static_member_does_not_leave_and_keeps_its_partitions(self):
        async with FakeCluster(t=1) as cluster:
            for _ in range(2):
                async with consumer(cluster, "t", group_id="g", group_instance_id="i") as consuming:
                    await until(lambda: consuming.assignment() == {T0}, consuming)
            assert not cluster.sent(LeaveGroupRequest)
            assert {request.group_instance_id for request in cluster.sent(JoinGroupRequest)} == {"i"}

    async def test_a_coordinator_that_moves_is_found_again(self):
        async with FakeCluster(nodes=2, t=1) as cluster:
            fill(cluster, "t", 0, 3)
            async with consumer(cluster, "t", group_id="g") as consuming:
                await read(consuming, 3)
                refuse = lambda request, node: HeartbeatResponse(error_code=ErrorCode.NOT_COORDINATOR)  # noqa: E731
                cluster.coordinator = 2
                cluster.script(HeartbeatRequest, refuse)
                await until(
                    lambda: any(node == 2 and isinstance(r, HeartbeatRequest) for node, _, r in cluster.requests)
                )
                await consuming.commit()

    async def test_a_group_that_cannot_be_joined_is_an_error(self):
        async with FakeCluster(t=1) as cluster:
            refusal = JoinGroupResponse(error_code=ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
            cluster.script(JoinGroupRequest, lambda request, node: refusal)
            async with consumer(cluster, "t", group_id="g") as consuming:
                with pytest.raises(KafkaError) as caught:
                    await read(consuming, 1)
                assert caught.value.code is ErrorCode.INCONSISTENT_GROUP_PROTOCOL

    async def test_trouble_while_joining_passes(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 1)
            busy = JoinGroupResponse(error_code=ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
            cluster.script(JoinGroupRequest, lambda request, node: busy, lambda request, node: DROP)
            async with consumer(cluster, "t", group_id="g") as consuming:
                assert await read(consuming, 1) == [0]

    async def test_topics_that_match_a_pattern_are_read_as_they_appear(self):
        async with FakeCluster(t=1, other=1) as cluster:
            consuming = consumer(cluster, group_id="g", metadata_max_age_ms=20)
            async with consuming:
                consuming.subscribe(pattern="t.*")
                await until(lambda: consuming.assignment() == {T0}, consuming)
                cluster.create("topical", 1)
                await until(lambda: TopicPartition("topical", 0) in consuming.assignment(), consuming)
                assert consuming.subscription() == {"t", "topical"}

    async def test_a_topic_of_a_pattern_that_is_made_anew_is_read_from_its_begin(self):
        """The commit before the former topic was given up reached the new one, whose first records nobody got."""
        async with FakeCluster(t=1, other=1) as cluster:
            fill(cluster, "t", 0, 20)
            async with consumer(cluster, group_id="g", enable_auto_commit=True, metadata_max_age_ms=20) as consuming:
                consuming.subscribe(pattern="t|other")
                await read(consuming, 20)
                del cluster.topics["t"]
                await until(lambda: consuming.subscription() == {"other"})
                cluster.create("t", 1)
                fill(cluster, "t", 0, 30)
                assert await read(consuming, 30) == list(range(30))

    async def test_the_leader_deals_anew_when_a_topic_grows(self):
        async with FakeCluster(t=1) as cluster:
            consuming = consumer(cluster, "t", group_id="g", metadata_max_age_ms=20)
            async with consuming:
                await until(lambda: consuming.assignment() == {T0}, consuming)
                cluster.topics["t"].append(type(cluster.topics["t"][0])(1))
                await until(lambda: consuming.assignment() == {T0, T1}, consuming)

    async def test_heartbeats_go_on_while_the_application_works(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, "t", 0, 1)
            async with consumer(cluster, "t", group_id="g", fetch_max_wait_ms=120_000) as consuming:
                await read(consuming, 1)
                before = len(cluster.sent(HeartbeatRequest))
                # Long before the fetch that waits for data is answered.
                await until(lambda: len(cluster.sent(HeartbeatRequest)) >= before + 4)

    async def test_unsubscribing_leaves_the_group(self):
        async with FakeCluster(t=1) as cluster, consumer(cluster, "t", group_id="g") as consuming:
            await until(lambda: consuming.assignment(), consuming)
            await consuming.unsubscribe()
            assert cluster.sent(LeaveGroupRequest)
            assert not consuming.assignment()
            consuming.assign([T0])
            fill(cluster, "t", 0, 1)
            assert await read(consuming, 1) == [0]


@pytest.mark.parametrize(("size", "is_read"), [(90_000, True), (110_000, False)])
async def test_a_batch_may_decompress_to_as_much_as_a_response_may_have(size, is_read, monkeypatch):
    monkeypatch.setattr(fetcher_module, "DEFAULT_MAX_BYTES", 1000)
    async with FakeCluster(t=1) as cluster, consumer(cluster, "t", receive_message_max_bytes=100_000) as consuming:
        cluster.topics["t"][0].append(bytes(encode_batch([(1000, None, bytes(size), ())], compression=GZIP)))
        async with asyncio.timeout(PATIENCE_S):
            if is_read:
                assert sum(map(len, (await consuming.poll(PATIENCE_S * 1000)).values())) == 1
            else:
                with pytest.raises(KafkaError, match="t-0: batch at offset 0: gzip: decompresses to more than 100000"):
                    await consuming.poll(PATIENCE_S * 1000)
