"""The checks of the damage cases see what they are there for: every kind of damage that is done, and more."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.cluster.damage.cases import NAMED, Case, drawn
from tests.cluster.damage.injuries import BATCH_WAYS, Injury, inflict
from tests.cluster.damage.records import number_of, value_of
from tests.cluster.damage.replicas import Log, check_compacted, check_companions, check_replicas, read_log
from tests.cluster.damage.trial import Trial
from tests.unit.storage.batches import NOW, Logs, batch
from tests.unit.storage.cleaning import clean
from tidelog.bench.frames import record_batch
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.segments.log_config import LogConfig

BATCHES, RECORDS = 30, 5
END = BATCHES * RECORDS
NAME = "topic-0"


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a node with one replica of a few segments, closed in order."""
    data = tmp_path_factory.mktemp("replica")
    home = LogDirectory.open(OsDisk(), str(data), node_id=1, cluster_id="c")
    config = LogConfig(segment_bytes=4000, index_interval_bytes=300)
    log = home.create_log("topic", 0, bytes(range(16)), config, 1_700_000_000_000)
    for number in range(BATCHES):
        values = [b"%d-%d-%s" % (number, one, b"x" * 100) for one in range(RECORDS)]
        batch = memoryview(bytearray(record_batch(values, 1_700_000_000_000 + number)))
        log.append_as_leader(batch, 0, 1_700_000_000_000)
    home.close()
    return data


@pytest.fixture
def logs(tmp_path: Path, replica: Path) -> dict[int, Log]:
    for node in (1, 2, 3):
        shutil.copytree(replica, tmp_path / str(node))
    return {node: read_log(tmp_path / str(node) / NAME) for node in (1, 2, 3)}


def check_again(logs: dict[int, Log]) -> list[str]:
    return check_replicas({node: read_log(log.directory) for node, log in logs.items()}, 0, END)


def test_whole_replicas_pass(logs: dict[int, Log]) -> None:
    assert logs[1].end == END
    assert len({batch.file for batch in logs[1].batches}) > 3
    assert check_again(logs) == []
    assert check_companions(logs[1]) == []


@pytest.mark.parametrize("target", ["sealed", "active"])
@pytest.mark.parametrize("way", BATCH_WAYS)
def test_every_kind_of_damage_to_batches_is_seen(logs: dict[int, Log], way: str, target: str) -> None:
    choice = random.Random(way + target)
    for _ in range(5):
        injury = Injury(target, way, choice.random(), choice.random(), choice.random())
        before = {file: file.read_bytes() for file in logs[2].directory.glob("*.log")}
        inflict(injury, logs[2].directory.parent, NAME)
        assert check_again(logs), injury
        for file, data in before.items():
            file.write_bytes(data)
        assert check_again(logs) == []


def test_a_replica_that_cleaned_its_log_is_whole_and_one_that_lost_a_key_is_not(tmp_path: Path) -> None:
    """A repair may begin a segment on one node alone; then this node's cleaner cleans the one before."""
    for node in (1, 2, 3):
        made = Logs(tmp_path / str(node), LogConfig(cleanup_policy=frozenset({"compact"})))
        for number in range(40):
            made.append(batch(key=b"%d" % (number % 4), value=b"%d" % number))
        if node > 1:
            made.log.roll(NOW)
            made.append(batch(key=b"last"))
            clean(made.log)
        else:
            made.append(batch(key=b"last"))
        made.close()

    def found() -> list[str]:
        logs = {node: read_log(tmp_path / str(node) / "t-0", compacted=True) for node in (1, 2, 3)}
        return check_compacted(logs, max(log.end for log in logs.values()))

    assert len(read_log(tmp_path / "2" / "t-0", compacted=True).batches) < 10
    assert found() == []
    first = tmp_path / "2" / "t-0" / "00000000000000000000.log"
    first.write_bytes(b"")
    assert "differs in 4 keys" in found()[0]


@pytest.mark.parametrize("target", ["index", "timeindex"])
def test_an_index_that_points_elsewhere_is_seen(logs: dict[int, Log], target: str) -> None:
    file = max(logs[1].directory.glob(f"*.{target}"), key=lambda one: one.stat().st_size)
    data = bytearray(file.read_bytes())
    data[7] ^= 1  # a position of the one, a timestamp of the other
    file.write_bytes(data)
    assert check_companions(logs[1]) != []


def test_an_epoch_that_the_batches_do_not_have_is_seen(logs: dict[int, Log]) -> None:
    (logs[1].directory / "leader-epoch-checkpoint").write_text("0\n1\n3 0\n")
    assert check_companions(logs[1]) != []


def test_a_record_says_what_it_is() -> None:
    value = value_of(7, 2, 11)
    assert number_of(7, 2, value) == 11
    assert number_of(8, 2, value) is None
    assert number_of(7, 1, value) is None
    assert number_of(7, 2, value[:-1] + b"?") is None


def test_a_seed_draws_the_same_case_again() -> None:
    cases = [drawn(seed) for seed in range(300)]
    assert cases == [drawn(seed) for seed in range(300)]
    assert {case.moment for case in cases} > {"running", "all_killed", "truncating"}
    assert any(case.absent for case in cases)
    assert len(NAMED) == 7


@pytest.mark.slow
def test_a_cluster_that_nobody_damages_is_well(tmp_path: Path) -> None:
    outcome = Trial(Case("no damage", 0, 0, (), "running"), tmp_path).run()
    assert outcome.findings == [], outcome.notes
