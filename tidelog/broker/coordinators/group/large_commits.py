"""Commits of very many offsets: their records are made and encoded in pieces, before the one append.

Pure. The coordinator's state is checked before the first piece, so that a refused commit costs little, and again when
the prepared commit is submitted: members and topics may change between the pieces. Invariant: a commit is one batch in
the log, also a large one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

from tidelog.broker.coordinators.group import records
from tidelog.broker.coordinators.group.records import OffsetCommit
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.batches.batch_builder import BatchBuilder
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.offset_commit import OffsetCommitRequest
from tidelog.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest

CommitRequest = OffsetCommitRequest | TxnOffsetCommitRequest

# With more, an OffsetCommit is above WHOLE_BYTES_MAX in every version, and so among the large requests under way.
OFFSETS_AT_ONCE_MAX: Final = 1_200
_UNLIMITED: Final = 2**31 - 1


def is_large_commit(request: CommitRequest) -> bool:
    """Whether the commit is prepared in pieces."""
    return offset_count(request) > OFFSETS_AT_ONCE_MAX


def offset_count(request: CommitRequest) -> int:
    return sum(len(topic.partitions) for topic in request.topics)


def commit_pieces(request: CommitRequest) -> Iterator[Any]:
    """Copies of the request with up to PIECE_ELEMENTS_MAX of its partitions each, in their order."""
    topics: list[Any] = []
    room = PIECE_ELEMENTS_MAX
    for topic in request.topics:
        start = 0
        while start < len(topic.partitions):
            part = copy.copy(topic)
            part.partitions = topic.partitions[start : start + room]
            topics.append(part)
            start += room
            room -= len(part.partitions)
            if not room:
                yield _with_topics(request, topics)
                topics, room = [], PIECE_ELEMENTS_MAX
    if topics:
        yield _with_topics(request, topics)


def _with_topics(request: CommitRequest, topics: list[Any]) -> Any:
    piece: Any = copy.copy(request)
    piece.topics = topics
    return piece


class PreparedCommit:
    """The records of a commit, also encoded, and its response. `batch_bytes_max`: of the batch, if uncompressed."""

    def __init__(self, response: Any, compression: int, batch_bytes_max: int, *, is_transactional: bool) -> None:
        self.response = response
        self.records: list[OffsetCommit] = []
        self.batch = BatchBuilder(_UNLIMITED, compression, transactional=is_transactional)
        self._batch_bytes_max = _UNLIMITED if compression else batch_bytes_max

    def add(self, commits: list[OffsetCommit], response: Any, wall_ms: int) -> None:
        """Add a piece, and its part of the response. Raises KafkaError(MESSAGE_TOO_LARGE) as soon as it is sure, and
        ValueError where a record's format cannot hold a name from the request.
        """
        for commit in commits:
            self.batch.append(wall_ms, *records.encode(commit))
        if self.batch.size_bytes > self._batch_bytes_max:
            raise KafkaError(ErrorCode.MESSAGE_TOO_LARGE, f"a batch above max.message.bytes, {self._batch_bytes_max}")
        self.records += commits
        topics = self.response.topics
        for topic in response.topics:
            if topics and topics[-1].name == topic.name:
                topics[-1].partitions += topic.partitions
            else:
                topics.append(topic)
