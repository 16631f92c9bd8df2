"""Repairs from replicas that have only a part of what is damaged here, and repairs that the log outruns."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.unit.broker.repairing import RepairedReplica
from tests.unit.storage.batches import NOW, Logs, QuickDisk, idempotent, marker, records_of
from tests.unit.storage.test_damage import batches_of
from tidelog.broker.replicas.fetching.follower_answers import Tail
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import PeerUnreachable
from tidelog.storage.files.disk import Buffer, File
from tidelog.storage.log import recovery, repair
from tidelog.storage.log.repair import NoRoom, NoSpace
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.reader import ColdRead

COUNT = 40


class SmallDisk(QuickDisk):
    """A volume with `free` bytes, `free_then` after a temporary file was begun; writing to temporary files fails after
    `fails_after` more bytes.
    """

    __slots__ = ("fails_after", "free", "free_then")

    def __init__(self) -> None:
        self.free = self.free_then = 1 << 40
        self.fails_after = 1 << 40

    def volume_bytes(self, path: str) -> tuple[int, int]:
        return 1 << 40, self.free

    def open(self, path: str, *, create: bool = False) -> File:
        file: Any = super().open(path, create=create)
        if path.endswith(".tmp"):
            self.free = min(self.free, self.free_then)
            write = file.write_at

            def write_at(data: Buffer, position: int) -> int:
                if position + len(data) > self.fails_after:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
                return int(write(data, position))

            file.write_at = write_at
        return file


def scrub_all(log: Any) -> None:
    for segment in list(log.segments):
        scrub = Scrub(log, segment)
        scrub.run(10**9)
        scrub.finish()


class Replica:
    """One replica of three segments, with batches of two records."""

    def __init__(self, path: Path) -> None:
        self.disk = SmallDisk()
        self.logs = Logs(path, LogConfig(segment_bytes=2900, index_interval_bytes=300), self.disk)
        for n in range(COUNT):
            self.logs.append(idempotent(2 * n, count=2, value=b"%03d" % n * 20, timestamp=NOW + n))
        assert self.log.segment_count == 3

    @property
    def log(self) -> Any:
        return self.logs.log

    def damage(self, first: int, count: int, *, segment: int = 0, cut: bool = False) -> set[int]:
        """Zero or cut out `count` batches of a segment. Returns their offsets."""
        path = self.logs.folder / self.logs.files("*.log")[segment]
        data, base = path.read_bytes(), self.log.segments[segment].base_offset
        batches = batches_of(path)
        start, end = batches[first][0], sum(batches[first + count - 1])
        path.write_bytes(data[:start] + (b"" if cut else bytes(end - start)) + data[end:])
        scrub_all(self.log)
        return set(range(base + 2 * first, base + 2 * (first + count)))

    def fetch(self, offset: int, bytes_max: int) -> bytes:
        while True:
            try:
                result = self.log.read(offset, bytes_max, self.log.log_end_offset)
                return b"".join(bytes(region) for region in result.regions)
            except ColdRead as cold:
                cold.warm()
            except DamagedRecords:
                raise KafkaError(ErrorCode.CORRUPT_MESSAGE) from None

    def lacks(self) -> set[int]:
        lacked = set()
        for offset in range(self.log.log_start_offset, 2 * COUNT):
            try:
                data = self.fetch(offset, 1)
                assert int.from_bytes(data[:8], "big") == offset // 2 * 2
            except KafkaError:
                lacked.add(offset)
        return lacked


class Cluster(RepairedReplica):
    """Broker 1 repairs its log from the others."""

    def __init__(self, tmp_path: Path, others: int = 1) -> None:
        self.replicas = [Replica(tmp_path / str(number)) for number in range(1 + others)]
        self.here = self.replicas[0]
        self.before_check: Callable[[], object] = lambda: None
        self.away: set[int] = set()
        super().__init__(self.here.log, lambda: range(1, 1 + others))

    async def run(self, work: Callable[[], None]) -> None:
        self.before_check()
        work()

    async def fetch(
        self, partition: object, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = 1 << 20
    ) -> bytes:
        if source in self.away:
            raise PeerUnreachable("it is away")
        return self.replicas[source].fetch(offset, bytes_max)

    async def repair(self) -> None:
        for _ in range(6):
            await self.repairs._repair(self.partition)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("segment", [0, 2])
@pytest.mark.parametrize(("own", "other"), [((2, 6), (5, 6)), ((5, 6), (2, 6)), ((2, 6), (4, 2)), ((8, 3), (2, 7))])
async def test_of_two_overlapping_damages_only_what_is_damaged_on_both_is_lost(
    tmp_path: Path, own: tuple[int, int], other: tuple[int, int], segment: int, cut: bool
) -> None:
    cluster = Cluster(tmp_path)
    lost = cluster.replicas[1].damage(*other, segment=segment)
    lost &= cluster.here.damage(*own, segment=segment, cut=cut)
    assert lost
    await cluster.repair()
    assert cluster.here.lacks() == lost
    size_bytes = cluster.here.log.size_bytes
    await cluster.repair()
    assert cluster.here.log.size_bytes == size_bytes, "an attempt that does not help leaves nothing behind"
    assert cluster.repairs._is_lost(cluster.partition)
    cluster.here.logs.close_and_open()
    assert cluster.here.lacks() == lost
    assert not cluster.refused


@pytest.mark.parametrize(("leader", "behind"), [(0, 0), (1, 0), (2, 0), (0, 4), (1, 4)])
async def test_a_follower_whose_log_ends_at_the_damage_has_no_copy(tmp_path: Path, leader: int, behind: int) -> None:
    """The leader waited for it for ever, and it for the leader. Its readers were to try again, also for ever."""
    cluster = Cluster(tmp_path, others=2)
    lost = cluster.here.damage(5, 2)
    assert cluster.replicas[1].damage(5, 2) == lost
    cluster.replicas[2].log.truncate_to(min(lost) - behind)
    assignment: Any = SimpleNamespace(leader=leader, isr=[0, 1])
    cluster.repairs.assignment_of = lambda partition: assignment
    await cluster.repair()
    # A leader whose log ends there has this one cut.
    code = ErrorCode.KAFKA_STORAGE_ERROR if leader == 2 else ErrorCode.CORRUPT_MESSAGE
    assert cluster.repairs.report(cluster.partition) == code
    assert cluster.here.lacks() == lost
    await cluster.repairs.close()


async def without_producers(tmp_path: Path) -> tuple[Cluster, set[int], set[int]]:
    """A start has found two damaged ranges, of which the other replica has the second one. Both, by their offsets."""
    cluster = Cluster(tmp_path)
    lost, repaired = cluster.here.damage(2, 2), cluster.here.damage(6, 2, segment=1)
    cluster.replicas[1].damage(2, 2)
    cluster.here.logs.close()
    for name in cluster.here.logs.files("*.snapshot"):
        (cluster.here.logs.folder / name).unlink()
    cluster.partition.log = cluster.here.logs.open()
    assert cluster.here.log.lacks_producers
    return cluster, lost, repaired


@pytest.mark.parametrize("away_first", [True, False])
async def test_producers_append_again_where_one_range_is_lost_and_the_other_one_repaired(
    tmp_path: Path, away_first: bool
) -> None:
    """Where the lost one was decided first, their batches were refused for ever, to be sent again."""
    cluster, lost, _ = await without_producers(tmp_path)
    if away_first:
        cluster.away = {1}
        await cluster.repair()
        assert cluster.here.log.lacks_producers
        cluster.away = set()
    await cluster.repair()
    assert cluster.here.lacks() == lost
    for number in (COUNT - 1, COUNT):  # the first one is a duplicate
        cluster.here.logs.append(idempotent(2 * number, count=2))
    assert cluster.here.log.log_end_offset == 2 * COUNT + 2


async def test_a_lost_range_is_reported_as_lost_while_another_one_may_still_be_repaired(tmp_path: Path) -> None:
    """Its readers tried again for as long as a replica with the other range was away."""
    cluster, lost, repaired = await without_producers(tmp_path)
    fetch = cluster.fetch

    async def lack(partition: object, source: int, offset: int, **options: Any) -> bytes:
        if offset in repaired:
            raise PeerUnreachable("it is away")
        return await fetch(partition, source, offset, **options)

    cluster.repairs.fetch = lack
    await cluster.repair()
    assert cluster.here.lacks() == lost | repaired
    codes = [cluster.repairs.report(cluster.partition, each) for _, each in cluster.here.log.damaged_ranges()]
    assert codes == [ErrorCode.CORRUPT_MESSAGE, ErrorCode.KAFKA_STORAGE_ERROR]
    assert cluster.here.log.lacks_producers
    await cluster.repairs.close()


@pytest.mark.parametrize("left_bytes", [0, 7])
async def test_a_rest_without_bytes_stays_damaged_in_a_compacted_log(tmp_path: Path, left_bytes: int) -> None:
    """A range without bytes looks like a gap that the cleaner left: its records would not be looked for again."""
    cluster = Cluster(tmp_path, others=2)
    for replica in cluster.replicas:
        replica.log.set_config(replace(replica.log.config, cleanup_policy=frozenset({"compact"})))
    lost = cluster.replicas[1].damage(2, 3)
    path = cluster.here.logs.folder / cluster.here.logs.files("*.log")[0]
    os.truncate(path, batches_of(path)[2][0] + left_bytes)
    scrub_all(cluster.here.log)
    cluster.away = {2}
    await cluster.repair()
    assert cluster.here.lacks() == lost
    scrub_all(cluster.here.log)
    assert cluster.here.lacks() == lost
    cluster.here.logs.close_and_open()
    cluster.partition.log = cluster.here.log
    assert cluster.here.lacks() == lost
    cluster.away = set()
    await cluster.repair()
    assert cluster.here.lacks() == set()


@pytest.mark.parametrize("is_last", [False, True])
def test_a_copied_start_leaves_bytes_for_the_rest_in_a_compacted_log(tmp_path: Path, is_last: bool) -> None:
    """It may be as long as all that was left here of the range: the rest looked like what a cleaner has removed."""
    replica, whole = Replica(tmp_path / "0"), Replica(tmp_path / "1")
    path = replica.logs.folder / replica.logs.files("*.log")[0]
    data, batches = path.read_bytes(), batches_of(path)
    first = len(batches) - 3 if is_last else 2
    start, size_bytes = batches[first]
    rest = b"" if is_last else bytes(2 * size_bytes) + data[start + 3 * size_bytes :]
    path.write_bytes(data[:start] + rest)
    replica.logs.close_and_open()
    replica.log.set_config(replace(replica.log.config, cleanup_policy=frozenset({"compact"})))
    segment = replica.log.segments[0]
    segment.may_end_early = is_last
    assert replica.lacks() == set(range(2 * first, 2 * first + 6))
    (damage,) = segment.damage
    work = replica.log.repair_of(segment, damage)
    for offset in (2 * first, 2 * first + 2):
        work.accept(memoryview(whole.fetch(offset, 1)))
    check = work.finish_part()
    check.run()
    assert replica.log.finish_repair(check)
    assert replica.lacks() == {2 * first + 4, 2 * first + 5}
    scrub_all(replica.log)
    assert replica.lacks() == {2 * first + 4, 2 * first + 5}
    work = replica.log.repair_of(segment, segment.damage[0])
    work.accept(memoryview(whole.fetch(2 * first + 4, 1)))
    check = work.finish()
    check.run()
    assert replica.log.finish_repair(check)
    assert replica.lacks() == set()
    assert path.read_bytes() == data


async def test_an_answer_with_the_damaged_bytes_is_not_sent_again_after_the_repair(tmp_path: Path) -> None:
    """It is kept until the log grows or the leader changes: the followers of an idle partition refused it for ever."""
    cluster = Cluster(tmp_path)
    tail = cluster.partition.watch.tail = Tail()
    position = {"correlation_id": 1, "session_id": 1, "max_bytes": 1 << 10}
    partition = cluster.partition = Mock(topic="t", index=0, log=cluster.here.log, offline=False, leads=True)
    partition.watch.tail, partition.topic_id = tail, bytes(16)
    whole, _ = tail.frame(partition, 2, **position)
    assert isinstance(whole, bytes)
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    tail._frame = bytes(damaged)
    assert tail.frame(partition, 2, **position)[0] == damaged, "it is kept"
    cluster.here.damage(2, 2)
    await cluster.repair()
    assert cluster.here.lacks() == set()
    assert tail.frame(partition, 2, **position)[0] == whole


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("own", [(6, 20), (12, 3)])
async def test_the_start_of_a_damaged_tail_is_copied_where_the_other_lacks_the_rest(
    tmp_path: Path, own: tuple[int, int], cut: bool
) -> None:
    """The tail of a segment that is not appended to."""
    cluster = Cluster(tmp_path)
    count = len(batches_of(cluster.here.logs.folder / cluster.here.logs.files("*.log")[0]))
    first = min(own[0], count - 2)
    lost = cluster.replicas[1].damage(count - 1, 1)
    cluster.here.damage(first, count - first, cut=cut)
    await cluster.repair()
    assert cluster.here.lacks() == lost


@pytest.mark.parametrize("is_followed", [False, True])
@pytest.mark.parametrize("own", [(2, 6), (4, 1), (4, 3), (3, 2), (1, 6)])
async def test_what_lies_behind_a_log_start_within_the_damage_is_repaired(
    tmp_path: Path, own: tuple[int, int], is_followed: bool
) -> None:
    """The others have deleted the records before it (retention, DeleteRecords); this replica, too, or not yet."""
    cluster = Cluster(tmp_path)
    cluster.here.damage(*own)
    cluster.replicas[1].log.delete_records(9)
    if is_followed:
        cluster.here.log.delete_records(9)
    await cluster.repair()
    cluster.here.log.delete_records(9)
    assert cluster.here.lacks() == set()
    assert not cluster.here.log.damaged_ranges()


@pytest.mark.parametrize(
    ("in_sync", "committed_end", "is_repaired"), [({1}, 2 * COUNT, True), ({1}, 10, False), (set(), 2 * COUNT, False)]
)
async def test_the_end_of_a_damage_is_taken_as_committed_where_the_epoch_file_says_otherwise(
    tmp_path: Path, in_sync: set[int], committed_end: int, is_repaired: bool
) -> None:
    """A loss of power leaves an old epoch file. What lies before the log start stays damaged, as nobody has it."""
    cluster = Cluster(tmp_path)
    here = cluster.here.log
    for replica in cluster.replicas:
        replica.log.truncate_to(8)
        for n in range(4, COUNT):
            replica.logs.append(idempotent(2 * n, count=2, value=b"%03d" % n * 20, timestamp=NOW + n), epoch=1)
    here.leader_epochs.clear()
    for epoch, start in ((0, 0), (1, 12)):
        here.leader_epochs.assign(epoch, start)
    cluster.here.damage(2, 6)
    for replica in cluster.replicas:
        replica.log.delete_records(8)

    async def fetch(
        partition: object, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = 1 << 20
    ) -> bytes:
        end = 2 * COUNT if up_to_log_end else committed_end
        data = await cluster.fetch(partition, source, offset, up_to_log_end=up_to_log_end, bytes_max=bytes_max)
        return b"".join(
            data[at : at + header.size_bytes] for at, header in iter_headers(data) if header.next_offset <= end
        )

    cluster.repairs.fetch = fetch
    cluster.repairs.in_sync = lambda partition: in_sync
    await cluster.repair()
    assert cluster.here.lacks() == (set() if is_repaired else set(range(8, 12)))
    if is_repaired:
        assert list(here.leader_epochs) == [(1, 8)], "else a scrub after a restart would doubt the batches again"
    assert not cluster.refused


@pytest.mark.parametrize("start", [8, 9])
async def test_a_lost_first_file_is_repaired_where_the_log_start_lies_inside_of_a_batch(
    tmp_path: Path, start: int
) -> None:
    cluster = Cluster(tmp_path, 2)
    for replica in cluster.replicas:
        replica.log.delete_records(start)
    here = cluster.here.logs
    here.close()
    (here.folder / here.files("*.log")[0]).unlink()
    cluster.partition.log = here.open()
    assert cluster.here.lacks() == set(range(start, here.log.segments[1].base_offset))
    await cluster.repair()
    assert (here.log.log_start_offset, here.log.log_end_offset) == (start, 2 * COUNT)
    assert cluster.here.lacks() == set()
    assert not cluster.repairs._lost_ranges


@pytest.mark.parametrize("left_bytes", [100, 200, 300])
async def test_what_is_left_of_a_batch_does_not_swallow_the_copy_behind_it(tmp_path: Path, left_bytes: int) -> None:
    """The length of its record reaches into the copy, whose zeros pass for the end of that record."""
    cluster = Cluster(tmp_path)
    for replica in cluster.replicas:
        replica.log.roll(NOW)
        for number, size in enumerate((600, *[100] * 4)):
            replica.logs.append(idempotent(0, count=2, value=bytes(size), producer_id=8 + number))
    big = 2 * COUNT
    cluster.replicas[1].log.delete_records(big + 4)
    here = cluster.here.logs
    here.log.delete_records(big + 4)
    here.close()
    path = here.folder / here.files("*.log")[-1]
    position = next(at for at, size in batches_of(path) if size > 1200)
    os.truncate(path, position + left_bytes)
    cluster.partition.log = here.open()
    await cluster.repair()
    assert (here.log.log_start_offset, here.log.log_end_offset) == (big + 4, big + 10)
    for offset in range(big + 4, big + 10):
        assert int.from_bytes(cluster.here.fetch(offset, 1)[:8], "big") == offset // 2 * 2


async def test_three_replicas_piece_a_range_together(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, others=2)
    cluster.here.damage(2, 8)
    cluster.replicas[1].damage(2, 6)
    cluster.replicas[2].damage(4, 6)
    await cluster.repair()
    assert cluster.here.lacks() == {8 + each for each in range(8)}


@pytest.mark.parametrize("space", ["little is left", "it ends in between", "other repairs take it"])
async def test_a_full_volume_is_no_reason_to_give_up_the_directory(tmp_path: Path, space: str) -> None:
    cluster = Cluster(tmp_path)
    disk = cluster.here.disk
    lost = cluster.here.damage(2, 6, cut=True)
    if space == "little is left":
        disk.free = 50_000
    elif space == "other repairs take it":  # all of them began when there was enough for each
        disk.free_then = 50_000
    else:
        disk.fails_after = 1000
    await cluster.repair()
    assert not cluster.refused
    assert cluster.here.lacks() == lost
    assert cluster.partition in cluster.repairs._without_space
    assert not list(cluster.here.logs.folder.glob("*.tmp")), "its space is free again"
    disk.free = disk.free_then = disk.fails_after = 1 << 40
    await cluster.repair()
    assert cluster.here.lacks() == set()


async def test_a_lost_segment_waits_for_space(tmp_path: Path) -> None:
    """Its copy filled the volume, and left no space for appends."""
    cluster = Cluster(tmp_path)
    here, disk = cluster.here.logs, cluster.here.disk
    name = here.files("*.log")[1]
    here.close()
    (here.folder / name).unlink()
    cluster.partition.log = here.open()
    lost = cluster.here.lacks()
    disk.free = 50_000
    await cluster.repair()
    assert not cluster.refused
    assert cluster.here.lacks() == lost
    assert cluster.partition in cluster.repairs._without_space
    disk.free = 1 << 40
    await cluster.repair()
    assert cluster.here.lacks() == set()


@pytest.mark.parametrize("step", ["a segment is sealed", "gaps are explained"])
async def test_the_small_files_of_a_repair_wait_for_space(tmp_path: Path, step: str) -> None:
    """The log directory went offline where there was none."""
    cluster = Cluster(tmp_path)
    log = cluster.here.log
    cluster.here.damage(2, 6, cut=False)
    cluster.here.lacks()  # has the damage detected
    ((segment, damage),) = log.damaged_ranges()
    before = len(log.segments), log.gaps_explained_below
    steps = {
        "a segment is sealed": lambda: cluster.repairs._roll(cluster.partition, NoRoom("it does not fit")),
        "gaps are explained": lambda: cluster.repairs._accept_gap(cluster.partition, segment, damage),
    }
    cluster.here.disk.free = 0
    with pytest.raises(NoSpace):
        steps[step]()
    assert (len(log.segments), log.gaps_explained_below) == before


def quota_of(monkeypatch: pytest.MonkeyPatch, disk: SmallDisk, code: int) -> Callable[[], None]:
    """From now on no new file can be made, and no file can grow, though the volume says that it has space. Until the
    function that is returned is called.
    """
    is_over: list[bool] = []
    write_file, opened = QuickDisk.write_file, SmallDisk.open

    def full(path: str) -> OSError:
        return OSError(code, os.strerror(code), path)

    def refuse(self: SmallDisk, path: str, data: Buffer, *, sync: bool) -> None:
        if self is disk and not is_over and not os.path.exists(path):
            raise full(path)
        write_file(self, path, data, sync=sync)

    def limited(self: SmallDisk, path: str, *, create: bool = False) -> File:
        if self is disk and create and not is_over and not os.path.exists(path):
            raise full(path)
        file: Any = opened(self, path, create=create)
        write = file.write_at

        def write_at(data: Buffer, position: int) -> int:
            if self is disk and not is_over and position + len(data) > file.size_bytes():
                raise full(path)
            return int(write(data, position))

        file.write_at = write_at
        return file

    monkeypatch.setattr(SmallDisk, "write_file", refuse)
    monkeypatch.setattr(SmallDisk, "open", limited)
    return lambda: is_over.append(True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("where", ["a new segment is needed", "a segment is written anew", "a file has grown shorter"])
async def test_a_quota_that_the_volume_does_not_show_is_no_reason_to_give_up_the_directory(
    tmp_path: Path, where: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path)
    here = cluster.here
    number = {"a new segment is needed": 2, "a segment is written anew": 0, "a file has grown shorter": 1}[where]
    if where == "a file has grown shorter":
        path = here.logs.folder / here.logs.files("*.log")[number]
        os.truncate(path, batches_of(path)[4][0])
        scrub_all(here.log)
        lost = here.lacks()
    else:
        lost = here.damage(2, 6, segment=number, cut=True)
    here.log.segments.release()
    end_quota = quota_of(monkeypatch, here.disk, code)
    await cluster.repair()
    assert not cluster.refused
    assert here.log.failure is None
    assert here.lacks() == lost
    assert cluster.partition in cluster.repairs._without_space
    end_quota()
    await cluster.repair()
    assert here.lacks() == set()
    here.logs.append(idempotent(2 * COUNT, count=2))
    assert len(records_of(here.logs.close_and_open())) == 2 * COUNT + 2


async def test_a_quota_while_missing_records_are_taken_is_no_reason_to_give_up_the_directory(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    async def fail(*_: object) -> None:
        raise error

    cluster.repairs._explain = fail
    cluster.repairs._gaps[cluster.partition] = 1, 2
    assert not await cluster.repairs._repair(cluster.partition)
    assert not cluster.refused
    assert cluster.partition in cluster.repairs._without_space
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    cluster.repairs._gaps[cluster.partition] = 1, 2
    assert not await cluster.repairs._repair(cluster.partition)
    assert cluster.refused == [error]


def delete_segment(cluster: Cluster) -> None:
    log = cluster.here.log
    log.delete_records(log.segments[1].base_offset)
    log.segments.condemn_first(1)
    log.rename_condemned(log.log_start_offset, NOW)


OUTRUN: dict[str, Callable[[Cluster], object]] = {
    "the log is truncated": lambda cluster: cluster.here.log.truncate_to(2),
    "the log is emptied": lambda cluster: cluster.here.log.truncate_fully_and_start_at(100),
    "retention deletes the segment": delete_segment,
    "the topic is deleted": lambda cluster: cluster.here.logs.directory.delete_log("t", 0, NOW),
    "the directory has failed": lambda cluster: cluster.here.logs.directory.fail("the device is gone"),
    "a move ends": lambda cluster: move(cluster),
}


def move(cluster: Cluster) -> None:
    cluster.partition.log = cluster.replicas[1].log
    cluster.here.logs.directory.delete_log("t", 0, NOW)


@pytest.mark.parametrize("what", OUTRUN)
@pytest.mark.parametrize("cut", [False, True])
async def test_a_log_that_changes_before_the_repair_reaches_its_file_stays_in_use(
    tmp_path: Path, what: str, cut: bool
) -> None:
    """An error that only says that the file is gone would fail the partition, and with it the log directory."""
    cluster = Cluster(tmp_path)
    cluster.here.damage(2, 6, cut=cut)
    done: list[int] = []

    def once() -> None:
        if not done:
            done.append(1)
            OUTRUN[what](cluster)

    cluster.before_check = once
    await cluster.repairs._repair(cluster.partition)
    assert done
    assert not cluster.refused


async def test_a_file_that_is_removed_while_it_is_open_is_there_again_after_a_repair_of_another_length(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path)
    cluster.here.damage(2, 6, cut=True)
    assert cluster.here.log.segments[0].file
    (cluster.here.logs.folder / cluster.here.logs.files("*.log")[0]).unlink()
    await cluster.repair()
    assert not cluster.refused
    assert cluster.here.lacks() == set()
    cluster.here.logs.close_and_open()
    assert cluster.here.lacks() == set()


async def test_a_file_that_is_cut_further_meanwhile_is_examined_and_repaired(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.here.damage(6, 3, cut=True)
    path = cluster.here.logs.folder / cluster.here.logs.files("*.log")[0]
    cluster.before_check = lambda: os.truncate(path, 300) if path.stat().st_size < 2000 and not cluster.refused else 0
    await cluster.repairs._repair(cluster.partition)
    cluster.before_check = lambda: None
    await cluster.repair()
    assert not cluster.refused
    assert cluster.here.lacks() == set()


@pytest.mark.parametrize("count", [1, 3, 12])
async def test_records_that_were_cut_once_and_came_back_with_an_old_copy_give_way(tmp_path: Path, count: int) -> None:
    """Else a leader with the old copy would serve them in the place of committed ones, and the others' would differ."""
    cluster = Cluster(tmp_path)
    here = cluster.here.logs
    here.close()
    shutil.copytree(here.folder, tmp_path / "old")
    here.open()
    for logs in (here, cluster.replicas[1].logs):
        logs.log.truncate_to(2 * (COUNT - count))
        logs.log.assign_epoch(1)
        for n in range(COUNT - count, COUNT + 5):
            logs.append(idempotent(2 * n, count=2, value=b"new" * 20, timestamp=NOW + n), epoch=1)
    expected = [(each.offset, each.value) for each in records_of(here.log)]
    here.close()
    shutil.rmtree(here.folder)
    shutil.copytree(tmp_path / "old", here.folder)
    here.open().assign_epoch(2)
    cluster.partition.log = here.log
    assert here.log.damaged_ranges()
    cluster.repairs.in_sync = lambda partition: {1, 2}
    for _ in range(4):
        await cluster.repair()
    assert not here.log.damaged_ranges()
    assert [(each.offset, each.value) for each in records_of(here.log)] == expected
    assert list(here.log.leader_epochs)[:2] == [(0, 0), (1, 2 * (COUNT - count))]


