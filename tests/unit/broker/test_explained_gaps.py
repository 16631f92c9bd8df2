"""Offsets that a leader does not have: taken from a replica in sync that has them. Accepted once the replicas in sync
say that they lack them, too, and remembered.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.patience import until
from tests.unit.storage.batches import NOW, Logs, batch
from tidelog.broker.replicas.repairs import REPAIR_REPLICA_ID, Repairs
from tidelog.protocol.batches.record_batch import check_crc, iter_headers
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.fetch import FetchableTopicResponse, FetchResponse, PartitionData
from tidelog.replication.controller.metadata.image import PartitionImage
from tidelog.replication.ports import Endpoint, PeerUnreachable
from tidelog.storage.log import explained_gaps
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.append import UnexplainedGap
from tidelog.storage.segments.log_config import LogConfig

TOPIC_ID = b"t" * 16
LACKS = bytes(batch(1, base_offset=7))
HAS = bytes(batch(1, base_offset=3)) + LACKS
DEAD = None
SHORT = ErrorCode.OFFSET_OUT_OF_RANGE
NOTHING = b""
BEHIND = object()
"""The answer of a replica whose log ends behind the gap."""


class Replica:
    """Broker 1, which follows broker 2 and misses offsets 2 to 7; `answers` of the other replicas by their ids."""

    def __init__(self, answers: dict[int, Any], in_sync: tuple[int, ...]) -> None:
        self.answers = answers
        self.log_starts: dict[int, int] = {}
        self.asked: list[int] = []
        self.explained = 0
        self.taken: list[int] = []
        self.log = SimpleNamespace(
            damaged_ranges=list, explain_gaps=self.explain, log_end_offset=2, clock_ms=0, failure=None,
            log_start_offset=0, reveal=lambda: None,
        )  # fmt: skip
        self.partition: Any = Mock(topic="t", index=0, topic_id=TOPIC_ID, log=self.log, offline=False, leads=False)
        self.partition.append_as_follower = self.append
        placed = PartitionImage((1, *answers), in_sync, in_sync[0])
        topics = {TOPIC_ID: SimpleNamespace(partitions={0: placed})}
        partitions: Any = SimpleNamespace(find=lambda topic, index: self.partition, flushes=Mock())
        image: Any = SimpleNamespace(topics_by_id=topics)
        self.repairs = Repairs(
            1, partitions, lambda: image, lambda broker_id: Endpoint("node", broker_id), self.exchange,
            asyncio.get_running_loop(), lambda work: asyncio.get_running_loop().run_in_executor(None, work),
        )  # fmt: skip

    def explain(self, end_offset: int) -> None:
        self.explained = end_offset

    def append(self, batches: memoryview, now_ms: int) -> None:
        for at, header in iter_headers(batches):
            assert header.base_offset == self.log.log_end_offset or header.base_offset <= self.explained
            assert check_crc(batches, at, header)
            self.taken.append(header.base_offset)
            self.log.log_end_offset = header.next_offset

    async def exchange(self, endpoint: Endpoint, request: Any, version: int, **_: Any) -> Any:
        answer = self.answers[endpoint.port]
        if isinstance(answer, dict):  # by whether uncommitted records are asked for
            answer = answer[request.replica_id == REPAIR_REPLICA_ID]
        self.asked.append(endpoint.port)
        if answer is DEAD:
            raise PeerUnreachable("nobody listens")
        offset = request.topics[0].partitions[0].fetch_offset
        if answer is BEHIND or answer == NOTHING:
            answer = SHORT if answer == NOTHING and offset > self.log.log_end_offset else NOTHING
        log_start = self.log_starts.get(endpoint.port, 0)
        if offset < log_start:
            answer = SHORT
        is_error = isinstance(answer, ErrorCode)
        first = [] if is_error else [at for at, header in iter_headers(answer) if header.next_offset > offset]
        data = PartitionData(
            partition_index=0, error_code=answer if is_error else 0, high_watermark=9,
            records=None if is_error else answer[first[0] :] if first else b"", log_start_offset=log_start,
        )  # fmt: skip
        return FetchResponse(responses=[FetchableTopicResponse(topic_id=TOPIC_ID, partitions=[data])])

    async def explains(self) -> bool:
        """Whether all that the leader lacks counts as compacted."""
        self.repairs.report_gap(self.partition, UnexplainedGap(2, 7))
        await until(lambda: not self.repairs._queue.waiting)
        await self.repairs.close()
        return self.explained == 7


@pytest.mark.parametrize("other", [LACKS, DEAD, SHORT, NOTHING], ids=["lacks", "dead", "short", "nothing"])
async def test_what_the_leader_lacks_is_taken_for_compacted_whatever_is_not_in_sync(other: Any) -> None:
    """A new replica that waits for the same, or a dead broker that is being replaced, would hold it up for ever."""
    assert await Replica({2: LACKS, 3: other}, in_sync=(2,)).explains()


@pytest.mark.parametrize("other", [DEAD, SHORT, NOTHING], ids=["dead", "short", "nothing"])
async def test_what_the_leader_lacks_is_not_taken_while_a_replica_in_sync_may_have_it(other: Any) -> None:
    assert not await Replica({2: LACKS, 3: other}, in_sync=(2, 3)).explains()


@pytest.mark.parametrize(
    ("log_start", "other", "taken"),
    [(3, HAS, [3, 7]), (5, LACKS, [7]), (7, LACKS, []), (9, NOTHING, [])],
    ids=["in the gap", "in the rest of the gap", "at its end", "behind it"],
)
async def test_what_retention_has_deleted_on_a_replica_in_sync_is_not_waited_for(
    log_start: int, other: bytes, taken: list[int]
) -> None:
    """A new replica waited at its first gap until the leader's retention had come as far."""
    replica = Replica({2: LACKS, 3: other}, in_sync=(2, 3))
    replica.log_starts[3] = log_start
    assert (await replica.explains(), replica.taken) == (True, taken)


