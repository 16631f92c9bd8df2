"""Checks all files of one log of a stopped node for damage.

`verify` changes nothing. `repair.py` can repair the damage as in an open log. `loader.py` is not used to open the log,
because it would truncate a torn tail, and the node's next start could not detect that loss. Invariant: no bytes are
removed, except damaged ones that a copy replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from tidelog.storage.files.checkpoints import (
    LEADER_EPOCH_FILE,
    LOG_START_FILE,
    PARTITION_METADATA_FILE,
    TRANSACTION_SUMS_FILE,
    CorruptCheckpoint,
    decode_leader_epochs,
    decode_partition_metadata,
    decode_transaction_sums,
    encode_leader_epochs,
    encode_transaction_sums,
    read_if_exists,
    replace_file,
)
from tidelog.storage.files.disk import Disk
from tidelog.storage.log.deleted_start import is_start_deleted
from tidelog.storage.log.explained_gaps import ends_kept_below, may_end_early, read_explained_gaps
from tidelog.storage.log.recovery import find_aborted, read_marker, rebuild_transaction_index
from tidelog.storage.log.repair import RangeRepair, RepairCheck, finish_repair
from tidelog.storage.producers.producer_snapshots import SNAPSHOT_SUFFIX, CorruptSnapshot, ProducerSnapshots
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange
from tidelog.storage.segments.examination import UNKNOWN_END, Findings, WholeBatch, examine
from tidelog.storage.segments.index_check import IndexCheck
from tidelog.storage.segments.leader_epochs import LeaderEpochs, confirmed_log_start, first_offset_of
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig
from tidelog.storage.segments.segment import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SWAP_SUFFIX,
    TRANSACTION_INDEX_SUFFIX,
    Segment,
    file_name,
)
from tidelog.storage.segments.segments import Segments
from tidelog.storage.segments.transaction_index import AbortedTransaction, CorruptTransactionIndex

RECORDS: Final = "damaged records"
MISSING: Final = "missing segment"
TORN: Final = "torn end"
INDEX: Final = "wrong index"
TRANSACTIONS: Final = "wrong index of transactions"
SNAPSHOT: Final = "damaged snapshot"
EPOCHS: Final = "wrong leader epochs"
SUMS: Final = "damaged checksums of indexes of transactions"
SMALL_FILE: Final = "damaged small file"
UNFINISHED: Final = "unfinished compaction"
HARMLESS: Final = frozenset({TORN, UNFINISHED})
"""Problems that a kill or a loss of power may leave, and that the next start corrects by itself."""


class Problem(NamedTuple):
    """Bytes and offsets are -1 if they do not apply, `end_offset` also if it is unknown."""

    file: str
    kind: str
    reason: str
    position: int = -1
    end_position: int = -1
    first_offset: int = -1
    end_offset: int = -1


class LogFacts(NamedTuple):
    """The log directory's facts about one log. `recovery_point` and `high_watermark` are -1 if unknown."""

    is_clean: bool = False
    recovery_point: int = -1
    high_watermark: int = -1
    log_start_offset: int = 0
    is_compacted: bool = False
    begins_with_snapshot: bool = False
    cleaned_offset: int = -1


