"""Raw fetches of every position of a replica: what a client that checks nothing would be given.

Every batch is asked for by its first and by its last offset. An answer must begin with the batch that holds the offset,
whole; an answer without records below the end, or with an error, is reported as such.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tests.cluster.damage.replicas import Batch, parse_batches
from tidelog.bench.frames import fetch, read_fetch_answer
from tidelog.bench.raw import BenchError, RawConnection

NOT_LEADER_OR_FOLLOWER = 6
ANSWER_BYTES = 1


@dataclass(slots=True)
class Walk:
    """`errors` are error codes met and overcome; `damaged` are answers with batches that are not whole; `wrong` is what
    no check of the client's would notice.
    """

    partition: int
    position: int = 0
    high_watermark: int = -1
    errors: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    stuck: str = ""
    not_served: bool = False


def walk(port: int, topic: str, partition: int, timeout_s: float = 15.0) -> Walk:
    """From offset 0 to the high watermark that this node tells, patient with errors until the time is up."""
    state = Walk(partition)
    deadline = time.monotonic() + timeout_s
    correlation = 0
    connection: RawConnection | None = None
    asked = "first"
    last = 0
    while not state.not_served:
        offset = state.position if asked == "first" else last
        correlation += 1
        try:
            connection = connection or RawConnection(port, 5.0)
            connection.send(fetch(topic, {partition: offset}, correlation, max_wait_ms=0, max_bytes=ANSWER_BYTES))
            answer = bytes(connection.receive())  # a view would keep the buffer from growing for the next answer
            found = read_fetch_answer(answer)
            records = bytes(answer[found.records_at : found.records_at + found.records_size_bytes])
        except (OSError, BenchError) as error:
            if connection is not None:
                connection.close()
                connection = None
            if time.monotonic() > deadline:
                state.stuck = f"at {offset}: {error!r}"
                break
            time.sleep(0.05)
            continue
        if found.error_code == 0:
            state.high_watermark = found.high_watermark
            if state.position >= found.high_watermark and asked == "first":
                break
        if found.error_code != 0 or not records:
            state.errors.append(found.error_code)
            state.not_served = found.error_code == NOT_LEADER_OR_FOLLOWER and len(state.errors) > 20
            if time.monotonic() > deadline:
                state.stuck = f"at {offset} of {found.high_watermark}: error {found.error_code}, no records"
                break
            time.sleep(0.02)
            continue
        faults: list[str] = []
        batches = parse_batches(records, f"partition {partition} at {offset}", faults)
        if batches:
            last, asked = _check(state, batches[0], offset, asked)
        else:
            # Nothing that a client that checks could take: it asks again, as we do.
            state.damaged += faults
            if time.monotonic() > deadline:
                state.stuck = f"at {offset} of {found.high_watermark}: {faults}"
                break
            time.sleep(0.1)
    if connection is not None:
        connection.close()
    return state


def _check(state: Walk, batch: Batch, offset: int, asked: str) -> tuple[int, str]:
    """What is asked for next: the last offset of the batch that came, then the one behind it."""
    if not batch.base_offset <= offset < batch.next_offset or (asked == "first" and batch.base_offset != offset):
        state.wrong.append(
            f"partition {state.partition}: asked for {offset}, got {batch.base_offset} to {batch.next_offset - 1}"
        )
    if asked == "first" and batch.next_offset - 1 > offset:
        return batch.next_offset - 1, "last"
    state.position = max(offset + 1, batch.next_offset)
    return offset, "first"
