"""The world of histories with bad disks: damage that is done is seen, and the same seed does the same again."""

from __future__ import annotations

import pytest

from tests.cluster.damage.injuries import FIELDS, Injury, damaged
from tests.simulation.damage_faults import files_of
from tests.simulation.damage_history import DamageHistory, faults_of_copies
from tests.simulation.stage import stage


def test_every_copy_of_a_quiet_cluster_is_whole_until_one_is_damaged() -> None:
    with stage() as directed:
        directed.up()
        for number in range(5):
            directed.send(b"%d" % number)
        directed.wait(2)
        assert faults_of_copies(directed.cluster) == []
        files = files_of(directed.cluster.nodes[2].host.disk)
        inode = next(inode for path, inode in files.items() if path.endswith(".log") and inode.data)
        data = bytes(inode.data)
        for way in FIELDS:
            changed, what = damaged(Injury("active", way, 0.0, 0.5, 0.5), data)
            assert changed is not None
            inode.data = bytearray(changed)
            assert faults_of_copies(directed.cluster) != [], what


@pytest.mark.slow
def test_a_seed_with_a_bad_disk_does_the_same_again() -> None:
    def trace() -> str:
        history = DamageHistory(0)
        try:
            return history.run()
        except Exception as error:
            return str(error)

    assert trace() == trace()
