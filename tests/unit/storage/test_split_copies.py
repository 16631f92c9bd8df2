"""A copy of another replica's whole log that is too large for one segment in place of each: it becomes several."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from tests.unit.storage.batches import NOW, Logs, QuickDisk, marker, read
from tests.unit.storage.cleaning import clean, contents
from tests.unit.storage.test_compaction import keyed
from tests.unit.storage.test_prefix_copy import GONE, copy_prefix, fetch, fetch_all
from tests.unit.storage.test_stray_cleanings import Killed, Mortal
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import iter_records
from tidelog.storage.log import prefix_copy
from tidelog.storage.log.prefix_copy import PrefixCopy
from tidelog.storage.segments.damage import DamagedRecords

Contents = list[tuple[int, bytes | None, bytes | None]]


def replicas(tmp_path: Path, disk: QuickDisk | None = None) -> tuple[Logs, Logs]:
    """The first is cleaned, which leaves one segment of it; the other one is not."""
    cleaned, whole = Logs(tmp_path / "cleaned", GONE, disk), Logs(tmp_path / "whole", GONE)
    for made in (cleaned, whole):
        for number in range(12):
            made.append(keyed(("a", f"{number}" * 100), (f"{number}", "x")), keyed(("a", None)))
            made.append(
                keyed(("t", "aborted"), producer_id=7, producer_epoch=0, base_sequence=number, transactional=True)
            )
            made.append(marker(abort=True), from_client=False)
            made.log.roll(NOW)
    for _ in range(3):
        clean(cleaned.log)
        for made in (cleaned, whole):
            made.append(keyed(("z", "1")))
            made.log.roll(NOW)
    return cleaned, whole


def damage(made: Logs, how: str) -> None:
    """Damage the first segment, or leave it as Kafka's cleaner does, which removes a last batch."""
    log = made.log
    path = made.folder / made.files("*.log")[0]
    data = bytearray(path.read_bytes())
    positions = [position for position, _ in iter_headers(data)]
    if how == "kafka":
        log.flush()
        made.directory.write_checkpoints()
        made.close()
        (made.folder / "cleaned-ends").unlink(missing_ok=True)
        path.write_bytes(data[: positions[-1]])
        for index in made.folder.glob("*index"):
            index.unlink()
        log = made.open()
        assert log.segments.first.may_end_early
        return
    start, end = {"all": (0, len(data)), "in the middle": (positions[1], positions[2])}.get(how, (0, 0))
    data[start:end] = bytes(end - start)
    path.write_bytes(data)
    for each in log.segments:
        each.findings = each.examine()
        log.adopt_findings(each)
    assert bool(log.damaged_ranges()) == (how != "nothing")


def readable(made: Logs) -> Contents:
    found: dict[int, tuple[int, bytes | None, bytes | None]] = {}
    for offset in range(made.log.log_start_offset, made.log.log_end_offset):
        with suppress(DamagedRecords):
            for region in read(made.log, offset, 1, made.log.log_end_offset).regions:
                found |= {each.offset: (each.offset, each.key, each.value) for each in iter_records(region)}
    return sorted(found.values())


def test_a_copy_that_is_larger_becomes_several_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of more than 2 GiB was refused, and the range alone was repaired: a deleted key was back."""
    monkeypatch.setattr(prefix_copy, "MAX_POSITION", 950)
    cleaned, whole = replicas(tmp_path)
    log = cleaned.log
    assert log.segment_count <= 5, [(s.base_offset, s.size_bytes) for s in log.segments]
    copy_prefix(log, whole.log, 2)
    assert log.segment_count > 7
    for _ in range(2):
        assert contents(log) == contents(whole.log)
        assert max(each.size_bytes for each in log.segments) <= GONE.segment_bytes
        assert log.aborted_transactions(0, log.log_end_offset) == whole.log.aborted_transactions(0, log.log_end_offset)
        for offset in range(log.log_end_offset):
            assert fetch(log, offset)[:8] == fetch(whole.log, offset)[:8]
        assert not [each for each in log.segments if each.examine().damage]
        log = cleaned.close_and_open()
    clean(log)
    clean(whole.log)
    assert contents(log) == contents(whole.log)
    cleaned.close()
    whole.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kafka", "all", "in the middle", "nothing"])
@pytest.mark.parametrize("loses", [False, True])
def test_a_kill_leaves_the_old_segments_or_the_new_ones(tmp_path: Path, how: str, loses: bool) -> None:
    """Whatever is damaged in the old ones. `loses`: of the renames that were not synced the device has any."""
    results: set[bool] = set()
    for ends_at in range(1, 200, 3):
        rng, disk = Random(ends_at), Mortal(10**6)
        cleaned, whole = replicas(tmp_path / f"{ends_at}", disk)
        damage(cleaned, how)
        old, new = readable(cleaned), contents(whole.log)
        copy = PrefixCopy(cleaned.log, cleaned.log.segments[2], NOW)
        fetch_all(copy, whole.log)
        disk.ends_at, disk.is_counting, disk.unsynced = ends_at, True, []
        is_done = False
        with suppress(Killed):
            while copy.advance():
                copy.run()
            is_done = True
        cleaned.kill()
        for _ in range(2 if loses else 1):
            for source, target in reversed(disk.unsynced if loses else ()):
                if rng.random() < 0.5 and Path(target).exists() and not Path(source).exists():
                    Path(target).rename(source)
            disk.ends_at, disk.unsynced, disk.is_counting = rng.randrange(30), [], loses
            with suppress(Killed):
                cleaned.open(machine_ran_on=True)
            disk.is_counting, disk.ends_at = False, 10**6
            cleaned.kill()
        cleaned.open(machine_ran_on=True)
        found = readable(cleaned)
        assert found in (old, new), ends_at
        if how != "kafka" or found == new:
            assert bool(cleaned.log.damaged_ranges()) == (found == old and how != "nothing")
        assert cleaned.files("*.cleaned") == cleaned.files("*.swap") == []
        results.add(found == new)
        cleaned.close()
        whole.close()
        if is_done:
            assert results == {True, False}
            return
    pytest.fail("the copy has more than 200 operations")