@pytest.mark.parametrize("lost", [[0, 1], [1], [1, 2, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("is_clean", [True, False])
async def test_the_copies_of_lost_segments_that_do_not_fit_one_get_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: list[int], is_clean: bool
) -> None:
    """Rows of an index have positions of 32 bits: with three lost segments of 1 GiB no repair and no start ended."""
    monkeypatch.setattr(repair, "MAX_POSITION", 1500)
    cluster = Cluster(tmp_path)
    for replica in cluster.replicas:
        for number in range(12):
            producer_id = 8 + number % 3
            sequence = number // 3 * 2
            sent = idempotent(sequence, 2, producer_id=producer_id, transactional=True, value=bytes(150))
            replica.logs.append(sent)
            replica.logs.append(marker(abort=number % 2 == 0, producer_id=producer_id), from_client=False)
        replica.log.roll(NOW)
        replica.logs.append(idempotent(0, 2, producer_id=50))
    other, here = cluster.replicas[1].log, cluster.here.logs
    copy, end = records_of(other), other.log_end_offset
    aborted = other.aborted_transactions(0, end)
    assert len(aborted) == 6
    names = here.files("*.log")
    assert len(names) > 4
    here.close() if is_clean else here.kill()
    for number in lost:
        (here.folder / names[number]).unlink()
    cluster.partition.log = here.open(machine_ran_on=True)
    scrub_all(here.log)
    assert here.log.damaged_ranges()
    for _ in range(3):
        await cluster.repair()
    assert not cluster.refused
    for _ in range(2):
        assert not here.log.damaged_ranges()
        assert records_of(here.log) == copy
        assert all(segment.size_bytes <= 2900 for segment in here.log.segments)
        segments = list(here.log.segments)
        assert [one.next_offset for one in segments[:-1]] == [one.base_offset for one in segments[1:]]
        assert sorted(here.log.aborted_transactions(0, end)) == sorted(aborted)
        for offset in range(0, end, 5):
            assert set(here.log.aborted_transactions(offset, end)) >= set(other.aborted_transactions(offset, end))
        assert {key: each.last_sequence for key, each in here.log.producers.entries.items()} == {
            key: each.last_sequence for key, each in other.producers.entries.items()
        }
        here.close_and_open()
        scrub_all(here.log)


async def test_a_restart_before_the_rest_is_copied_finds_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "MAX_POSITION", 1500)
    cluster = Cluster(tmp_path)
    here = cluster.here.logs
    names = here.files("*.log")
    here.close()
    (here.folder / names[1]).unlink()
    cluster.partition.log = here.open()
    lacked = cluster.here.lacks()
    await cluster.repairs._repair(cluster.partition)
    assert here.files("*.log") == names
    assert cluster.here.lacks() == lacked
    for is_clean in (True, False):
        here.close() if is_clean else here.kill()
        cluster.partition.log = here.open(machine_ran_on=True)
        assert cluster.here.lacks() == lacked
    await cluster.repair()
    assert cluster.here.lacks() == set()


@pytest.mark.parametrize("reaches", [2, 6])
async def test_a_leader_takes_what_it_has_committed_and_resigns_for_the_rest(tmp_path: Path, reaches: int) -> None:
    """Damage at the end of its log, of an earlier epoch. The follower's fetches met the damage, so it did not learn
    that its last records were committed. Each waited for the other until there was a new record. A coordinator that
    reads its log appends none.
    """
    cluster = Cluster(tmp_path)
    log = cluster.here.log
    log.roll(NOW)
    last = cluster.here.log.segments[-2]
    count = len(batches_of(Path(last.path)))
    lost = cluster.here.damage(count - 3, 3, segment=log.segment_count - 2)
    first, end_offset = min(lost), log.log_end_offset
    follower = cluster.replicas[1].log
    follower.truncate_to(first + reaches)
    log.assign_epoch(2)
    partition, repairs = cluster.partition, cluster.repairs
    partition.leads, partition.leader_epoch, partition.high_watermark = True, 2, follower.log_end_offset
    partition.resign.return_value = True

    async def fetch(
        partition: object, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = 1 << 20
    ) -> bytes:
        if offset > follower.log_end_offset:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
        if offset >= (follower.log_end_offset if up_to_log_end else first):
            return b""
        return cluster.replicas[1].fetch(offset, bytes_max)

    repairs.fetch = fetch
    repairs.assignment_of = lambda partition: SimpleNamespace(
        leader=1, isr=[1, 2], elr=[], replicas=[1, 2], leader_epoch=2, partition_epoch=1
    )
    repairs.in_sync = lambda partition: {0, 1}
    leaders: Any = repairs._damaged_leaders
    leaders._candidates, leaders._epochs_of = lambda partition: {1}, lambda partition: SimpleNamespace()
    await cluster.repair()
    left = [(damage.first_offset, damage.end_offset) for _, damage in log.damaged_ranges()]
    assert left == ([(first + reaches, end_offset)] if reaches < len(lost) else [])
    assert partition.resign.called == bool(left)
    assert cluster.here.lacks() == set(range(first + reaches, end_offset))


@pytest.mark.parametrize("is_compacted", [False, True])
@pytest.mark.parametrize("left_bytes", [20, 300])
@pytest.mark.parametrize("segment", [0, 2])
@pytest.mark.parametrize("first", [4, "last"])
@pytest.mark.parametrize("position_max", [400, 900])
async def test_a_longer_copy_behind_the_last_position_of_an_index_loses_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_compacted: bool,
    left_bytes: int,
    segment: int,
    first: Any,
    position_max: int,
) -> None:
    """The damaged bytes are fewer than those of the copy, which ends above 2 GiB. Within a segment the repair was tried
    again for ever.
    """
    monkeypatch.setattr(repair, "MAX_POSITION", position_max)
    cluster = Cluster(tmp_path)
    here = cluster.here
    for replica in cluster.replicas if is_compacted else ():
        replica.log.set_config(replace(replica.log.config, cleanup_policy=frozenset({"compact"})))
        replica.logs.config = replica.log.config
        replica.log.cleaned_offset = 0
    path = here.logs.folder / here.logs.files("*.log")[segment]
    batches = batches_of(path)
    number = len(batches) - 4 if first == "last" else first
    data, start, end = path.read_bytes(), batches[number][0], sum(batches[number + 3])
    assert end - start > left_bytes
    path.write_bytes(data[:start] + bytes(left_bytes) + data[end:])
    scrub_all(here.log)
    assert here.lacks()
    expected = records_of(cluster.replicas[1].log)
    for _ in range(3):
        await cluster.repair()
    for _ in range(2):
        assert not cluster.refused
        assert not here.lacks()
        assert not here.log.damaged_ranges()
        assert records_of(here.log) == expected
        here.logs.close_and_open()
        scrub_all(here.log)


async def test_the_next_attempt_does_what_a_shortage_interrupted_behind_a_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of committed records waited before the repaired ones for the next maintenance, up to five minutes."""
    cluster = Cluster(tmp_path)
    cluster.here.damage(2, 2)

    def run_short(log: object, repaired: object) -> bool:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patches:
        patches.setattr(recovery, "reveal", run_short)
        for _ in range(2):
            assert not await cluster.repairs._repair(cluster.partition)
            assert cluster.here.log.damaged_ranges() == []
            assert cluster.here.log.repairs_to_reveal
    assert await cluster.repairs._repair(cluster.partition)
    assert cluster.here.log.repairs_to_reveal == ()
    assert len(cluster.refused) == 2
