"""Builds the answers for followers: records of dirty partitions, errors and high watermarks, or no answer yet.

Also updates the session with what each answer carries. `follower_fetches.py` decides which fetches wait and for how
long. Invariant: a partition with news in an answer is in flight until the follower mentions it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidelog.broker.replicas.fetching.follower_sessions import FollowerEntry, FollowerSession, HostedReplicas
from tidelog.protocol.hot import Buffer, FetchedPartition, encode_fetch_response, neighbours
from tidelog.protocol.hot_replication import VERSION, encode_one_fetched, readdress
from tidelog.replication.throttle import Throttle
from tidelog.storage.log.explained_gaps import read_for_copy
from tidelog.storage.segments.reader import ColdRead

if TYPE_CHECKING:
    from tidelog.replication.partition import Partition

RESPONSE_BYTES_MAX = 2 * 1024 * 1024

Frames = bytes | bytearray | list[Buffer]


class Tail:
    """The last records of a partition, kept in memory, because several followers fetch the same records in turn.

    Cleared whenever the replica changes its role, because its log may change then.
    """

    __slots__ = ("_frame", "_frame_key", "_records", "end_offset", "offset")

    def __init__(self) -> None:
        self.offset = self.end_offset = -1
        self._records: bytes = b""
        self._frame_key = (-1, -1, -1, -1)
        self._frame = b""

    def appended(self, offset: int, end_offset: int, records: bytes) -> None:
        """The records from `offset` to `end_offset` have just been written to the log."""
        self.offset, self.end_offset, self._records = offset, end_offset, records

    def clear(self) -> None:
        self.offset = self.end_offset = -1
        self._frame_key = (-1, -1, -1, -1)

    def frame(
        self, partition: Partition, offset: int, max_bytes: int, session_id: int, correlation_id: int
    ) -> tuple[Frames, int]:
        """The answer with the records from `offset` on, and the size of these records. Raises the errors of a read."""
        log = partition.log
        end_offset, high_watermark = log.log_end_offset, log.high_watermark
        key = (offset, end_offset, high_watermark, max_bytes)
        if key == self._frame_key:
            return readdress(self._frame, correlation_id, session_id), len(self._frame)
        if offset == self.offset and end_offset == self.end_offset and len(self._records) <= max_bytes:
            regions: list[Buffer] = [self._records]
            size_bytes = len(self._records)
        else:
            regions, size_bytes, _ = log.read(offset, max_bytes, end_offset)  # type: ignore[assignment]
        frame = encode_one_fetched(
            correlation_id, session_id, partition.topic_id, partition.index, high_watermark, log.last_stable_offset,
            log.log_start_offset,
            regions, size_bytes,
        )  # fmt: skip
        if size_bytes and type(frame) is bytes:
            self._frame_key, self._frame = key, frame
        return frame, size_bytes


class FollowerAnswers:
    """Calls `wake(session)` when a throttled partition may be sent again."""

    def __init__(
        self,
        partitions: HostedReplicas,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[FollowerSession], None],
        tells_high_watermark: bool = False,
    ) -> None:
        self.throttle = Throttle()
        self.bytes_out = 0
        """Size of the record batches sent to followers since the start."""
        self.errors: dict[int, int] = {}
        """Error code -> how often followers received it."""
        self._partitions = partitions
        self._loop = loop
        self._wake = wake
        self._tells_high_watermark = tells_high_watermark

    def frames(
        self, session: FollowerSession, correlation_id: int, version: int, must_answer: bool, is_full: bool = False
    ) -> Frames | None:
        """The answer with the news of the dirty partitions; None when there is not enough yet. Raises ColdRead."""
        if len(session.dirty) == 1 and version == VERSION and session.min_bytes <= 1 and session.id:
            (entry,) = session.dirty
            partition = entry.partition
            if entry.problem is None and partition is not None and not partition.throttled_as_leader:
                max_bytes = entry.max_bytes if entry.max_bytes < RESPONSE_BYTES_MAX else RESPONSE_BYTES_MAX
                tail: Tail = partition.watch.tail
                try:
                    frame, size_bytes = tail.frame(partition, entry.fetch_offset, max_bytes, session.id, correlation_id)
                except ColdRead:
                    raise
                except Exception as error:
                    entry.problem = self._partitions.refusal(partition, error).code
                else:
                    if size_bytes:
                        self.bytes_out += size_bytes
                        del session.dirty[entry]
                        entry.sent_high_watermark = partition.log.high_watermark
                        entry.in_flight = True
                        session.in_flight[entry] = None
                        session.linger.sent(size_bytes, session.last_fetch_ms)
                        return frame
        return self._frames_of_many(session, correlation_id, version, must_answer, is_full)

    def _frames_of_many(
        self, session: FollowerSession, correlation_id: int, version: int, must_answer: bool, is_full: bool
    ) -> Frames | None:
        budget_bytes = min(max(session.max_bytes, 0), RESPONSE_BYTES_MAX)
        answered: list[tuple[FollowerEntry, FetchedPartition]] = []
        total_bytes = 0
        must_answer = must_answer or bool(session.refused)
        tells_marks = self._tells_high_watermark and session.id != 0
        for entry in list(session.dirty):
            is_held_back = self._is_held_back(entry)
            if is_held_back and not is_full:
                del session.dirty[entry]
                session.held_back[entry] = None
                continue
            left_bytes = budget_bytes - total_bytes
            if left_bytes <= 0 and total_bytes and not is_full:
                break
            max_bytes = 0 if is_held_back else min(max(left_bytes, 0), entry.max_bytes)
            try:
                fetched = self._fetched(entry, max_bytes, not (total_bytes or is_held_back))
            except ColdRead:
                if total_bytes and not is_full:
                    break
                raise
            total_bytes += fetched.size_bytes
            must_answer = must_answer or bool(
                fetched.error_code or fetched.diverging or fetched.log_start_offset > entry.log_start_offset >= 0
                or (tells_marks and fetched.high_watermark != entry.sent_high_watermark)
            )  # fmt: skip
            answered.append((entry, fetched))
        if not must_answer and total_bytes < session.min_bytes:
            return None
        for entry, fetched in answered:
            self._note_sent(entry, fetched.high_watermark, bool(fetched.size_bytes or entry.problem is not None))
            self._count(entry, fetched.size_bytes)
            if fetched.error_code:
                self.count_error(fetched.error_code)
        self.bytes_out += total_bytes
        session.linger.sent(total_bytes, session.last_fetch_ms)
        for fetched in session.refused:
            self.count_error(fetched.error_code)
        answers = neighbours([*(fetched for _, fetched in answered), *session.refused])
        return encode_fetch_response(correlation_id, version, 0, session.id, answers)

    def count_error(self, code: int) -> None:
        self.errors[code] = self.errors.get(code, 0) + 1

    def _is_held_back(self, entry: FollowerEntry) -> bool:
        """Whether throttling delays this partition: it is throttled, not in sync, and the rate is used up.

        The session is woken when the rate allows more.
        """
        partition, follower = entry.partition, entry.follower
        if partition is None or not partition.throttled_as_leader or follower is None or follower.in_maximal_isr:
            return False
        if entry.problem is not None:
            return False
        pause_ms = self.throttle.pause_ms(self._loop.time() * 1000)
        session = entry.session
        if pause_ms and not session.throttled:
            session.throttled = True
            self._loop.call_later(pause_ms / 1000, self._unthrottle, session)
        return pause_ms > 0

    def _unthrottle(self, session: FollowerSession) -> None:
        session.throttled = False
        session.dirty.update(session.held_back)
        session.held_back.clear()
        self._wake(session)

    def _count(self, entry: FollowerEntry, size_bytes: int) -> None:
        partition, follower = entry.partition, entry.follower
        if partition is not None and partition.throttled_as_leader and not (follower and follower.in_maximal_isr):
            self.throttle.record(size_bytes, self._loop.time() * 1000)

    def _note_sent(self, entry: FollowerEntry, high_watermark: int, is_news: bool) -> None:
        session, partition = entry.session, entry.partition
        entry.sent_high_watermark = high_watermark
        if not is_news and partition is not None and entry.fetch_offset < partition.log.log_end_offset:
            return  # the answer had no room for its records: it stays dirty, and is the first in the next answer
        session.dirty.pop(entry, None)
        if is_news:
            entry.in_flight = True
            session.in_flight[entry] = None
        elif partition is None or high_watermark == partition.log.log_end_offset:
            session.unsettled.pop(entry, None)

    def _fetched(self, entry: FollowerEntry, max_bytes: int, min_one_batch: bool) -> FetchedPartition:
        topic, index = entry.key
        partition, problem = entry.partition, entry.problem
        if isinstance(problem, int) or partition is None:
            return FetchedPartition(topic, index, problem if isinstance(problem, int) else 0)
        log = partition.log
        marks = (log.high_watermark, log.last_stable_offset, log.log_start_offset)
        if problem is not None:
            return FetchedPartition(topic, index, 0, *marks, diverging=problem)
        try:
            result = read_for_copy(log, entry.fetch_offset, max_bytes, min_one_batch=min_one_batch)
        except ColdRead:
            raise
        except Exception as error:
            entry.problem = self._partitions.refusal(partition, error).code
            return FetchedPartition(topic, index, entry.problem)
        return FetchedPartition(topic, index, 0, *marks, result.regions, result.size_bytes)
