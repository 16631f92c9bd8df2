"""What a fetch by topic id is told of a topic that is deleted: the answers of Kafka 4.3.1 to the same requests.

An id that was known when the session or the waiting fetch began is looked up by its name from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.broker.test_node import produce, produced
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from tidelog.protocol.messages.produce import ProduceResponse

# Of a test's patience, so that an answer says that the deletion ended the wait.
NEVER_MS = 600_000


def fetch(topic_id: bytes | None, *, session: tuple[int, int] = (0, -1), wait_ms: int = 0) -> FetchRequest:
    """`session`: its id and the epoch of this request. A topic id of None: what the session has."""
    asked = [FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)]
    return FetchRequest(
        max_wait_ms=wait_ms,
        min_bytes=1,
        max_bytes=1 << 20,
        session_id=session[0],
        session_epoch=session[1],
        topics=[] if topic_id is None else [FetchTopic(topic_id=topic_id, partitions=asked)],
    )


async def answered(wire: Any, request: FetchRequest, version: int) -> FetchResponse:
    answer: FetchResponse = await asyncio.wait_for(wire.call(request, version, FetchResponse), PATIENCE_S)
    assert answer.error_code == ErrorCode.NONE
    return answer


def codes(answer: FetchResponse) -> list[int]:
    return [each.error_code for topic in answer.responses for each in topic.partitions]


async def delete(wire: Any, name: str) -> None:
    request = DeleteTopicsRequest(topic_names=[name], timeout_ms=60_000)
    answer = await wire.call(request, 5, DeleteTopicsResponse)
    assert answer.responses[0].error_code == ErrorCode.NONE


@pytest.mark.parametrize("version", [13, 18])
async def test_a_session_looks_for_the_name_of_a_deleted_topic(wire: Any, version: int) -> None:
    topic_id = await wire.create_topic("t")
    opened = await answered(wire, fetch(topic_id, session=(0, 0)), version)
    assert codes(opened) == [ErrorCode.NONE]
    await delete(wire, "t")
    for epoch in (1, 2):
        answer = await answered(wire, fetch(None, session=(opened.session_id, epoch)), version)
        assert codes(answer) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    await wire.create_topic("t")
    for epoch in (3, 4):
        answer = await answered(wire, fetch(None, session=(opened.session_id, epoch)), version)
        assert codes(answer) == [ErrorCode.INCONSISTENT_TOPIC_ID]
    assert codes(await answered(wire, fetch(topic_id, session=(0, 0)), version)) == [ErrorCode.UNKNOWN_TOPIC_ID]


async def test_a_session_that_has_marked_new_records_looks_for_the_name_of_a_deleted_topic(
    wire: Any, make_batch: Callable[..., bytes]
) -> None:
    topic_id = await wire.create_topic("t")
    opened = await answered(wire, fetch(topic_id, session=(0, 0)), 13)
    assert produced(await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse))[0][0] == 0
    await delete(wire, "t")
    answer = await answered(wire, fetch(None, session=(opened.session_id, 1)), 13)
    assert codes(answer) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]


async def test_a_fetch_that_waits_is_told_that_the_name_is_gone(running: Any, wire: Any) -> None:
    topic_id = await wire.create_topic("t")
    waiting = asyncio.create_task(answered(wire, fetch(topic_id, wait_ms=NEVER_MS), 13))
    other = await running.connect()
    partition = running.node._broker.partitions.find("t", 0)
    async with asyncio.timeout(PATIENCE_S):
        while not partition.watch.fetches:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await delete(other, "t")
    assert codes(await asyncio.wait_for(waiting, PATIENCE_S)) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]


async def test_an_id_that_was_never_known_is_unknown_also_in_a_session(wire: Any) -> None:
    opened = await answered(wire, fetch(b"\7" * 16, session=(0, 0)), 13)
    again = await answered(wire, fetch(None, session=(opened.session_id, 1)), 13)
    assert [codes(opened), codes(again)] == [[ErrorCode.UNKNOWN_TOPIC_ID]] * 2