async def test_what_a_replica_in_sync_has_is_taken_from_it_and_what_none_has_for_compacted() -> None:
    """The follower of a topic that is not compacted any more waited for ever where one replica was cleaned later."""
    three, four, five = (bytes(batch(1, base_offset=offset)) for offset in (3, 4, 5))
    replica = Replica({2: LACKS, 3: three + LACKS, 4: four + five + LACKS}, in_sync=(2, 3, 4))
    assert await replica.explains()
    assert replica.taken == [3, 4, 5, 7]


def records(*offsets: int) -> bytes:
    return b"".join(bytes(batch(1, base_offset=offset)) for offset in offsets)


DAMAGED = records(7)[:-1] + b"?"
THINNED = (7, 8, 10, 12, 15)


@pytest.mark.parametrize(
    ("others", "in_sync", "taken", "explained"),
    [
        ([THINNED], (2,), [7, 8, 10, 12, 15], 15),
        ([THINNED, THINNED], (2, 3), [7, 8, 10, 12, 15], 15),
        ([THINNED, (8, 9, 15)], (2, 3), [7, 8, 9, 10, 12, 15], 15),
        ([THINNED, (7, 10)], (2, 3), [7, 8, 10], 10),
        ([THINNED, (7, 8, 9, 10, 12)], (2,), [7, 8], 7),
        ([THINNED, (7, 10, 12)], (2,), [7, 8, 10, 12], 12),
        ([(7, 8, 9, 10)], (2,), [7, 8, 9, 10], 7),
        ([THINNED, None], (2,), [7, 8, 10, 12, 15], 15),
    ],
    ids=[
        "leader",
        "two",
        "another one has more",
        "shorter",
        "outsider has more",
        "outsider has less",
        "one gap",
        "dead",
    ],
)
async def test_one_round_of_requests_explains_the_gaps_behind_too(
    others: list[tuple[int, ...] | None], in_sync: tuple[int, ...], taken: list[int], explained: int
) -> None:
    """Each of them was asked for on its own: a follower of a topic that was compacted once needed hours for a million
    of them. What the replicas in sync have is taken, up to where one of them is at its end, or another one has more.
    """
    answers = {2 + n: DEAD if offsets is None else records(*offsets) for n, offsets in enumerate(others)}
    replica = Replica(answers, in_sync)
    await replica.explains()
    assert (replica.taken, replica.explained, replica.asked) == (taken, explained, list(answers))


