"""Directories of Kafka in which retention has deleted the first segments, and whose leader epochs begin with them."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable

import pytest

from tests.unit.storage.batches import NOW, TOPIC_ID, Logs, QuickDisk, idempotent, offsets_of, records_of
from tests.unit.storage.cleaning import clean
from tidelog.protocol.uuids import uuid_to_text
from tidelog.storage.files.checkpoints import encode_partition_metadata
from tidelog.storage.files.disk import File, OsDisk
from tidelog.storage.log.deleted_start import forget_deleted_start, is_start_deleted
from tidelog.storage.log.verification import MISSING, LogFacts, StoppedLog

MakeLogs = Callable[..., Logs]
COUNT = 12
PER_SEGMENT = 2


def record(n: int) -> memoryview:
    return idempotent(n, key=b"%02d" % n, value=bytes(30), timestamp=NOW + n)


def made_by_kafka(
    logs: MakeLogs, count: int, *, snapshots: bool = True, filed: bytes = b"0\n3\n0 0\n1 5\n2 8\n", **settings: object
) -> Logs:
    """A log with `count` deleted segments of two offsets each, as Kafka leaves it when it stops at once."""
    made = logs(segment_bytes=PER_SEGMENT * len(record(0)), **settings)
    for n in range(COUNT):
        made.append(record(n), epoch=(n >= 5) + (n >= 8))
    assert [each.base_offset for each in made.log.segments] == list(range(0, COUNT, PER_SEGMENT))
    made.close()
    for base in range(0, count * PER_SEGMENT, PER_SEGMENT):
        if snapshots:
            (made.folder / f"{base:020d}.snapshot").touch()
        for path in made.folder.glob(f"{base:020d}.*"):
            path.rename(f"{path}.deleted")
    (made.folder / "leader-epoch-checkpoint").write_bytes(filed)
    (made.folder / "partition.metadata").write_text(f"version: 0\ntopic_id: {uuid_to_text(TOPIC_ID)}")
    return made


def epochs_of(made: Logs) -> str:
    return (made.folder / "leader-epoch-checkpoint").read_text()


@pytest.mark.parametrize(
    ("count", "filed"), [(1, "0\n3\n0 2\n1 5\n2 8\n"), (3, "0\n2\n1 6\n2 8\n"), (4, "0\n1\n2 8\n"), (5, "0\n1\n2 10\n")]
)
@pytest.mark.parametrize("policy", [{"delete"}, {"compact", "delete"}])
def test_the_log_begins_behind_segments_that_retention_has_deleted(
    logs: MakeLogs, count: int, filed: str, policy: set[str]
) -> None:
    """It began with them, and they counted as lost: a consumer stood still at the first offset."""
    made = made_by_kafka(logs, count, cleanup_policy=frozenset(policy))
    facts = LogFacts(is_clean=True, high_watermark=COUNT, is_compacted="compact" in policy)
    missing = [each for each in StoppedLog(OsDisk(), str(made.folder), facts).verify() if each.kind == MISSING]
    assert not missing
    for is_killed in (True, False):
        log = made.open()
        assert (log.log_start_offset, log.damaged_ranges()) == (count * PER_SEGMENT, [])
        assert offsets_of(records_of(log)) == list(range(count * PER_SEGMENT, COUNT))
        assert epochs_of(made) == filed
        assert not made.files("*.deleted")
        made.kill() if is_killed else made.close()


def test_a_kill_after_the_leader_epochs_are_written_changes_nothing(logs: MakeLogs) -> None:
    made = made_by_kafka(logs, 2)
    for _ in range(2):
        names = {path.name for path in made.folder.iterdir()}
        forget_deleted_start(OsDisk(), str(made.folder), names, may_be_cleaned=False)
        assert epochs_of(made) == "0\n3\n0 4\n1 5\n2 8\n"
    log = made.open()
    assert (log.log_start_offset, log.damaged_ranges()) == (4, [])


@pytest.mark.parametrize("policy", [{"delete"}, {"compact", "delete"}])
def test_the_first_segment_of_all_has_no_snapshot_of_producers(logs: MakeLogs, policy: set[str]) -> None:
    made = made_by_kafka(logs, 1, snapshots=False, cleanup_policy=frozenset(policy))
    log = made.open()
    assert (log.log_start_offset, log.damaged_ranges()) == (2, [])


@pytest.mark.parametrize(("deleted_count", "count"), [(2, 0), (2, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_last_records_of_a_deleted_segment_may_have_been_removed_by_a_cleaner(
    logs: MakeLogs, deleted_count: int, count: int, is_killed: bool
) -> None:
    """Kafka's leaves no batch without records there. The segment did not reach the first one, and counted as lost: by
    a start after a loss of power, which Kafka's log cannot tell from a kill, with all that was behind it.
    """
    made = made_by_kafka(logs, deleted_count, cleanup_policy=frozenset({"compact", "delete"}))
    first = deleted_count * PER_SEGMENT
    last = made.folder / f"{first - PER_SEGMENT:020d}.log.deleted"
    last.write_bytes(last.read_bytes()[: count * len(record(2))])
    if is_killed:
        for name in (".kafka_cleanshutdown", "recovery-point-offset-checkpoint"):
            (made.path / name).unlink()
    log = made.open()
    assert (log.log_start_offset, log.damaged_ranges()) == (first, [])
    assert offsets_of(records_of(log)) == list(range(first, COUNT))


def test_a_kill_between_the_renames_of_a_segment_changes_nothing(logs: MakeLogs) -> None:
    made = made_by_kafka(logs, 2)
    for suffix in ("index", "timeindex"):
        path = made.folder / f"{2:020d}.{suffix}"
        path.with_name(f"{path.name}.deleted").rename(path)
    log = made.open()
    assert (log.log_start_offset, log.damaged_ranges()) == (4, [])


WITH_INDEXES = {
    "a segment behind those that the leader epochs lack": 4, "a segment behind a truncation to a higher offset": 6,
}  # fmt: skip
"""Cases in which a segment of a cleaned log is lost with its indexes: the offset with which the leader epochs begin."""
CLEANED = (
    "a cleaned segment", "a segment behind a cleaned one", "all but a time index",
    "a deleted segment that reaches into the first one",
)  # fmt: skip
"""Other cases of a cleaned log."""


@pytest.mark.parametrize(
    "case",
    [
        "no deleted file", "a lost segment behind", "a damaged deleted segment", "a truncation to a higher offset",
        "an unfinished cleaning", "an unfinished emptying", "a cleaned segment", "a segment behind a cleaned one",
        "a segment with the name of one that was truncated", "a segment behind those that the leader epochs lack",
        "a segment behind a truncation to a higher offset", "a log that is not Kafka's any more",
        "a segment before the deleted ones", "a segment with its indexes", "all but a time index",
        "a deleted segment that reaches into the first one", "a log without a topic id",
    ],
)  # fmt: skip
def test_a_lost_segment_is_damage_whatever_was_deleted_before(logs: MakeLogs, case: str) -> None:
    is_cleaned = case in CLEANED or case in WITH_INDEXES
    policy = frozenset({"compact", "delete"}) if is_cleaned else frozenset({"delete"})
    start = 4 if case == "a truncation to a higher offset" else WITH_INDEXES.get(case, 0)
    filed = b"0\n1\n2 %d\n" % start
    made = made_by_kafka(logs, 2, filed=filed, cleanup_policy=policy)
    last = made.folder / f"{2:020d}.log.deleted"
    if case == "no deleted file":
        for path in made.folder.glob("*.deleted"):
            path.unlink()
    elif case in ("a cleaned segment", "a segment with the name of one that was truncated"):
        shutil.copy(made.folder / f"{0:020d}.index.deleted", made.folder / f"{0:020d}.index")
    elif case in ("a lost segment behind", "a segment behind a cleaned one", "a truncation to a higher offset"):
        (made.folder / f"{4:020d}.log").unlink()
    elif case in WITH_INDEXES:
        for path in [path for path in made.folder.glob("*.*") if path.name[:20] in (f"{4:020d}", f"{start:020d}")]:
            path.unlink()
    elif case == "a log that is not Kafka's any more":
        (made.folder / "partition.metadata").write_bytes(encode_partition_metadata(TOPIC_ID))
    elif case in ("a segment before the deleted ones", "a segment with its indexes", "all but a time index"):
        left = made.folder / f"{4:020d}.timeindex"
        for path in made.folder.glob(f"{0 if 'before' in case else 4:020d}.*"):
            if case != "all but a time index" or path != left:
                path.unlink()
    elif case == "a deleted segment that reaches into the first one":
        last.write_bytes(last.read_bytes() + (made.folder / f"{4:020d}.log").read_bytes())
    elif case == "a log without a topic id":
        (made.folder / "partition.metadata").unlink()
    elif case == "a damaged deleted segment":
        data = bytearray(last.read_bytes())
        data[8:12] = bytes(4)
        last.write_bytes(data)
    elif case == "an unfinished cleaning":
        shutil.copy(last, made.folder / f"{6:020d}.log.cleaned")
    elif case == "an unfinished emptying":
        (made.folder / "emptying").touch()
    names = {path.name for path in made.folder.iterdir()}
    assert not is_start_deleted(OsDisk(), str(made.folder), names, start, may_be_cleaned=is_cleaned)
    if case != "an unfinished emptying":
        [(_, damage)] = made.open().damaged_ranges()
        assert damage.first_offset == start


def test_a_first_segment_that_is_lost_with_its_indexes_after_a_cleaning_is_damage(logs: MakeLogs) -> None:
    """The files from which it was made are there for a minute. They counted as deleted by retention."""
    made = logs(cleanup_policy=frozenset({"compact", "delete"}))
    for n in (0, 1):
        made.append(record(n))
    made.log.roll(NOW)
    made.append(record(2))
    clean(made.log)
    made.close()
    assert made.files("*.deleted")
    for suffix in ("log", "index", "timeindex"):
        (made.folder / f"{0:020d}.{suffix}").unlink()
    [(_, damage)] = made.open().damaged_ranges()
    assert (damage.first_offset, damage.end_offset) == (0, 2)


def test_a_deleted_file_that_cannot_be_read_does_not_keep_the_log_from_opening(
    logs: MakeLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_by_kafka(logs, 2)
    opened = QuickDisk.open

    def failing(disk: QuickDisk, path: str, *, create: bool = False) -> File:
        if path.endswith(".deleted"):
            raise OSError(errno.EIO, "Input/output error", path)
        return opened(disk, path, create=create)

    monkeypatch.setattr(QuickDisk, "open", failing)
    [(_, damage)] = made.open().damaged_ranges()
    assert (damage.first_offset, damage.end_offset) == (0, 4)


def test_a_start_that_the_leader_epochs_confirm_stays(logs: MakeLogs) -> None:
    """The rest of an earlier deletion says nothing of a segment that is lost later."""
    made = made_by_kafka(logs, 2, filed=b"0\n1\n2 4\n")
    assert made.open().log_start_offset == 4
