"""Checks the .log and the indexes of a segment in the background, to detect damage that no reader has met.

One `Scrub` checks one segment, in pieces that the caller spaces out. `run` may be called on any thread and changes no
state of the segment; `finish` applies the result on the owner's thread. Invariant: a scrub does not check batches
appended after its start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from tidelog.storage.log.explained_gaps import write_again
from tidelog.storage.producers.producer_snapshots import CorruptSnapshot
from tidelog.storage.segments.damage import DamagedRange, apart_from, describe
from tidelog.storage.segments.examination import Examiner, Findings, WholeBatch, doubt_epochs
from tidelog.storage.segments.index_check import IndexCheck
from tidelog.storage.segments.transaction_index import CorruptTransactionIndex

if TYPE_CHECKING:
    from tidelog.storage.log.partition_log import PartitionLog
    from tidelog.storage.segments.segment import Segment

logger = logging.getLogger("tidelog.storage")

BATCH_COST_BYTES: Final = 4096
"""The minimum cost of a batch, because a small batch takes as long to check as one of this size."""


class Scrub:
    """The scrub of one segment."""

    def __init__(self, log: PartitionLog, segment: Segment) -> None:
        self.log = log
        self.segment = segment
        self.verified_bytes = 0
        self.is_done = False
        self.error: OSError | None = None
        self._file = segment.file
        self._size_bytes = segment.size_bytes
        self._end_offset = segment.next_offset
        self._findings = Findings(segment.base_offset, segment.size_bytes)
        self._findings.generation = segment.generation
        self._damage: list[DamagedRange] = []
        present = min(self._size_bytes, self._file.size_bytes())
        self._present = present
        self._steps = Examiner(
            self._file.read_at, present, segment.base_offset, end_offset=self._end_offset,
            may_have_gaps=segment.may_have_gaps, may_end_early=segment.may_end_early,
            epoch_max=log.segments.epoch_behind(segment), proven=segment.proven,
            named=segment.named_batches(),
        ).run()  # fmt: skip
        self._index_check = IndexCheck(segment)
        self._file.pin()  # last, because a failure above must not leave the file pinned

    def run(self, cost_bytes: int) -> None:
        """Check the next batches, about `cost_bytes` of them. `finish` raises an error."""
        try:
            for each in self._steps:
                self._index_check.note(each)
                if isinstance(each, WholeBatch):
                    self._findings.note(each.position, each.header, self.segment.index_interval_bytes)
                    self.verified_bytes += each.header.size_bytes
                    cost_bytes -= max(BATCH_COST_BYTES, each.header.size_bytes)
                else:
                    self._damage.append(each)
                    self._findings.end_offset = each.end_offset
                    cost_bytes -= each.end_position - each.position
                if cost_bytes <= 0:
                    return
        except OSError as error:
            self.error = error
        self.is_done = True

    def abandon(self) -> None:
        """Replaces `finish` if the log is gone or the node stops."""
        self._file.unpin()

    def finish(self) -> bool:
        """Apply the result, on the owner's thread. True if there is new damage. Raises OSError."""
        self._file.unpin()
        segment = self.segment
        if self.error is not None:
            raise self.error
        if segment.generation != self._findings.generation or all(one is not segment for one in self.log.segments):
            return False
        findings, damage = self._findings, self._damage
        findings.close(damage, self._present, self._end_offset)
        doubt_epochs(findings, self.log.leader_epochs.epoch_for_offset, segment.proven)
        findings.damage = segment.with_filled(findings.damage)
        # An index row without a batch points past the end, or between two batches.
        left = bool(self._index_check.left_over())
        index_is_wrong = bool(self._index_check.wrong)
        if segment is self.log.segments.active:  # what it has from a file, and not from appends, may lack the newest
            index_is_wrong = index_is_wrong or not segment.max_is_confirmed
        elif not damage:
            index_is_wrong = index_is_wrong or self._index_check.lacks_last_time()
        is_new = findings.damage != segment.damage
        if is_new or (index_is_wrong or (left and not damage and segment.size_bytes == self._size_bytes)):
            for each in apart_from(segment.damage, findings.damage):
                logger.warning("%s: the scrubber does not find this any more: %s", segment.path, describe(each))
            segment.findings = findings
            self.log.adopt_findings(segment)
        else:
            segment.trust(0, self._size_bytes)
            if not damage:
                segment.max_is_confirmed = True
            self.log.correct_epochs(segment, findings)
        return is_new and bool(findings.damage)


def check_small_files(log: PartitionLog) -> Iterator[None]:
    """Delete damaged producer snapshots, write damaged transaction indexes and `explained-gaps` again.

    Each step checks one file.
    """
    write_again(log, sync=True)
    for offset in log.snapshots.offsets:
        yield
        if offset not in log.snapshots.offsets:
            continue
        try:
            log.snapshots.read(offset)
        except (CorruptSnapshot, FileNotFoundError):
            log.snapshots.delete(offset)
    for segment in list(log.segments):
        yield
        if not segment.transaction_index.exists or all(one is not segment for one in log.segments):
            continue
        try:
            segment.transaction_index.check_file()
        except CorruptTransactionIndex:
            # The batches may be damaged, too, which nothing has detected yet: rows would be missing.
            if not segment.transaction_index.write_again():
                log.rebuild_transaction_index(segment)
