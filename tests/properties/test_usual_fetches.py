"""The short way for a consumer's fetch of one partition answers, byte for byte, what the general way answers.

Each request goes both ways on a log with batches of all kinds, some in older segments, some damaged, cut by something
else, above the high watermark, or of producers. Where the short way leaves a request to the general way there is
nothing to compare but that it changed nothing.
"""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.replication.replicas import TOPIC_ID, Replicas
from tidelog.broker.apis.records import fetch
from tidelog.broker.network.request import Deferred
from tidelog.protocol.hot import REPLICA_STATE_FROM, decode_one_fetch
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic, ForgottenTopic


def request(rng: random.Random, log: Any, version: int) -> FetchRequest:
    asked = FetchPartition(
        partition=rng.choice((0, 0, 0, 0, 1)),
        current_leader_epoch=rng.choice((-1, -1, 0, 1, 2)),
        fetch_offset=rng.choice((log.log_end_offset, rng.randint(-1, log.log_end_offset + 1))),
        last_fetched_epoch=rng.choice((-1, -1, -1, -1, 0)) if version >= 12 else -1,
        partition_max_bytes=rng.choice((0, 100, 1 << 20, 1 << 20)),
    )
    topic = FetchTopic(
        topic=rng.choice(("t", "t", "t", "u")), topic_id=rng.choice((TOPIC_ID, TOPIC_ID, bytes(16))), partitions=[asked]
    )
    return FetchRequest(
        replica_id=rng.choice((-1, -1, -1, -3)) if version < REPLICA_STATE_FROM else -1,
        max_wait_ms=rng.choice((0, 0, -1, 500)),
        min_bytes=rng.choice((0, 1, 1, 1000)),
        max_bytes=rng.choice((0, 300, 1 << 20)),
        isolation_level=rng.choice((0, 1)),
        session_epoch=rng.choice((-1, -1, -1, 0)),
        topics=[topic, topic] if rng.random() < 0.1 else [topic],
        forgotten_topics_data=[ForgottenTopic(topic_id=TOPIC_ID, partitions=[0])] if rng.random() < 0.1 else [],
        rack_id=rng.choice(("", "", "", "here")),
    )


def answered(node: Any, version: int, body: bytes, bytes_out: Any) -> Any:
    before = bytes_out()
    answer = node.serve(fetch.API_KEY, version, memoryview(body))
    node.partitions.fetch_sessions._sessions.clear()
    if isinstance(answer, Deferred):
        if answer.on_abandon is not None:
            answer.on_abandon()
        return "waits"
    frame = b"".join(answer) if isinstance(answer, list) else bytes(answer)
    return frame[:14] + frame[18:], bytes_out() - before  # without the session's id, which is random


@given(st.integers(0, 2**32))
def test_the_short_way_and_the_general_way_agree(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Replicas(1)
    cluster.flush()
    cluster.loop.run_for(1)
    node = cluster.nodes[1]
    log = node.partition.log
    sequence = 0
    short = 0

    def bytes_out() -> int:
        found: int = node.partition.watch.traffic.bytes_out
        return found

    for _ in range(25):
        for _ in range(rng.randint(0, 2)):
            values = [bytes(rng.choice((0, 100, 130, 5000))) for _ in range(rng.randint(1, 3))]
            if rng.random() < 0.3:
                assert node.produce(*values, producer_id=7, producer_epoch=0, base_sequence=sequence).code == 0
                sequence += len(values)
            else:
                assert node.produce(*values).code == 0
        what = rng.random()
        if what < 0.1:
            log.roll(node.clock_ms())
        elif what < 0.15:
            log.segments.active.distrust()
        elif what < 0.2:
            log.delete_records(rng.randint(log.log_start_offset, log.high_watermark))
        elif what < 0.25 and log.log_end_offset:
            log.high_watermark = max(log.log_start_offset, log.log_end_offset - 1)
        elif what < 0.3:
            log.segments.active.file.truncate(rng.randint(0, log.segments.active.size_bytes))
        elif what < 0.35 and log.segments.active.size_bytes:  # so long ago that it is looked at again, and wrong
            segment = log.segments.active
            segment.age_trust()
            node.produce(b"x")
            segment.age_trust()
            position = rng.randrange(segment.size_bytes)
            byte = segment.file.read_at(1, position)
            segment.file.write_at(bytes((byte[0] ^ 1,)) if byte else b"", position)
        for _ in range(6):
            version = rng.choice((11, 12, 12, 13, 15, 16, 17, 18))
            body = request(rng, log, version).encode(version)
            # The short way first: the general way finds damage, and remembers it.
            one = decode_one_fetch(memoryview(body), version)
            before = bytes_out()
            frame = None if one is None else fetch._serve_usual(node.services, one, 1)
            sent_bytes = bytes_out() - before
            with patch.object(fetch, "decode_one_fetch", lambda *_: None):
                general = answered(node, version, body, bytes_out)
            if frame is not None:
                short += 1
                joined = b"".join(frame) if isinstance(frame, list) else frame
                assert (joined[:14] + joined[18:], sent_bytes) == general
                assert answered(node, version, body, bytes_out) == general
    assert short > 0 or log.log_end_offset == 0
