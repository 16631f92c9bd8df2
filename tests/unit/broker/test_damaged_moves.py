"""Replicas that move between two log directories while one of the two copies is damaged."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.patience import until
from tests.unit.broker.test_disk_failures import error_of_fetch, send
from tests.unit.broker.test_replica_moves import Moving
from tidelog.broker.node_ports import os_ports
from tidelog.broker.replicas import replica_moves
from tidelog.protocol.errors import ErrorCode
from tidelog.replication.future_replica import FutureReplica
from tidelog.storage.files.checkpoints import CLEAN_SHUTDOWN_FILE, CLEANED_ENDS_FILE, decode_end_offset
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.files.incarnation import write_incarnation

MakeBatch = Callable[..., bytes]
COUNT = 10
LOG = f"{0:020d}.log"


def damage(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.fixture
async def moving(tmp_path: Path, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Moving]:
    """One replica with ten records, which moves slowly; a part of it is copied."""
    monkeypatch.setattr(replica_moves, "STEP_BYTES", 200)
    found = Moving(tmp_path)
    await found.start()
    await found.wire.create_topic("t")
    for number in range(COUNT):
        await send(found.wire, "t", make_batch(b"%d" % number))
    yield found
    await found.running.stop()


async def begin(moving: Moving) -> tuple[Path, Path]:
    """Where it goes, and the copy's file."""
    await moving.hold_back(1)
    target = moving.other
    assert await moving.order(target) == 0
    ((replica, _),) = moving.moves._moves.values()
    await until(lambda: replica.log.log_end_offset > 1)
    return target, Path(replica.log.directory) / LOG


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_damaged_copy_does_not_take_the_place_of_the_only_whole_one(moving: Moving, is_restarted: bool) -> None:
    target, copy = await begin(moving)
    if is_restarted:
        await moving.running.stop()
    damage(copy, 67)  # the payload of the first batch
    if is_restarted:
        await moving.start()
    await moving.hold_back(None)
    await moving.arrived(target)
    assert await moving.values() == [b"%d" % number for number in range(COUNT)]
    assert not [path for home in moving.homes for path in home.glob("t-0*-future")]


@pytest.mark.parametrize(
    ("moment", "speaks"),
    [("copying", True), ("assigned", True), ("promoted", False), ("over", False), ("assigned, but it is alone", False)],
)
async def test_a_kill_in_the_middle_of_a_write_of_a_copy_is_no_loss_while_the_present_log_is_there(
    moving: Moving, make_batch: MakeBatch, moment: str, speaks: bool
) -> None:
    """The broker left the ISR of all its partitions. A copy that the start takes over has lost records, though."""
    source = moving.home / "t-0"
    if moment == "copying":
        target, copy = await begin(moving)
    else:
        kept = shutil.copytree(source, source.parent.parent / "kept")
        target = moving.other
        await moving.order(target)
        await moving.arrived(target)
        copy = target / "t-0" / LOG
    epoch = moving.running.node._broker.lifecycle.epoch  # type: ignore[union-attr]
    boot_id = os_ports().boot_id
    await moving.running.stop()
    if "assigned" in moment:
        future = target / f"t-0.{'0' * 32}-future"
        copy = copy.parent.rename(future) / LOG
    if moment in ("assigned", "promoted"):
        kept.rename(source)
    copy.write_bytes(copy.read_bytes() + copy.read_bytes()[:40])
    for home in (*moving.homes, Path(moving.config["metadata.log.dir"])):
        (home / CLEAN_SHUTDOWN_FILE).unlink()
        write_incarnation(OsDisk(), str(home), epoch, boot_id)
    await moving.start()
    assert (moving.running.node._directories.clean_epoch(boot_id) >= 0) == speaks
    await moving.hold_back(None)
    await moving.arrived(target)
    assert await moving.values() == [b"%d" % number for number in range(COUNT)]
    assert await send(moving.wire, "t", make_batch(b"on")) == (0, COUNT)