class StoppedLog:
    """The log in `directory`. Call `verify` first; then the ranges in `damage` may be repaired."""

    def __init__(self, disk: Disk, directory: str, facts: LogFacts) -> None:
        self.disk = disk
        self.directory = directory
        self.failure: str | None = None
        self.is_closed = False
        self.verified_bytes = 0
        self._facts = facts
        self._log_start_of_checkpoint = facts.log_start_offset
        self._names = {entry.name for entry in disk.list_directory(directory) if not entry.is_directory}
        if not facts.begins_with_snapshot:
            self._facts = facts._replace(log_start_offset=self._confirmed_log_start())
        self.cleaned_offset, self.log_start_offset = self._facts.cleaned_offset, self._facts.log_start_offset
        self.compacted_below = INT64_MAX if facts.is_compacted else self.cleaned_offset
        """The offset below which the topic is compacted, or was once: there the cleaner may have removed records."""
        self.segments = Segments(disk, directory, self._open_segments())
        self.leader_epochs = LeaderEpochs()
        self.topic_id: bytes | None = None
        self._transaction_sums: dict[int, tuple[int, int]] | None = None
        self._epochs_are_unreadable = False
        self._torn: Segment | None = None
        """The segment with invalid bytes after its last batch. It must keep its length."""
        self._first_unsynced = self._find_first_unsynced()

    def _confirmed_log_start(self) -> int:
        """The log start of the checkpoint, unless the epoch file says that it is too high, as at a node's start."""
        data = read_if_exists(self.disk, f"{self.directory}/{LEADER_EPOCH_FILE}")
        try:
            epochs, is_readable = LeaderEpochs(decode_leader_epochs(data or b"")), bool(data)
        except CorruptCheckpoint:
            epochs, is_readable = LeaderEpochs(), False
        first = min(_offsets_of(self._names, LOG_SUFFIX), default=INT64_MAX)
        facts = self._facts
        return confirmed_log_start(epochs, is_readable, facts.log_start_offset, first, facts.high_watermark)

    def _open_segments(self) -> list[Segment]:
        config = LogConfig(cleanup_policy=frozenset({"compact" if self._facts.is_compacted else "delete"}))
        bases = sorted(_offsets_of(self._names, LOG_SUFFIX))
        start = self._facts.log_start_offset
        cleaned_offset = self._facts.cleaned_offset
        explained = read_explained_gaps(self.disk, self.directory)
        self.compacted_below = max(self.compacted_below, explained.end_offset)
        kept_below = ends_kept_below(self.disk, self.directory, cleaned_offset)
        segments = []
        for base_offset, following in zip(bases, [*bases[1:], None]):
            if following is not None and following <= start:
                continue  # the segment was deleted, but a crash may have kept its files
            segment = Segment(
                self.disk, self.directory, base_offset, config, 0,
                size_bytes=self.disk.size_of(f"{self.directory}/{file_name(base_offset, LOG_SUFFIX)}"),
                has_transaction_index=file_name(base_offset, TRANSACTION_INDEX_SUFFIX) in self._names,
            )  # fmt: skip
            segment.may_end_early = may_end_early(
                segment, INT64_MAX if following is None else following, cleaned_offset=cleaned_offset,
                kept_below=kept_below, early_ends=explained.early_ends,
            )  # fmt: skip
            if base_offset < explained.end_offset or segment.may_end_early:
                segment.may_have_gaps = True
            segment.next_offset = UNKNOWN_END if following is None else following
            segments.append(segment)
        return segments

    def _find_first_unsynced(self) -> int:
        """The first segment that the next start scans. The start rebuilds indexes and epochs from there on."""
        if self._facts.is_clean:
            return len(self.segments)
        return max(0, sum(segment.base_offset <= self._facts.recovery_point for segment in self.segments) - 1)

    @property
    def end_offset(self) -> int:
        return self.segments.active.next_offset

    def damage(self) -> list[tuple[Segment, DamagedRange]]:
        """The ranges that can be repaired, because both ends are known."""
        return [(segment, each) for segment in self.segments for each in segment.damage]

    # ---------------------------------------------------------------------------------------------------------- verify

    def verify(self) -> Iterator[Problem]:
        """All problems, in the order of the segments. Raises OSError."""
        unfinished = sorted(name for name in self._names if name.endswith(SWAP_SUFFIX))
        if unfinished:
            yield Problem(f"{self.directory}/{unfinished[0]}", UNFINISHED, "the next start finishes it; not verified")
            return
        yield from self._verify_small_files()
        yield from self._verify_start()
        seen: list[tuple[Segment, Findings]] = []
        for number, segment in enumerate(self.segments):
            findings, problems = self._verify_segment(segment, is_derived_anew=number >= self._first_unsynced)
            seen.append((segment, findings))
            yield from problems
            segment.forget_indexes()
        yield from self._verify_epochs(seen)
        for offset in sorted(_offsets_of(self._names, SNAPSHOT_SUFFIX)):
            yield from self._verify_snapshot(offset)

    def _verify_small_files(self) -> Iterator[Problem]:
        path = f"{self.directory}/{PARTITION_METADATA_FILE}"
        try:
            data = read_if_exists(self.disk, path)
            self.topic_id = decode_partition_metadata(data) if data is not None else None
        except CorruptCheckpoint as error:
            yield Problem(path, SMALL_FILE, str(error))
        path = f"{self.directory}/{LEADER_EPOCH_FILE}"
        try:
            self.leader_epochs = LeaderEpochs(decode_leader_epochs(read_if_exists(self.disk, path) or b""))
        except CorruptCheckpoint as error:
            self._epochs_are_unreadable = True
            yield Problem(path, EPOCHS, str(error))
        path = f"{self.directory}/{TRANSACTION_SUMS_FILE}"
        try:
            sums = read_if_exists(self.disk, path)
            self._transaction_sums = decode_transaction_sums(sums) if sums else None
        except CorruptCheckpoint as error:
            yield Problem(path, SUMS, str(error))

    def _verify_start(self) -> Iterator[Problem]:
        """Check whether the first file of the log is missing. Other files show where the log begins."""
        checkpointed, confirmed = self._log_start_of_checkpoint, self._facts.log_start_offset
        if confirmed < checkpointed:
            path = f"{self.directory.rpartition('/')[0]}/{LOG_START_FILE}"
            yield Problem(path, SMALL_FILE, f"the leader epochs do not confirm that {self.directory} starts at "
                          f"{checkpointed}", first_offset=confirmed, end_offset=checkpointed)  # fmt: skip
        orphans = set(_offsets_of(self._names, INDEX_SUFFIX)) - set(_offsets_of(self._names, LOG_SUFFIX))
        is_readable = not self._epochs_are_unreadable and LEADER_EPOCH_FILE in self._names
        start = first_offset_of(self.leader_epochs, is_readable, self._facts.log_start_offset, orphans)
        first = self.segments.first.base_offset if len(self.segments) else INT64_MAX
        is_deleted = is_start_deleted(
            self.disk, self.directory, self._names, start, may_be_cleaned=self.compacted_below > 0
        )
        if start < first < INT64_MAX and not self._facts.begins_with_snapshot and not is_deleted:
            path = f"{self.directory}/{file_name(start, LOG_SUFFIX)}"
            yield Problem(path, MISSING, "its records are missing", 0, 0, start, first)

    def _verify_segment(self, segment: Segment, *, is_derived_anew: bool) -> tuple[Findings, list[Problem]]:
        indexes = None if is_derived_anew else IndexCheck(segment)
        markers: dict[int, int] = {}

        def note(each: WholeBatch | DamagedRange) -> None:
            if indexes is not None:
                indexes.note(each)
            if isinstance(each, WholeBatch):
                self.verified_bytes += each.header.size_bytes
                marker = read_marker(each.data, each.header) if each.header.is_control else None
                if marker is not None and marker.is_abort:
                    markers[each.header.base_offset] = each.header.producer_id

        findings = examine(
            segment.file, segment.size_bytes, segment.base_offset, segment.next_offset, segment.index_interval_bytes,
            may_have_gaps=segment.may_have_gaps, may_end_early=segment.may_end_early,
            epoch_max=self.segments.epoch_behind(segment), named=segment.named_batches(), note=note,
        )  # fmt: skip
        problems = self._end(segment, findings) if segment.next_offset == UNKNOWN_END else []
        start = self._facts.log_start_offset
        segment.damage = tuple(each for each in findings.damage if each.end_offset > start)
        damaged = [
            Problem(segment.path, RECORDS, each.reason, each.position, each.end_position, each.first_offset,
                    each.end_offset)
            for each in segment.damage
        ]  # fmt: skip
        problems = [*damaged, *problems]
        if indexes is not None:
            wrong = {**indexes.left_over(), **indexes.wrong}
            if not wrong and indexes.lacks_last_time():
                wrong = {indexes.time_path: "lacks the newest timestamp"}
            if segment.damage or self._torn is segment:
                wrong = {}  # the repair of the records rebuilds the indexes
            problems += [Problem(path, INDEX, reason) for path, reason in sorted(wrong.items())]
            problems += self._verify_transactions(segment, markers)
        if self._torn is segment and findings.tail is not None:
            segment.size_bytes = findings.size_bytes = findings.tail.position
        findings.tail = None
        segment.findings = findings
        return findings, problems

    def _end(self, segment: Segment, findings: Findings) -> list[Problem]:
        """Check the end of the log for invalid bytes or missing records after its last batch."""
        facts, tail, end_offset = self._facts, findings.tail, findings.end_offset
        size_bytes = segment.size_bytes
        segment.next_offset = end_offset
        # Checkpoints have no checksum, so two must agree.
        known_end = min(facts.recovery_point, facts.high_watermark)
        if facts.is_clean and known_end > end_offset:
            position = tail.position if tail is not None else size_bytes
            reason = tail.reason if tail is not None else "the file ends too early"
            damage = DamagedRange(position, size_bytes, end_offset, known_end, reason)
            findings.damage = (*findings.damage, damage)
            findings.end_offset = segment.next_offset = known_end
            findings.tail = None
            return []
        if tail is None:
            if end_offset >= facts.recovery_point:
                return []
            reason = f"the checkpoint says that offset {facts.recovery_point} was reached"
            return [Problem(segment.path, RECORDS, reason, size_bytes, size_bytes, end_offset)]
        self._torn = segment
        is_torn = not facts.is_clean and end_offset >= facts.recovery_point
        reason = "no batch; the next start cuts it" if is_torn else tail.reason
        return [Problem(segment.path, TORN if is_torn else RECORDS, reason, tail.position, size_bytes, end_offset)]

    def _verify_transactions(self, segment: Segment, markers: dict[int, int]) -> list[Problem]:
        index = segment.transaction_index
        try:
            rows = index.rows
        except CorruptTransactionIndex as error:
            return [Problem(index.path, TRANSACTIONS, str(error).removeprefix(index.path).lstrip(": "))]
        if self._transaction_sums is not None:
            expected = self._transaction_sums.get(segment.base_offset, (0, 0))
            is_right = expected[0] < 0 or index.checksum == expected  # below 0: the next start makes it anew
            if is_right or self._follows_from_batches(segment, rows):
                return []
            return [Problem(index.path, TRANSACTIONS, "is not what was written")]
        if segment.may_have_gaps or segment.damage:
            return []
        for row in rows:
            if markers.get(row.last_offset) != row.producer_id:
                return [Problem(index.path, TRANSACTIONS, f"no marker of producer {row.producer_id} is at its offset",
                                first_offset=row.last_offset, end_offset=row.last_offset + 1)]  # fmt: skip
        return []

    def _follows_from_batches(self, segment: Segment, rows: list[AbortedTransaction]) -> bool:
        """Whether whole batches give these rows. Kafka writes no checksums: where it has had the log since, those that
        are there are old.
        """
        if self.damage():
            return False
        snapshots = ProducerSnapshots(self.disk, self.directory, _offsets_of(self._names, SNAPSHOT_SUFFIX))
        try:
            return find_aborted(segment, list(self.segments), snapshots)[0] == rows
        except CorruptIndex:
            return False

    def _verify_epochs(self, seen: list[tuple[Segment, Findings]]) -> Iterator[Problem]:
        path = f"{self.directory}/{LEADER_EPOCH_FILE}"
        known = LeaderEpochs(self.leader_epochs)
        is_readable = len(known) > 0
        for number, (segment, findings) in enumerate(seen):
            is_judged = number < self._first_unsynced and not segment.damage and not segment.may_have_gaps
            start = max(segment.base_offset, self._facts.log_start_offset)
            if not is_readable:
                for each in findings.epochs:
                    if each.epoch > known.latest:
                        known.assign(each.epoch, max(each.first, start))
            elif is_judged and known.correct_by(findings.epochs, start, findings.end_offset, is_cleaned=False):
                yield Problem(path, EPOCHS, "the batches say otherwise", -1, -1, start, findings.end_offset)
        has_records = len(known) > 0 and self._facts.log_start_offset < self.end_offset
        if not is_readable and has_records and self._facts.is_clean and not self._epochs_are_unreadable:
            yield Problem(path, EPOCHS, "is empty" if LEADER_EPOCH_FILE in self._names else "is missing")
        self.leader_epochs = known

    def _verify_snapshot(self, offset: int) -> Iterator[Problem]:
        if not self._facts.is_clean and offset >= self._facts.recovery_point:
            return  # a loss of power may have torn it; the next start deletes it then
        try:
            ProducerSnapshots(self.disk, self.directory, [offset]).read(offset)
        except (CorruptSnapshot, FileNotFoundError) as error:
            yield Problem(f"{self.directory}/{file_name(offset, SNAPSHOT_SUFFIX)}", SNAPSHOT, str(error))

    # ---------------------------------------------------------------------------------------------------------- repair

    def repair_of(self, segment: Segment, damage: DamagedRange) -> RangeRepair:
        return RangeRepair(self, segment, damage, may_rewrite=segment is not self._torn)

    def finish_repair(self, check: RepairCheck) -> bool:
        """Finish a repair. Whether the damage is gone. Raises OSError."""
        check.run()
        repaired = range(check.damage.first_offset, check.damage.end_offset)
        return finish_repair(check) and not any(each.first_offset in repaired for each in check.segment.damage)

    def distrust_transactions(self, offset: int) -> None:
        """The next start makes the indexes of aborted transactions anew from there on. Raises OSError."""
        self.segments.distrusted.add(offset)
        sums = self.segments.transaction_sums(with_active=True)
        if self._transaction_sums is not None:
            sums = self._transaction_sums | {base: each for base, each in sums.items() if each[0] < 0}
        self._transaction_sums = sums
        replace_file(self.disk, self.directory, TRANSACTION_SUMS_FILE, encode_transaction_sums(sums))

    def adopt_findings(self, segment: Segment) -> None:
        """Sync the indexes rebuilt from the undamaged batches to the device. Raises OSError."""
        findings, segment.findings = segment.findings, None
        assert findings is not None
        segment.adopt(findings)
        segment.seal()
        segment.sync_indexes()
        segment.forget_indexes()

    def mend(self, problem: Problem) -> bool:
        """Rebuild a file that is derived from batches, if these are undamaged. Whether it did. Raises OSError."""
        if problem.kind == SUMS and self.segments.distrusted:
            return True  # it is written anew
        if problem.kind in (SNAPSHOT, SUMS):
            self.disk.remove(problem.file)
            self.disk.sync_directory(self.directory)
            return True
        makers: dict[str, Callable[[str], None]] = {
            INDEX: self._make_index, TRANSACTIONS: self._make_transaction_index, EPOCHS: self._write_epochs,
        }  # fmt: skip
        make = makers.get(problem.kind)
        if make is None or self.damage():
            return False
        make(problem.file)
        return True

    def _make_index(self, path: str) -> None:
        segment = self._segment_of(path)
        if segment.findings is not None:  # otherwise a repair has rebuilt it
            self.adopt_findings(segment)

    def _make_transaction_index(self, path: str) -> None:
        segment = self._segment_of(path)
        snapshots = ProducerSnapshots(self.disk, self.directory, _offsets_of(self._names, SNAPSHOT_SUFFIX))
        rebuild_transaction_index(segment, list(self.segments), snapshots)
        if segment.transaction_index.exists:
            self.disk.sync_file(segment.transaction_index.path)
        self.disk.sync_directory(self.directory)

    def _write_epochs(self, path: str) -> None:
        replace_file(self.disk, self.directory, LEADER_EPOCH_FILE, encode_leader_epochs(self.leader_epochs))

    def _segment_of(self, path: str) -> Segment:
        return next(segment for segment in self.segments if path.startswith(segment.stem))

    def release(self) -> None:
        self.segments.release()


def _offsets_of(names: set[str], suffix: str) -> list[int]:
    length = 20 + len(suffix)
    return [int(name[:20]) for name in names if len(name) == length and name.endswith(suffix) and name[:20].isdecimal()]
