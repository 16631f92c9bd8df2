"""Where a leader epoch begins whose first batches the cleaner has removed: never behind its true start.

A follower with a tail of another history at these offsets would keep it (KIP-101).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, Logs
from tests.unit.storage.cleaning import clean, contents
from tests.unit.storage.test_compaction import CONFIG, keyed
from tidelog.storage.files.checkpoints import (
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


@pytest.mark.parametrize("ending", ["after a clean stop", "after a kill"])
def test_without_the_file_it_begins_behind_the_batch_before(made: Logs, ending: str) -> None:
    if ending == "after a clean stop":
        made.close()
    else:
        made.kill()
        scan_all(made)
    (made.folder / LEADER_EPOCH_FILE).unlink()
    assert list(made.open(machine_ran_on=True).leader_epochs) == [(0, 0), (1, 2)]
