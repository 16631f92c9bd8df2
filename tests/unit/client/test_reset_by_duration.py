"""`auto_offset_reset=by_duration:...` (KIP-1106): from the first record that is not older."""

from __future__ import annotations

import time

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import SILENCE, FakeCluster, FakeNode
from tests.unit.client.test_consumer import T0, T1, consumer, read, until
from tidelog.client import ConfigError, Consumer
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.list_offsets import ListOffsetsRequest, ListOffsetsResponse


def fill(cluster: FakeCluster, *ages_s: int) -> None:
    """A batch of one record for each age."""
    log = cluster.topics["t"][0]
    for age_s in ages_s:
        timestamp_ms = round((time.time() - age_s) * 1000)
        log.append(bytes(encode_batch([(timestamp_ms, None, b"%d" % log.end_offset, ())])))
    cluster.appended.set()


@pytest.mark.parametrize(
    ("duration", "first"), [("PT1H", 2), ("P1DT-1S", 2), ("PT36H", 1), ("P3650000D", 0), ("PT30,5S", 3)]
)
async def test_it_reads_from_the_first_record_that_is_not_older(duration: str, first: int):
    async with FakeCluster(t=1) as cluster:
        fill(cluster, 10**6, 10**5, 1_000, 10)
        async with consumer(cluster, auto_offset_reset=f"by_duration:{duration}", group_id="g") as consuming:
            consuming.assign([T0])
            assert await read(consuming, 4 - first) == list(range(first, 4))
            consuming.seek(T0, 99)
            assert await read(consuming, 4 - first) == list(range(first, 4))


async def test_it_begins_at_the_end_where_all_records_are_older_and_misses_none_that_comes_meanwhile():
    async with FakeCluster(t=1) as cluster:
        fill(cluster, 1000, 1000)

        def find(request: ListOffsetsRequest, node: FakeNode) -> ListOffsetsResponse:
            response = node.on_list_offsets(request)
            assert isinstance(response, ListOffsetsResponse)
            fill(cluster, 0)  # between one answer and the next question
            return response

        cluster.script(ListOffsetsRequest, find, find)
        async with consumer(cluster, auto_offset_reset="by_duration:PT1M") as consuming:
            consuming.assign([T0])
            assert await read(consuming, 2) == [2, 3]
        async with consumer(cluster, auto_offset_reset="by_duration:PT0S") as consuming:
            consuming.assign([T0])
            assert await consuming.position(T0) == 4
            await until(lambda: consuming.lag(T0) == 0, consuming)


async def test_a_leader_that_does_not_answer_does_not_keep_partitions_of_others_from_being_read():
    async with FakeCluster(t=2, nodes=2) as cluster:
        fill(cluster, 10, 10)
        first = cluster.topics["t"][0].leader
        assert cluster.topics["t"][1].leader != first

        def find(request: ListOffsetsRequest, node: FakeNode) -> object:
            return node.on_list_offsets(request) if node.node_id == first else SILENCE

        cluster.script(ListOffsetsRequest, find, find, find)
        async with consumer(cluster, auto_offset_reset="by_duration:PT1H", request_timeout_ms=100_000) as consuming:
            consuming.assign([T0, T1])
            assert await read(consuming, 2, timeout_s=PATIENCE_S) == [0, 1]


async def test_an_end_that_the_leader_does_not_know_yet_is_asked_for_again_after_a_pause():
    async with FakeCluster(t=1) as cluster:
        fill(cluster, 1000)

        def refuse_end(request: ListOffsetsRequest, node: FakeNode) -> object:
            response = node.on_list_offsets(request)
            assert isinstance(response, ListOffsetsResponse)
            [answer] = response.topics[0].partitions
            if answer.offset >= 0:
                answer.error_code, answer.offset = ErrorCode.OFFSET_NOT_AVAILABLE, -1
            return response

        cluster.script(ListOffsetsRequest, *[refuse_end] * 10_000)
        async with consumer(cluster, auto_offset_reset="by_duration:PT1M", retry_backoff_ms=100) as consuming:
            consuming.assign([T0])
            await consuming.poll(500)
            assert 1 <= len(cluster.sent(ListOffsetsRequest)) <= 20
            cluster.scripts[ListOffsetsRequest].clear()
            assert await consuming.position(T0) == 1


@pytest.mark.parametrize(
    "policy", ["by_duration", "by_duration:", "by_duration:1h", "by_duration:-PT1S", "By_Duration:PT1S"]
)
def test_what_is_no_duration_is_refused(policy: str):
    with pytest.raises(ConfigError, match="auto_offset_reset must be one of earliest, latest, none, by_duration:P"):
        Consumer("t", auto_offset_reset=policy)
