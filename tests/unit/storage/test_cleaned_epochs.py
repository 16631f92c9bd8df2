"""Where a leader epoch begins whose first batches the cleaner has removed: never behind its true start.

A follower with a tail of another history at these offsets would keep it (KIP-101).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, Logs
from tests.unit.storage.cleaning import clean, contents
from tests.unit.storage.test_compaction import CONFIG, keyed
from tidelog.storage.files.checkpoints import (
    CLEANED_ENDS_FILE,
    LEADER_EPOCH_FILE,
    RECOVERY_POINT_FILE,
    decode_leader_epochs,
    encode_leader_epochs,
)


@pytest.fixture
def made(tmp_path: Path) -> Logs:
    """Epoch 1 begins at offset 2. Only its last record of three is left."""
    made = Logs(tmp_path / "logs", CONFIG)
    made.append(keyed(("a", "1")), keyed(("b", "1")))
    made.append(keyed(("c", "1")), keyed(("c", "2")), keyed(("c", "3")), epoch=1)
    made.log.flush()
    made.log.roll(NOW)
    clean(made.log)
    made.append(keyed(("d", "1")), epoch=1)
    made.directory.write_checkpoints()
    assert [offset for offset, _, _ in contents(made.log)] == [0, 1, 4, 5]
    return made


def scan_all(made: Logs) -> None:
    """The next start looks at each batch."""
    (made.path / RECOVERY_POINT_FILE).write_text("0\n0\n")


def test_a_scan_keeps_the_start_in_the_file(made: Logs) -> None:
    (made.folder / LEADER_EPOCH_FILE).write_text("0\n2\n0 0\n1 3\n")
    made.kill()
    scan_all(made)
    assert list(made.open(machine_ran_on=True).leader_epochs) == [(0, 0), (1, 3)]


WHOLE = [(0, 0), (1, 2), (2, 4), (3, 6), (4, 8)]


@pytest.mark.parametrize(
    ("first_keys", "filed", "expected"),
    [
        ("ab", WHOLE, WHOLE),
        ("az", WHOLE, WHOLE),
        ("ab", WHOLE[:3], [(3, 0), (4, 8)]),
        ("az", WHOLE[:3], [(0, 0), (3, 2), (4, 8)]),
    ],
)
def test_a_scan_keeps_the_epochs_that_have_no_batch_left(
    tmp_path: Path, first_keys: str, filed: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    """The epoch before ended too late, and a follower kept what another history had there. Without the first epochs of
    all, those of the file did not count, and a consumer in a gap took the log for truncated.

    An epoch that is missing in the file begins behind the batch before.
    """
    made = Logs(tmp_path / "logs", CONFIG)
    for epoch, keys in enumerate((first_keys, "cd", "ab", "cd", "ab")):
        made.append(*(keyed((key, "1")) for key in keys), epoch=epoch)
    made.append(keyed(("c", "1")), keyed(("e", "1")), epoch=4)
    made.log.flush()
    made.log.roll(NOW)
    clean(made.log)
    made.append(keyed(("f", "1")), epoch=4)
    made.directory.write_checkpoints()
    assert [offset for offset, _, _ in contents(made.log)] == [1, 7, 8, 9, 10, 11, 12][first_keys == "ab" :]
    made.kill()
    scan_all(made)
    path = made.folder / LEADER_EPOCH_FILE
    assert decode_leader_epochs(path.read_bytes()) == WHOLE
    path.write_bytes(encode_leader_epochs(filed))
    assert list(made.open(machine_ran_on=True).leader_epochs) == expected


@pytest.mark.parametrize("filed", [[(1, 3), (4, 4)], [(2, 0), (3, 1), (4, 4)]])
def test_a_scan_takes_no_epoch_from_the_file_that_began_before_the_end_of_the_last_batch(
    tmp_path: Path, filed: list[tuple[int, int]]
) -> None:
    """Nor one that is older than this batch. Such a file is of another history, as from before a truncation."""
    made = Logs(tmp_path / "logs", CONFIG)
    made.append(keyed(("a", "1"), ("f", "1")), epoch=2)
    made.append(keyed(("b", "1")), keyed(("c", "1")), epoch=3)
    made.append(keyed(("b", "2")), keyed(("c", "2")), epoch=4)
    made.log.flush()
    made.log.roll(NOW)
    clean(made.log)
    made.append(keyed(("d", "1")), epoch=4)
    made.directory.write_checkpoints()
    assert [offset for offset, _, _ in contents(made.log)] == [0, 1, 4, 5, 6]
    made.kill()
    scan_all(made)
    (made.folder / LEADER_EPOCH_FILE).write_bytes(encode_leader_epochs(filed))
    assert list(made.open(machine_ran_on=True).leader_epochs) == [(2, 0), (4, 4)]


@pytest.mark.parametrize(("has_file", "expected"), [(True, [(0, 0), (1, 1), (2, 3)]), (False, [(0, 0), (2, 1)])])
def test_a_scan_keeps_an_epoch_without_batches_at_the_end_of_a_segment(
    tmp_path: Path, has_file: bool, expected: list[tuple[int, int]]
) -> None:
    """Kafka's cleaner leaves no batch there. Without the file the next epoch may have begun there, too."""
    made = Logs(tmp_path / "logs", CONFIG)
    made.append(keyed(("a", "1")))
    made.append(keyed(("b", "1")), keyed(("c", "1")), epoch=1)
    made.log.roll(NOW)
    made.append(keyed(("b", "2")), keyed(("c", "2")), epoch=2)
    made.log.flush()
    made.log.roll(NOW)
    made.log.set_config(replace(made.log.config, segment_bytes=100))
    clean(made.log)
    made.append(keyed(("d", "1")), epoch=2)
    made.log.flush()
    made.directory.write_checkpoints()
    made.kill()
    scan_all(made)
    path = made.folder / f"{0:020d}.log"
    path.write_bytes(path.read_bytes()[: len(keyed(("a", "1")))])
    (made.folder / CLEANED_ENDS_FILE).unlink()
    if not has_file:
        (made.folder / LEADER_EPOCH_FILE).unlink()
    log = made.open(machine_ran_on=True)
    assert [each.base_offset for each in log.segments] == [0, 3, 5]
    assert (list(log.leader_epochs), log.damaged_ranges()) == (expected, [])


@pytest.mark.parametrize("ending", ["after a clean stop", "after a kill"])
def test_without_the_file_it_begins_behind_the_batch_before(made: Logs, ending: str) -> None:
    if ending == "after a clean stop":
        made.close()
    else:
        made.kill()
        scan_all(made)
    (made.folder / LEADER_EPOCH_FILE).unlink()
    assert list(made.open(machine_ran_on=True).leader_epochs) == [(0, 0), (1, 2)]
