"""A log whose last batches are gone, and whose checkpoints name an offset inside of a batch as its end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, idempotent, offsets_of, read, records_of
from tests.unit.storage.test_damage import copy_of
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.errors import KafkaError
from tidelog.storage.log.damaged_end import damaged_end, move_damaged_end
from tidelog.storage.log.repair import CopyRefused, RepairCheck
from tidelog.storage.segments.damage import DamagedRecords

MakeLogs = Callable[..., Logs]
LAST_OFFSET_DELTA = 23  # where a batch has it
LAST, END = 8, 12
"""The last batch has the offsets 8 to 11. The checkpoint says that 11 was reached."""


def cut_log(logs: MakeLogs, *, left_bytes: int = 0) -> tuple[Logs, dict[int, bytes], bytes]:
    """Of five batches two are left, and `left_bytes` of the third, after a kill."""
    made = logs()
    made.append(*[idempotent(2 * n, count=2) for n in range(4)], idempotent(8, count=4))
    made.log.flush()
    made.directory.write_checkpoints()
    copy = copy_of(made)
    path = made.folder / made.files("*.log")[0]
    whole = path.read_bytes()
    made.kill()
    path.write_bytes(whole[: [position for position, _ in iter_headers(whole)][2] + left_bytes])
    log = made.open(machine_ran_on=True)
    assert log.log_end_offset == END - 1, "the checkpoint is inside of the last batch"
    return made, copy, whole


def repair_once(made: Logs, copy: dict[int, bytes], *, is_committed: bool = True) -> None:
    log = made.log
    [(segment, damaged)] = log.damaged_ranges()
    work = log.repair_of(segment, damaged)
    work.move_end = partial(move_damaged_end, log) if is_committed else None
    for offset in sorted(copy):
        if offset >= damaged.first_offset and not work.is_complete:
            work.accept(memoryview(copy[offset]))
    check = work.finish()
    check.run()
    assert log.finish_repair(check)


@pytest.mark.parametrize("left_bytes", [0, 5])
def test_the_end_moves_behind_the_committed_batch_that_holds_it(logs: MakeLogs, left_bytes: int) -> None:
    made, copy, whole = cut_log(logs, left_bytes=left_bytes)
    with pytest.raises(CopyRefused, match="reaches beyond"):
        repair_once(made, copy)
    assert made.log.log_end_offset == END
    [(_, damaged)] = made.log.damaged_ranges()
    assert (damaged.first_offset, damaged.end_offset) == (4, END)
    with pytest.raises(DamagedRecords):
        read(made.log, END - 1, 1000, END)
    repair_once(made, copy)
    assert (made.folder / made.files("*.log")[0]).read_bytes() == whole
    assert offsets_of(records_of(made.log)) == list(range(END))
    made.append(idempotent(END))
    assert offsets_of(records_of(made.log)) == list(range(END + 1))
    assert offsets_of(records_of(made.close_and_open())) == list(range(END + 1))


def test_producers_are_known_again_once_the_batch_is_there(logs: MakeLogs) -> None:
    made, copy, _ = cut_log(logs)
    with pytest.raises(KafkaError, match="being repaired"):
        made.log.append_as_leader(idempotent(8, count=4), 0, NOW)
    with pytest.raises(CopyRefused):
        repair_once(made, copy)
    repair_once(made, copy)
    assert made.log.append_as_leader(idempotent(8, count=4), 0, NOW).first_offset == LAST, "it is recognised"


def test_a_batch_that_may_be_replaced_yet_does_not_move_the_end(logs: MakeLogs) -> None:
    made, copy, _ = cut_log(logs)
    with pytest.raises(CopyRefused, match="does not fit"):
        repair_once(made, copy, is_committed=False)
    assert made.log.log_end_offset == END - 1


@pytest.mark.parametrize(("base_offset", "leader_epoch"), [(LAST, 3), (LAST + 1, 0), (LAST - 1, 0)])
def test_a_batch_of_another_history_does_not_move_the_end(logs: MakeLogs, base_offset: int, leader_epoch: int) -> None:
    made, copy, _ = cut_log(logs)
    copy[LAST] = bytes(batch(4, base_offset=base_offset, leader_epoch=leader_epoch))
    with pytest.raises(CopyRefused):
        repair_once(made, copy)
    assert made.log.log_end_offset == END - 1


def test_the_end_does_not_move_once_records_follow(logs: MakeLogs) -> None:
    made, copy, _ = cut_log(logs)
    made.log.append_as_leader(batch(3), 1, NOW)
    assert damaged_end(made.log) is None
    with pytest.raises(CopyRefused, match="does not fit"):
        repair_once(made, copy)
    [(_, damaged)] = made.log.damaged_ranges()
    assert (damaged.end_offset, made.log.log_end_offset) == (END - 1, END + 2)


@pytest.mark.parametrize("is_clean", [False, True])
def test_a_restart_after_the_end_moved_gives_up_nothing(logs: MakeLogs, is_clean: bool) -> None:
    made, copy, whole = cut_log(logs)
    with pytest.raises(CopyRefused, match="reaches beyond"):
        repair_once(made, copy)
    if is_clean:
        made.close()
    else:
        made.kill()
    log = made.open(machine_ran_on=True)
    assert log.log_end_offset == END
    for segment in log.segments:
        segment.findings = segment.examine()
        log.adopt_findings(segment)
    repair_once(made, copy)
    assert (made.folder / made.files("*.log")[0]).read_bytes() == whole


def test_a_last_batch_with_a_wrong_last_offset_moves_no_log_end(logs: MakeLogs) -> None:
    """After a clean stop nothing is scanned, and no replica has records at the offsets between."""
    made = logs()
    made.append(batch(2), batch(3))
    path = made.folder / made.files("*.log")[0]
    made.close()
    data = bytearray(path.read_bytes())
    [_, (last, header)] = iter_headers(data)
    place = last + LAST_OFFSET_DELTA
    assert int.from_bytes(data[place : place + 4]) == header.last_offset_delta == 2
    data[place + 3] ^= 16
    path.write_bytes(data)
    log = made.open()
    assert log.log_end_offset == 5
    assert [(damaged.first_offset, damaged.end_offset) for _, damaged in log.damaged_ranges()] == [(2, 5)]


def test_a_repair_changes_nothing_in_a_log_that_was_truncated_while_it_was_examined(logs: MakeLogs) -> None:
    made, copy, _ = cut_log(logs)
    with pytest.raises(CopyRefused, match="reaches beyond"):
        repair_once(made, copy)
    [(segment, damaged)] = made.log.damaged_ranges()
    work = made.log.repair_of(segment, damaged)
    for offset in (4, 6, 8):
        work.accept(memoryview(copy[offset]))
    check = work.finish()
    check.run()
    made.log.truncate_to(2)
    before = segment.size_bytes, segment.next_offset, made.log.log_end_offset
    assert not made.log.finish_repair(check)
    assert (segment.size_bytes, segment.next_offset, made.log.log_end_offset) == before
    assert made.log.log_end_offset == 2


def test_a_part_that_is_not_recognized_behind_the_damaged_bytes_leaves_the_file_as_it_is(
    logs: MakeLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each attempt would make the file longer."""
    made, copy, _ = cut_log(logs, left_bytes=5)
    with pytest.raises(CopyRefused, match="reaches beyond"):
        repair_once(made, copy)
    [(segment, damaged)] = made.log.damaged_ranges()
    work = made.log.repair_of(segment, damaged, from_offset=8)
    work.accept(memoryview(copy[8]))
    check = work.finish()
    check.run()
    assert check.is_insertion
    path = Path(segment.path)
    before = segment.size_bytes, path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(RepairCheck, "has_helped", property(lambda check: False))
        assert not made.log.finish_repair(check)
    assert (segment.size_bytes, path.read_bytes()) == before
    assert made.files("*.repair.tmp") == []
    assert [each for _, each in made.log.damaged_ranges()] == [damaged]
