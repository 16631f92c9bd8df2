"""Where a leader epoch begins whose first batches the cleaner has removed: never behind its true start.

A follower with a tail of another history at these offsets would keep it (KIP-101).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, Logs
from tests.unit.storage.cleaning import clean, contents
from tests.unit.storage.test_compaction import CONFIG, keyed
from tidelog.storage.files.checkpoints import LEADER_EPOCH_FILE, RECOVERY_POINT_FILE


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


@pytest.mark.parametrize("ending", ["after a clean stop", "after a kill"])
def test_without_the_file_it_begins_behind_the_batch_before(made: Logs, ending: str) -> None:
    if ending == "after a clean stop":
        made.close()
    else:
        made.kill()
        scan_all(made)
    (made.folder / LEADER_EPOCH_FILE).unlink()
    assert list(made.open(machine_ran_on=True).leader_epochs) == [(0, 0), (1, 2)]
