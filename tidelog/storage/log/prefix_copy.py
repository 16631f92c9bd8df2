"""Replaces the first segments of a compacted log by another replica's copy of them.

A repair needs it where two cleaners have removed different records, and the damage hides which ones. A tombstone, or a
transaction's marker, may be missing in the copy of the damaged range, and what it ended is in the segments before. Or
the copy has a record that this log's cleaner has removed, and the tombstone is missing here, in the segments behind.
The other replica's copy is true as a whole, up to the last offset that may be missing here: behind it this log has
every tombstone. Invariants: the other replica has all of the copy committed; no mixture of two cleanings, in which a
deleted key may be back. So all segments are replaced at once (`swap.py`), and the last ones are copied first: the other
replica may be cleaned meanwhile, and what a tombstone deletes is gone there before the tombstone. What is larger there
than a segment may be becomes several. The other replica also has the right leader epochs: what a cleaner had removed
before this copy of the log was made is missing in this one's epoch file, too.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Final

from tidelog.protocol.batches.record_batch import BatchHeader, CorruptRecord, check_crc, check_magic, iter_headers
from tidelog.protocol.errors import KafkaError
from tidelog.storage.cleaner.choice import CleanableRange
from tidelog.storage.cleaner.filter import CleanedBatch, filler
from tidelog.storage.cleaner.keys import PlainKeyTable
from tidelog.storage.files.checkpoints import CLEANED_ENDS_FILE
from tidelog.storage.files.disk import is_full
from tidelog.storage.log.compaction import CleaningFailed, Compaction, chunks, write_batches
from tidelog.storage.log.explained_gaps import is_beyond_index, name_early_ends
from tidelog.storage.log.hidden_transactions import aborted
from tidelog.storage.log.recovery import read_marker
from tidelog.storage.log.repair import NoSpace, require_space
from tidelog.storage.producers.producer_state import ProducerState
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange
from tidelog.storage.segments.examination import Findings, examine
from tidelog.storage.segments.leader_epochs import EpochBatches
from tidelog.storage.segments.log_config import INT64_MAX, MAX_POSITION
from tidelog.storage.segments.reader import headers
from tidelog.storage.segments.segment import LOG_SUFFIX, Segment, file_name
from tidelog.storage.segments.transaction_index import AbortedTransaction

if TYPE_CHECKING:
    from tidelog.storage.log.partition_log import PartitionLog

logger = logging.getLogger("tidelog.storage")

_REPLAYED_AT_ONCE: Final = 1000
_REPLAYED_BYTES: Final = 1024 * 1024


class PrefixCopy(Compaction):
    """Its owner calls `run` and `advance` as of any cleaning. While `wants_from` is not negative, it sets `data` before
    `run`: batches of the other replica from that offset on.
    """

    def __init__(self, log: PartitionLog, last: Segment, now_ms: int) -> None:
        """`last`: the last segment to replace, which is not the active one. Raises CorruptTransactionIndex."""
        end_offset = next(each.base_offset for each in log.segments if each.base_offset > last.base_offset)
        chosen = CleanableRange(log.log_start_offset, end_offset, 0, 0, 0)
        super().__init__(log, chosen, lambda: PlainKeyTable(0, 1.0), now_ms, piece_bytes=0)
        self._transaction_indexes.clear()  # those of the copy are made from its batches
        self.wants_from = -1
        self.data = b""
        self._copied: list[tuple[list[Segment], list[Segment]]] = []
        self._size_max = min(self._config.segment_bytes, MAX_POSITION)
        behind = log.segments.epoch_behind(last)
        self._epoch_max = max(behind, log.leader_epochs.epoch_for_offset(end_offset))
        """The leader epoch behind what is copied next."""
        self._epochs: list[EpochBatches] = []
        self._copied_to = -1
        """The end of the last copied batch. Behind it an epoch may begin in a gap, with its batches behind the copy."""
        self._has_transactions = False
        self._producers = ProducerState()
        self._producers.load((), log.log_start_offset)
        self._is_whole = False
        self._behind = [
            (each, each.damage, each.size_bytes, each.next_offset, each.generation)
            for each in log.segments.from_offset(end_offset)
        ]
        self._rows_behind: list[tuple[Segment, list[AbortedTransaction]]] = []
        self._hidden_ends: list[tuple[int, int]] = []
        """As in `ScannedTransactions`, of transactions with records in the copy."""
        self._examined: dict[Segment, Findings | None] = {}
        """Segments behind the copy with damage that nothing had detected. None without the file."""
        self._last_snapshot = end_offset
        """Up to this offset, the snapshots of producers may lack transactions of which the copy has the records."""

    @property
    def is_copied(self) -> bool:
        """Whether the next `advance` begins to put the whole copy in place."""
        return bool(self._ready)

    @property
    def is_in_place(self) -> bool:
        """Whether the log has the copy's segments."""
        return bool(self._copied) and any(each is self._copied[0][1][0] for each in self.log.segments)

    def advance(self) -> bool:
        """As that of a cleaning. Raises NoSpace, too: then the log is as it was."""
        if not self.is_given_up and self._swap is None:
            try:
                if isinstance(self.error, OSError) and is_full(self.error):
                    raise self.error
                if self._is_whole:
                    self._is_whole = False
                    self._forget_former_transactions()
                if self._ready:
                    self._correct_epochs()
                    # On the device before the copy takes its place: the cleaner is to compare the whole log again.
                    self.log.cleaned_offset = min(self.log.cleaned_offset, self.log.log_start_offset)
                    self.log.write_checkpoint()
                    # Not before: beside the old checkpoint a start would take a lost segment, or end, for cleaned.
                    self.log.durability.files.remove(CLEANED_ENDS_FILE)
                    self._name_early_ends()
            except OSError as error:
                if not is_full(error):
                    raise
                self.take_back()
                raise NoSpace(error.errno, error.strerror, error.filename) from error
        return super().advance()

    def _name_early_ends(self) -> None:
        """Before the segments on both sides of a gap are there that is too large for an index. Raises OSError."""
        copied = [segment for _, new in self._copied for segment in new]
        if early_ends := {(each.base_offset, each.next_offset) for each in copied if each.may_end_early}:
            name_early_ends(self.log, early_ends)

    def _correct_epochs(self) -> None:
        """On the device before the copy takes its place, because a start after a kill may finish the swap. The batches
        that it replaces are of the same epochs. Those of an epoch may begin later than the epoch.
        """
        epochs, known = self._epochs, self.log.leader_epochs
        if not epochs:
            return
        start = max(epochs[0].earliest, self.log.log_start_offset)
        if known.correct_by(epochs, start, self._copied_to, is_cleaned=True):
            logger.warning("%s: taking the leader epochs of another replica's copy", self.log.directory)
            self.log.durability.file_epochs(known)

    def _finish(self) -> None:
        super()._finish()
        self.log.after_repair()

    def _forget_former_transactions(self) -> None:
        """Before the copy takes its place: correct what was noted without the aborted records that only the copy has.

        A later start would not know their transactions, and readers of committed records would get them.
        """
        for segment, findings in self._examined.items():
            _ = segment.file  # a lost one becomes damage
            segment.findings = findings
            self.log.adopt_findings(segment)
        self.log.snapshots.delete_where(0, self._last_snapshot + 1)
        if self._hidden_ends:  # a start that does not scan would not know them
            self.log.distrust_transactions(min(first_offset for first_offset, _ in self._hidden_ends))
        self.log.hidden_ends += tuple(self._hidden_ends)
        hidden_behind = min((end_offset for _, end_offset in self._hidden_ends), default=INT64_MAX)
        for segment, *_ in self._behind:
            index = segment.transaction_index
            index.lacks_rows = index.lacks_rows or segment.next_offset > hidden_behind  # the repair there completes it
        self._rows_behind = [(segment, rows) for segment, rows in self._rows_behind if rows]
        for segment, rows in self._rows_behind:
            index, known = segment.transaction_index, segment.transaction_index.rows_or_none()
            rows_by_end = {row.last_offset: row for row in [*known, *rows]}
            rows_by_end |= {row.last_offset: row for row in known if row.last_offset >= hidden_behind}
            index.begin_rebuild()
            for last_offset in sorted(rows_by_end):
                index.append(rows_by_end[last_offset])
            index.settle()
            self.log.segments.sums_are_stale = True

    def _whole(self) -> Generator[None]:
        # The replaced files stay for `file.delete.delay.ms`, so that all of the copy comes on top of them.
        require_space(self._disk, self._segments[-1], sum(segment.size_bytes for segment in self._segments))
        yield from self._sync_log()
        self.wants_from = self.log.log_start_offset  # only to learn that it is there: it is copied last
        yield
        self.wants_from = -1
        for start, stop in reversed(self._groups(self._segments)):
            yield from self._copy(self._segments[start:stop], self._ends[stop - 1])
        self._copied.reverse()
        if self._has_transactions:
            for new in [segment for _, segments in self._copied for segment in segments]:
                yield from self._note_aborted(new)
            yield from self._note_behind()
        self._remove_strays()
        self._is_whole = True
        yield
        for segment, _ in self._rows_behind:
            self._disk.sync_file(segment.transaction_index.path)
        self._disk.sync_directory(self.log.directory)
        self._ready = self._copied
        yield
        self._is_done = True

    def _copy(self, old: list[Segment], end_offset: int) -> Iterator[None]:
        new = [self._begin_segment(old[0].base_offset)]
        written, written_end = 0, new[0].base_offset
        epochs: list[EpochBatches] = []
        next_offset = max(written_end, self.log.log_start_offset)
        while next_offset < end_offset:
            self.wants_from = next_offset
            yield
            self.wants_from = -1
            before, size_bytes = next_offset, written
            parts: list[CleanedBatch] = []
            for position, header in iter_headers(self.data):
                if header.base_offset >= end_offset:
                    next_offset = end_offset
                    break
                batch = memoryview(self.data)[position : position + header.size_bytes]
                self._check(batch, header, next_offset, old[0].base_offset, end_offset)
                self._note_epoch(epochs, header.partition_leader_epoch, next_offset, header.base_offset)
                is_far = header.last_offset > new[-1].max_offset
                if size_bytes and (is_far or size_bytes + len(batch) > self._size_max):
                    self._end_segment(new[-1], parts, written, written_end, written_end)
                    new.append(self._begin_segment(written_end))
                    written, size_bytes, parts = 0, 0, []
                if header.last_offset > new[-1].max_offset:  # an empty segment holds the gap, as in `roll_behind_gap`
                    is_named = is_beyond_index(new[-1].base_offset, header.base_offset)
                    held = [] if is_named else [filler(header.base_offset - 1, header.partition_leader_epoch)]
                    self._end_segment(
                        new[-1], held, 0, written_end if is_named else header.base_offset, header.base_offset
                    )
                    new.append(self._begin_segment(header.base_offset))
                parts.append(CleanedBatch(batch, header.last_offset, header.max_timestamp))
                size_bytes += len(batch)
                self._has_transactions = self._has_transactions or header.is_transactional
                next_offset = written_end = header.next_offset
            if next_offset == before:
                raise CorruptRecord("the other replica sends no whole batch")
            if written_end < end_offset == next_offset and not is_beyond_index(new[-1].base_offset, end_offset):
                known = min(self.log.leader_epochs.epoch_for_offset(end_offset - 1), self._epoch_max)
                epoch = max(epochs[-1].epoch, known) if epochs else known
                self._note_epoch(epochs, epoch, written_end, end_offset - 1)
                parts.append(filler(end_offset - 1, epoch))
                written_end = end_offset
            written = self._write(new[-1], parts, written)
        self._copied_to = max(self._copied_to, written_end)
        self._seal(new[-1], end_offset, written, written_end)
        new[-1].release()
        self._copied.append((old, new))
        if self._epochs:  # the epoch that begins behind these segments may begin in a gap at their end
            behind = self._epochs[0]
            self._epochs[0] = behind._replace(earliest=min(behind.earliest, written_end))
        self._epochs[:0] = epochs
        self._epoch_max = epochs[0].epoch if epochs else self._epoch_max

    def _write(self, new: Segment, parts: list[CleanedBatch], written: int) -> int:
        """The position behind them. Raises NoSpace, OSError."""
        require_space(self._disk, new, sum(len(part.data) for part in parts))  # the copy may be the larger one
        return write_batches(new, parts, written)

    def _end_segment(
        self, new: Segment, parts: list[CleanedBatch], written: int, written_end: int, next_offset: int
    ) -> None:
        if parts:
            written = self._write(new, parts, written)
        self._seal(new, next_offset, written, written_end)
        new.release()  # there may be thousands of them

    def _check(
        self, batch: memoryview, header: BatchHeader, next_offset: int, base_offset: int, end_offset: int
    ) -> None:
        """Raises CorruptRecord if the batch cannot be the next one between these offsets."""
        check_magic(header)
        if (
            not check_crc(batch, 0, header)
            or not base_offset <= header.base_offset
            or not next_offset < header.next_offset <= end_offset
        ):
            raise CorruptRecord(f"the other replica's batch of offset {header.base_offset} does not belong here")

    def _note_epoch(self, epochs: list[EpochBatches], epoch: int, earliest: int, base_offset: int) -> None:
        """Raises CorruptRecord if the batch is of another leader epoch than can be between those around it."""
        if (epochs and epoch < epochs[-1].epoch) or epoch > self._epoch_max >= 0:
            raise CorruptRecord(f"the other replica's batch of offset {base_offset} is of leader epoch {epoch}")
        if epochs and epoch == epochs[-1].epoch:
            epochs[-1] = epochs[-1]._replace(last=base_offset)
        else:
            epochs.append(EpochBatches(epoch, earliest, base_offset, base_offset))

    def _note_aborted(self, new: Segment) -> Iterator[None]:
        """Make the index of the copied transactions that were aborted: segment by segment, from the first one on."""
        new.transaction_index.begin_rebuild()
        try:
            for number, (position, header) in enumerate(headers(new)):
                batch = new.file.read_at(header.size_bytes, position) if header.is_control else b""
                for row in self._replay(header, batch):
                    new.transaction_index.append(row)
                if number % _REPLAYED_AT_ONCE == _REPLAYED_AT_ONCE - 1:
                    yield
        except CorruptIndex as error:
            raise CleaningFailed(f"what was copied is not there any more: {error}") from error
        if new.transaction_index.settle():
            new.sync_indexes()
        new.release()
        yield

    def _replay(self, header: BatchHeader, batch: bytes | memoryview) -> list[AbortedTransaction]:
        """The transaction that the batch aborts, if it does. `batch`: needed of a control batch."""
        completed = self._producers.replay(header, read_marker(batch, header) if header.is_control else None)
        self._producers.on_high_watermark(header.next_offset)
        return [aborted(completed)] if completed is not None and completed.is_abort else []

    def _note_behind(self) -> Iterator[None]:
        """Collect the transactions that were aborted behind the copy, until all that are open at its end have ended.

        A start may have noted none of which the cleaner had removed the records before.
        """
        open_from = set(self._producers.ongoing)
        if open_from:
            self._last_snapshot = INT64_MAX
        for segment, damage, size_bytes, next_offset, generation in self._behind:
            if open_from.isdisjoint(self._producers.ongoing):
                return
            rows: list[AbortedTransaction] = []
            self._rows_behind.append((segment, rows))
            position, offset = 0, segment.base_offset
            for each in (*damage, DamagedRange(size_bytes, size_bytes, next_offset, next_offset, "")):
                end, end_offset = each.position, each.first_offset
                try:
                    for data, batches, _ in chunks(
                        self._disk, segment, end, end_offset, _REPLAYED_BYTES, position, offset
                    ):
                        for at, header in batches:
                            if not check_crc(data, at, header):
                                raise CorruptRecord(f"the CRC of the batch of offset {header.base_offset} is wrong")
                            rows += self._replay(header, data[at : at + header.size_bytes])
                        yield
                except KafkaError:  # damage that nothing has detected yet
                    self._note_hidden(open_from, segment.base_offset)
                    self._examined[segment] = self._examine(segment, size_bytes, next_offset, generation)
                if each.first_offset < each.end_offset:
                    self._note_hidden(open_from, each.first_offset)
                position, offset = each.end_position, each.end_offset

    def _examine(self, segment: Segment, size_bytes: int, end_offset: int, generation: int) -> Findings | None:
        try:
            file = self._disk.open(f"{segment.directory}/{file_name(segment.base_offset, LOG_SUFFIX)}")
        except FileNotFoundError:
            return None
        try:
            findings = examine(
                file, size_bytes, segment.base_offset, end_offset, segment.index_interval_bytes,
                may_have_gaps=segment.may_have_gaps, may_end_early=segment.may_end_early, proven=segment.proven,
                named=segment.named_batches(),
            )  # fmt: skip
            findings.generation = generation
            return findings
        finally:
            file.close()

    def _note_hidden(self, open_from: set[int], end_offset: int) -> None:
        """Damage at `end_offset` may hide how the transactions end that are open there."""
        if left := open_from.intersection(self._producers.ongoing):
            self._hidden_ends.append((min(left), end_offset))