async def test_nothing_behind_the_gap_is_taken_where_a_replica_in_sync_has_not_come_that_far() -> None:
    replica = Replica({2: records(*THINNED), 3: BEHIND}, (2, 3))
    assert (await replica.explains(), replica.taken) == (True, [])


async def test_nothing_is_taken_where_batches_overlap() -> None:
    replica = Replica({2: LACKS, 3: bytes(batch(3, base_offset=1)) + LACKS}, (2, 3))
    assert (await replica.explains(), replica.taken, replica.explained) == (False, [], 0)


async def test_a_log_that_starts_inside_a_batch_takes_the_whole_batch() -> None:
    """DeleteRecords had moved the start there: a new follower waited for the batch, which the leader lacks."""
    replica = Replica({2: LACKS, 3: bytes(batch(3, base_offset=1)) + LACKS}, (2, 3))
    replica.log.log_start_offset = replica.log.log_end_offset
    assert (await replica.explains(), replica.taken) == (True, [1, 7])


@pytest.mark.parametrize("others", [(2, 3), (3, 2)])
@pytest.mark.parametrize(
    ("behind", "taken", "explained"), [(records(7), [3, 4, 7, 8], 7), (DAMAGED, [3, 4], 3)], ids=["one", "all"]
)
async def test_a_damaged_copy_keeps_no_sound_one_away(
    others: tuple[int, ...], behind: bytes, taken: list[int], explained: int
) -> None:
    """The follower refused all that was merged, after the gaps behind it were explained: it then took the batches of
    the leader without the records before them that another replica in sync has, or waited without end.
    """
    answers = {2: behind + records(8), 3: records(3, 4) + DAMAGED + records(8)}
    replica = Replica({each: answers[each] for each in others}, (2, 3))
    await replica.explains()
    assert (replica.taken, replica.explained) == (taken, explained)


@pytest.mark.parametrize("is_full", [False, True], ids=["files can be written", "full"])
async def test_the_gaps_of_records_that_could_not_be_appended_are_not_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """Once the volume had space, the follower took the leader's batches without the records before them."""
    made = Logs(tmp_path, LogConfig())
    made.append(batch(2))
    replica = Replica({2: records(7, 9), 3: records(3, 4, 7, 9)}, (2, 3))
    replica.partition.log = made.log
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def append(batches: memoryview, now_ms: int) -> None:
        if is_full:
            monkeypatch.setattr(explained_gaps, "replace_file", Mock(side_effect=full))
        raise full

    replica.partition.append_as_follower = append
    with pytest.raises(OSError, match=full.strerror):
        await replica.repairs._explain(replica.partition, 2, 7)
    monkeypatch.undo()
    with pytest.raises(UnexplainedGap):
        made.log.append_as_follower(batch(1, base_offset=7, leader_epoch=0), NOW)
    made.close()
    assert made.open().gaps_explained_below <= 2