async def test_a_replica_stays_where_it_is_if_each_copy_is_damaged(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, append = moving.home, FutureReplica.append

    def append_wrongly(replica: FutureReplica, batches: memoryview, now_ms: int) -> None:
        append(replica, batches, now_ms)
        damage(Path(replica.log.directory) / LOG, replica.log.size_bytes - 2)

    monkeypatch.setattr(FutureReplica, "append", append_wrongly)
    assert await moving.order(moving.other) == 0
    await until(lambda: not moving.moves._moves)
    assert moving.home == source
    assert await moving.values() == [b"%d" % number for number in range(COUNT)]
    assert await send(moving.wire, "t", make_batch(b"on")) == (0, COUNT)
    monkeypatch.undo()
    target = moving.other
    assert await moving.order(target) == 0
    await moving.arrived(target)


async def test_damage_of_the_replica_that_moves_is_reported_and_the_move_waits_for_the_repair(
    moving: Moving, caplog: pytest.LogCaptureFixture
) -> None:
    """The records were appended a moment ago, and reads take such bytes for checked."""
    target, _ = await begin(moving)
    damage(moving.home / "t-0" / LOG, moving.partition.log.size_bytes - 2)
    await moving.hold_back(None)
    await until(lambda: moving.partition.log.damaged_ranges())
    assert moving.moves._moves
    await until_corrupt(moving)
    lines = [each.getMessage() for each in caplog.records if "waits with its move" in each.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("t-0 waits with its move until it is repaired, or its damaged")
    moving.partition.log.set_high_watermark(COUNT)
    damage(moving.home / "t-0" / LOG, moving.partition.log.size_bytes - 2)  # the same bit: it is whole again
    (segment,) = moving.partition.log.segments
    segment.findings = segment.examine()
    moving.partition.log.adopt_findings(segment)
    await moving.arrived(target)
    assert await moving.values() == [b"%d" % number for number in range(COUNT)]


async def test_a_move_begins_again_where_a_repair_has_replaced_the_whole_log(moving: Moving) -> None:
    """What was copied before may have records that are deleted in the other replica's copy."""
    target, copy = await begin(moving)
    log = moving.partition.log
    log.is_under_cleaning = True
    await moving.hold_back(None)
    await asyncio.sleep(0.2)
    ((replica, _),) = moving.moves._moves.values()
    before = replica.log.log_end_offset
    await asyncio.sleep(0.2)
    assert replica.log.log_end_offset == before < COUNT, "it waits for the repair"
    damage(copy, 67)
    log.is_under_cleaning = False
    moving.moves.begin_again(moving.partition)
    ((new, _),) = moving.moves._moves.values()
    assert new is not replica
    assert not log.may_be_cleaned
    await moving.arrived(target)
    assert await moving.values() == [b"%d" % number for number in range(COUNT)]


async def test_the_copy_of_a_cleaned_log_says_that_it_has_the_ends_of_its_segments(moving: Moving) -> None:
    """After a later start, the copy's segments that were lost or cut counted as cleaned: readers passed over them."""
    moving.partition.log.cleaned_offset = 5
    target = moving.other
    assert await moving.order(target) == 0
    await moving.arrived(target)
    assert decode_end_offset((target / "t-0" / CLEANED_ENDS_FILE).read_bytes()) == 5


async def test_a_deletion_does_not_wait_for_the_whole_copy_for_which_a_move_waits(moving: Moving) -> None:
    log = moving.partition.log
    log.is_under_cleaning = True
    assert await moving.order(moving.other) == 0
    ((replica, _),) = moving.moves._moves.values()
    log.delete_records(1)
    await until(lambda: replica.log.log_start_offset == 1)
    log.is_under_cleaning = False


async def until_corrupt(moving: Moving) -> None:
    while await error_of_fetch(moving.wire, "t", COUNT - 1) != ErrorCode.CORRUPT_MESSAGE:
        pass
