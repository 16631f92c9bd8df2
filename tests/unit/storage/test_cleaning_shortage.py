"""A cleaning that is to end in the middle of a swap, when no descriptor is left to finish it with."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, Logs, QuickDisk
from tests.unit.storage.cleaning import begin, contents
from tests.unit.storage.test_compaction import CONFIG, keyed
from tidelog.storage.log.compaction import Compaction


class ShortDisk(QuickDisk):
    """Opens no directory while `is_short`."""

    __slots__ = ("is_short",)

    def __init__(self) -> None:
        self.is_short = False

    def sync_directory(self, path: str) -> None:
        if self.is_short:
            raise OSError(errno.EMFILE, "Too many open files", path)
        super().sync_directory(path)


def in_a_swap(tmp_path: Path, steps: int) -> tuple[Logs, ShortDisk, Compaction]:
    disk = ShortDisk()
    logs = Logs(tmp_path / "logs", CONFIG, disk)
    for number in range(5):
        logs.append(keyed(("k", str(number))))
    logs.log.roll(NOW)
    for number in range(3):
        logs.append(keyed(("j", str(number))))
    cleaning = begin(logs.log)
    while cleaning._swap is None or cleaning._swap._next < steps:
        cleaning.run()
        assert cleaning.advance()
    disk.is_short = True
    return logs, disk, cleaning


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_truncation_that_meets_a_shortage_is_repeated_and_leaves_no_swap(tmp_path: Path, steps: int) -> None:
    """The swap stayed as it was until the next start, behind a log that went on without it."""
    logs, disk, cleaning = in_a_swap(tmp_path, steps)
    with pytest.raises(OSError, match="Too many"):
        logs.log.truncate_to(3)
    assert logs.log.log_end_offset == 8
    disk.is_short = False
    logs.log.truncate_to(3)
    cleaning.run()
    assert not cleaning.advance()
    logs.append(keyed(("x", "1")))
    before = contents(logs.log)
    assert logs.files("*.swap") == logs.files("*.cleaned") == []
    logs.kill()
    assert contents(logs.open()) == before


def test_a_cleaning_goes_on_behind_a_truncation_that_met_a_shortage(tmp_path: Path) -> None:
    logs, disk, cleaning = in_a_swap(tmp_path, 1)
    with pytest.raises(OSError, match="Too many"):
        logs.log.truncate_to(7)
    disk.is_short = False
    for _ in range(100):
        cleaning.run()
        if not cleaning.advance():
            break
    assert (logs.log.compaction, logs.log.cleaned_offset, logs.files("*.swap")) == (None, 5, [])


def test_a_cleaning_that_cannot_be_taken_back_keeps_no_log_from_retention(tmp_path: Path) -> None:
    logs, _, cleaning = in_a_swap(tmp_path, 1)
    with pytest.raises(OSError, match="Too many"):
        cleaning.take_back()
    assert (logs.log.compaction, cleaning.is_given_up) == (None, True)