async def test_no_gap_is_explained_behind_records_that_a_loss_of_power_took(tmp_path: Path) -> None:
    """`explained-gaps` was on the device before them: the follower missed what only another replica in sync has."""
    made = Logs(tmp_path, LogConfig())
    made.append(batch(2))
    made.log.flush()
    path = made.folder / made.files("*.log")[0]
    size_bytes = path.stat().st_size
    replica = Replica({2: records(7, 9), 3: records(3, 4, 7, 9)}, (2, 3))
    replica.partition.log = made.log
    replica.partition.append_as_follower = lambda batches, now_ms: made.log.append_as_follower(batches, now_ms)
    await replica.repairs._explain(replica.partition, 2, 7)
    assert (made.log.log_end_offset, made.log.gaps_explained_below) == (10, 9)
    made.kill()
    os.truncate(path, size_bytes)
    log = made.open()
    assert log.log_end_offset == 2
    with pytest.raises(UnexplainedGap):
        log.append_as_follower(batch(1, base_offset=7, leader_epoch=0), NOW)


@pytest.mark.parametrize(
    "cut", [lambda log: log.truncate_to(2), lambda log: log.truncate_fully_and_start_at(2)], ids=["cut", "emptied"]
)
def test_no_gap_is_explained_behind_the_end_of_a_log_that_was_cut(
    tmp_path: Path, cut: Callable[[PartitionLog], None]
) -> None:
    """A follower took the batches of the next leader without those that only another replica in sync has."""
    made = Logs(tmp_path, LogConfig())
    made.append(batch(2))
    made.log.explain_gaps(7, sync=False)
    made.log.append_as_follower(batch(1, base_offset=7, leader_epoch=0), NOW)
    cut(made.log)
    with pytest.raises(UnexplainedGap):
        made.log.append_as_follower(batch(1, base_offset=7, leader_epoch=1), NOW)
    made.log.flush()
    assert (made.log.gaps_explained_below, made.log.unsynced_gaps_below) == (2, 0)


@pytest.mark.parametrize("change", ["leads", "next leader", "moved on", "deleted"])
async def test_nothing_is_taken_when_the_replica_is_another_after_the_answers(change: str) -> None:
    replica = Replica({2: LACKS, 3: HAS}, in_sync=(2, 3))
    exchange = replica.repairs._exchange

    async def changing(*arguments: Any, **options: Any) -> Any:
        if change == "leads":
            replica.partition.leads = True
        elif change == "next leader":
            replica.partition.leader_epoch = object()
        elif change == "deleted":
            replica.log.failure = "was deleted"
        else:
            replica.log.log_end_offset = 4
        return await exchange(*arguments, **options)

    replica.repairs._exchange = changing
    assert not await replica.explains()
    assert (replica.taken, replica.explained) == ([], 0)


async def test_what_the_leader_lacks_is_not_taken_when_a_replica_that_has_it_says_so() -> None:
    replica = Replica({2: LACKS, 3: HAS}, in_sync=(2,))
    assert not await replica.explains()
    assert (replica.asked, replica.taken) == ([2, 3], [])


@pytest.mark.parametrize("in_sync", [(1,), (1, 2)])
async def test_a_leader_that_does_not_answer_explains_nothing(in_sync: tuple[int, ...]) -> None:
    assert not await Replica({2: DEAD, 3: SHORT}, in_sync).explains()


@pytest.mark.parametrize(
    ("uncommitted", "explains"),
    [(BEHIND, True), (LACKS, True), (NOTHING, False), (HAS, False), (SHORT, False), (DEAD, False)],
    ids=["behind", "lacks", "nothing", "has", "short", "dead"],
)
@pytest.mark.parametrize("node", [2, 3], ids=["leader", "follower"])
async def test_what_a_replica_in_sync_lacks_before_the_end_of_its_log_is_taken_for_compacted(
    node: int, uncommitted: Any, explains: bool
) -> None:
    """Its log ends behind the gap, or has only uncommitted records there, which wait for this follower: it was never
    explained, and where the followers that are left are too few, nothing could be written any more.
    """
    answers = {2: LACKS, 3: LACKS, node: {False: NOTHING, True: uncommitted}}
    assert await Replica(answers, in_sync=(2, 3)).explains() == explains
