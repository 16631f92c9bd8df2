"""Repairs of damage that its segment cannot hold: the rest of the copy gets a segment of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.simulation.simulated_disk import PowerLoss, SimulatedDisk
from tests.unit.broker.repairing import RepairedReplica
from tests.unit.broker.test_repair_parts import Cluster, scrub_all
from tests.unit.storage.batches import NOW, TOPIC_ID, batch, offsets_of, read, records_of
from tests.unit.storage.test_damage import batches_of
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.log import repair
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.loader import Ending
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.log_config import LogConfig

FAR = 2**31 + 50


class Copies(RepairedReplica):
    """Two copies on simulated disks, which append the same batches as followers. The first one is repaired."""

    def __init__(self, config: LogConfig, seed: int = 0) -> None:
        self.config = config
        self.disks = [SimulatedDisk(Random(seed)) for _ in range(2)]
        for disk in self.disks:
            disk.make_directory("/data")
        directories = [self.open_directory(disk, Ending.CLEAN) for disk in self.disks]
        self.logs: list[Any] = [each.create_log("t", 0, TOPIC_ID, config, NOW) for each in directories]
        self.directory = directories[0]
        if config.is_compacted:
            self.directory.enter_in_cleaner_checkpoint(self.logs[0])
        super().__init__(self.logs[0], lambda: [1])
        in_sync: Any = lambda partition: {1}  # noqa: E731
        self.repairs.in_sync = in_sync

    def open_directory(self, disk: SimulatedDisk, ending: Ending) -> LogDirectory:
        directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id="c")
        if ending is not Ending.CLEAN:
            directory.ending = ending
        directory.load(lambda topic: self.config, NOW)
        return directory

    def follow(self, *offsets: int) -> None:
        for log in self.logs:
            for offset in offsets:
                sent = batch(1, base_offset=offset, leader_epoch=0, key=b"%d" % offset, value=b"v" * 40)
                log.append_as_follower(sent, NOW, may_have_gaps=True)
            log.set_high_watermark(log.log_end_offset)

    def roll(self) -> None:
        for log in self.logs:
            log.roll(NOW)

    def flush(self) -> None:
        self.logs[0].flush()
        self.directory.write_checkpoints()

    def open_again(self, ending: Ending) -> None:
        if ending is Ending.CLEAN:
            self.directory.close()
        if ending is Ending.POWER_LOSS:
            self.disks[0].lose_power()
        else:
            self.disks[0].end_process()
        self.start(ending)

    def start(self, ending: Ending) -> None:
        self.directory = self.open_directory(self.disks[0], ending)
        self.logs[0] = self.partition.log = self.directory.logs["t", 0]
        self.logs[0].set_high_watermark(self.logs[0].log_end_offset)

    def lose(self, ending: Ending, *bases: int) -> None:
        self.directory.close() if ending is Ending.CLEAN else None
        self.disks[0].end_process()
        for base in bases:
            self.disks[0].remove(f"/data/t-0/{base:020d}.log")
        self.disks[0].sync_everything()
        self.start(ending)

    async def fetch(
        self, partition: object, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = 1 << 20
    ) -> bytes:
        log = self.logs[1]
        if not log.log_start_offset <= offset <= log.log_end_offset:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
        return b"".join(bytes(region) for region in read(log, offset, bytes_max, log.log_end_offset).regions)

    async def repair(self) -> None:
        for _ in range(8):
            scrub_all(self.logs[0])
            if not self.logs[0].damaged_ranges():
                return
            await self.repairs._repair(self.partition)

    def passed_over(self, offsets: Sequence[int]) -> list[int]:
        """Those which a reader gets neither a record nor an error for."""
        log, passed = self.logs[0], []
        for offset in offsets:
            try:
                regions = read(log, offset, 1, log.log_end_offset).regions
            except DamagedRecords:
                continue
            if not regions or int.from_bytes(bytes(regions[0][:8]), "big") != offset:
                passed.append(offset)
        return passed


def config_of(policy: str) -> LogConfig:
    return LogConfig(cleanup_policy=frozenset({policy}), segment_bytes=100_000)


def with_far_gap(policy: str, seed: int = 0) -> Copies:
    """Segments of the offsets 0 and 1, 2 and 3, three segments behind the gap."""
    copies = Copies(config_of(policy), seed)
    for log in copies.logs if policy == "delete" else ():
        log.explain_gaps(FAR)  # no replica has what is missing
    for offset in (0, 2, FAR, FAR + 2, FAR + 4):
        copies.follow(offset, offset + 1)
        if offset not in (2, FAR + 4):
            copies.roll()
    copies.flush()
    return copies


OFFSETS = [0, 1, 2, 3, *range(FAR, FAR + 6)]


LOST = [[0], [2], [4], [FAR], [2, FAR], [4, FAR], [2, 4, FAR], [FAR, FAR + 2], [0, 2, FAR], [2, FAR, FAR + 2]]


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("ending", [Ending.CLEAN, Ending.KILLED])
@pytest.mark.parametrize("policy", ["delete", "compact"])
async def test_a_lost_segment_behind_a_far_gap_gets_its_own_again(policy: str, ending: Ending, lost: list[int]) -> None:
    """Its copy went into the segment before the gap, whose index has offsets of 32 bits: it stayed damage."""
    copies = with_far_gap(policy)
    copies.lose(ending, *lost)
    assert not copies.passed_over(OFFSETS)
    await copies.repair()
    assert not copies.refused
    for ending_now in (ending, Ending.CLEAN):
        log = copies.logs[0]
        assert not log.damaged_ranges()
        assert offsets_of(records_of(log)) == OFFSETS
        assert all(each.next_offset - 1 <= each.max_offset or each.may_end_early for each in list(log.segments)[:-1])
        if lost != [4]:  # the empty segment that held the gap
            assert not any(each.may_end_early and each.size_bytes for each in log.segments)
        copies.flush()
        copies.open_again(ending_now)
        scrub_all(copies.logs[0])
    copies.lose(Ending.CLEAN, FAR)
    assert not copies.passed_over(OFFSETS)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [[FAR], [0, 2, FAR], [2, 4, FAR]])
@pytest.mark.parametrize("ending", [Ending.KILLED, Ending.POWER_LOSS])
@pytest.mark.parametrize("policy", ["delete", "compact"])
async def test_such_a_repair_may_end_at_each_step(policy: str, ending: Ending, lost: list[int]) -> None:
    for step in range(1, 200):
        copies = with_far_gap(policy, step)
        copies.lose(Ending.CLEAN, *lost)
        copies.disks[0].fail_after(step)
        try:
            await copies.repair()
            return
        except PowerLoss:
            pass
        copies.open_again(ending)
        assert not copies.passed_over(OFFSETS), step
        await copies.repair()
        assert not copies.logs[0].damaged_ranges(), step
        assert offsets_of(records_of(copies.logs[0])) == OFFSETS
    pytest.fail("the repair has no end")


@pytest.mark.parametrize("left_bytes", [0, 20, 293, 300])
@pytest.mark.parametrize("position_max", [400, 2200])
@pytest.mark.parametrize("may_end_early", [False, True])
@pytest.mark.parametrize("is_compacted", [False, True])
async def test_a_copy_that_ends_behind_the_last_position_of_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compacted: bool, may_end_early: bool, position_max: int,
    left_bytes: int,
) -> None:  # fmt: skip
    """The bytes left of a closed segment's end are fewer than the copy. It was tried again for ever, or what did not
    fit disappeared as a gap.
    """
    cluster = Cluster(tmp_path)
    here = cluster.here
    if is_compacted:
        for replica in cluster.replicas:
            replica.log.set_config(replace(replica.log.config, cleanup_policy=frozenset({"compact"})))
            replica.logs.config = replica.log.config
            replica.log.cleaned_offset = 0
    path = here.logs.folder / here.logs.files("*.log")[0]
    start = batches_of(path)[-4][0]
    data = path.read_bytes()
    here.logs.close()
    path.write_bytes(data[:start] + bytes(left_bytes))
    cluster.partition.log = here.logs.open()
    here.log.cleaned_offset = 0
    monkeypatch.setattr(repair, "MAX_POSITION", position_max)
    scrub_all(here.log)
    assert here.log.damaged_ranges()
    here.log.segments[0].may_end_early = may_end_early
    for _ in range(3):
        await cluster.repair()
        assert not cluster.refused
    expected = records_of(cluster.replicas[1].log)
    for _ in range(2):
        assert not here.log.damaged_ranges()
        assert records_of(here.log) == expected
        here.logs.close_and_open()
        scrub_all(here.log)


@pytest.mark.parametrize("left_bytes", [20, 0, None])
@pytest.mark.parametrize("may_end_early", [False, True])
@pytest.mark.parametrize("ending", [Ending.KILLED, Ending.POWER_LOSS])
@pytest.mark.parametrize("policy", ["delete", "compact"])
async def test_the_repair_of_a_full_segment_may_end_at_each_step(
    monkeypatch: pytest.MonkeyPatch, policy: str, ending: Ending, may_end_early: bool, left_bytes: int | None
) -> None:
    """`left_bytes`: None for those of exactly one batch. A kill behind its copy left the rest as a gap."""
    if may_end_early and not left_bytes and left_bytes is not None:
        return  # nothing shows the loss of whole batches at such an end
    for step in range(1, 200):
        copies = Copies(replace(config_of(policy), index_interval_bytes=0), step)
        copies.follow(*range(8))
        copies.roll()
        copies.follow(8, 9)
        copies.flush()
        copies.directory.close()
        disk, path = copies.disks[0], f"/data/t-0/{0:020d}.log"
        data = bytes(disk.read_file(path))
        size = len(data) // 8
        disk.write_file(path, data[: 3 * size] + bytes(size if left_bytes is None else left_bytes), sync=True)
        if may_end_early:  # as one that Kafka's cleaner has made
            monkeypatch.setattr("tidelog.storage.log.loader.may_end_early", lambda *arguments, **options: True)
        copies.start(Ending.CLEAN)
        monkeypatch.setattr(repair, "MAX_POSITION", 5 * size)
        disk.fail_after(step)
        try:
            await copies.repair()
        except PowerLoss:
            copies.open_again(ending)
            assert not copies.passed_over(range(10)), step
            await copies.repair()
            assert offsets_of(records_of(copies.logs[0])) == list(range(10)), step
            assert not copies.logs[0].damaged_ranges(), step
            continue
        assert offsets_of(records_of(copies.logs[0])) == list(range(10))
        assert len(copies.logs[0].segments) == 3
        return
    pytest.fail("the repair has no end")
