"""`tidelog log verify` finds what is damaged in a stopped node's files, changes nothing, and repairs from a broker."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, idempotent, marker, read
from tests.unit.storage.cleaning import clean
from tidelog.cli.logs.policies import compacted_topics
from tidelog.cli.logs.repair import PartitionRepair, RepairSource
from tidelog.cli.main import main
from tidelog.client.sync.producer import Producer
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.messages.metadata_records import ConfigRecord, frame
from tidelog.storage.files.checkpoints import encode_partition_metadata
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.segments.log_config import LogConfig
from tidelog.testing.embedded import EmbeddedBroker

COUNT = 60


def made_in(path: Path) -> Logs:
    """Sixty batches in several segments, three leader epochs, an aborted transaction; stopped cleanly."""
    made = Logs(path, LogConfig(segment_bytes=2500, index_interval_bytes=300))
    for n in range(COUNT):
        made.append(idempotent(2 * n, count=2, value=b"%03d" % n * 20, timestamp=NOW + n), epoch=n // 25)
    made.append(idempotent(0, producer_id=9, transactional=True, value=b"x" * 40, timestamp=NOW + COUNT), epoch=2)
    made.append(marker(abort=True, producer_id=9, timestamp=NOW + COUNT), epoch=2, from_client=False)
    assert made.log.segment_count >= 4
    made.close()
    return made


@pytest.fixture
def made(tmp_path: Path) -> Logs:
    return made_in(tmp_path / "data")


Content = dict[str, tuple[bytes, int]]


def content(directory: Path) -> Content:
    """Every file, and when it was changed."""
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def verify(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """Exit code, problems, summary."""
    capsys.readouterr()
    status = main(["log", "verify", "--json", *map(str, words)])
    *problems, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return status, problems, summary


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def test_whole_logs_are_whole_and_nothing_is_changed(made: Logs, capsys: pytest.CaptureFixture[str]):
    before = content(made.path)
    status, problems, summary = verify(capsys, made.path)
    assert (status, problems) == (0, [])
    size = sum(len(data) for name, (data, _) in before.items() if name.endswith(".log"))
    assert summary == {"segments": len(made.files("*.log")), "verified_bytes": size, "problems": 0, "repaired": 0}
    assert verify(capsys, made.folder)[0] == 0
    assert content(made.path) == before


def segments(made: Logs) -> list[Path]:
    return [made.folder / name for name in made.files("*.log")]


def cut_the_end(made: Logs) -> tuple[Path, str]:
    path = segments(made)[-1]
    path.write_bytes(path.read_bytes()[:-20])
    return path, "damaged records"


def empty_a_segment(made: Logs) -> tuple[Path, str]:
    path = segments(made)[1]
    path.write_bytes(b"")
    return path, "damaged records"


def remove_a_segment(made: Logs) -> tuple[Path, str]:
    before, path, *_ = segments(made)
    path.unlink()
    return before, "damaged records"


def flip_a_payload(made: Logs) -> tuple[Path, str]:
    path = segments(made)[2]
    flip(path, 500)
    return path, "damaged records"


def write_a_batch_elsewhere(made: Logs) -> tuple[Path, str]:
    path = segments(made)[1]
    data = path.read_bytes()
    (first, one), (second, two), *_ = [(position, header.size_bytes) for position, header in iter_headers(data)]
    assert one == two
    path.write_bytes(data[:second] + data[first : first + one] + data[second + two :])
    return path, "damaged records"


def flip_in(pattern: str, number: int, position: int, kind: str) -> Callable[[Logs], tuple[Path, str]]:
    def damage(made: Logs) -> tuple[Path, str]:
        path = made.folder / made.files(pattern)[number]
        flip(path, position)
        return path, kind

    return damage


def cut_an_index(made: Logs) -> tuple[Path, str]:
    path = made.folder / made.files("*.index")[1]
    path.write_bytes(path.read_bytes()[:-3])
    return path, "wrong index"


def remove_an_index(made: Logs) -> tuple[Path, str]:
    path = made.folder / made.files("*.timeindex")[-1]
    path.unlink()
    return path, "wrong index"


def remove_an_index_of_transactions(made: Logs) -> tuple[Path, str]:
    path = made.folder / made.files("*.txnindex")[0]
    path.unlink()
    return path, "wrong index of transactions"


def wrong_epochs(made: Logs) -> tuple[Path, str]:
    path = made.folder / "leader-epoch-checkpoint"
    path.write_text(path.read_text().replace("1 50", "1 60"))
    return path, "wrong leader epochs"


def no_epochs(made: Logs) -> tuple[Path, str]:
    path = made.folder / "leader-epoch-checkpoint"
    path.unlink()
    return path, "wrong leader epochs"


def overwrite(name: str, text: bytes, kind: str) -> Callable[[Logs], tuple[Path, str]]:
    def damage(made: Logs) -> tuple[Path, str]:
        path = made.path / name
        path.write_bytes(text)
        return path, kind

    return damage


DAMAGE: dict[str, Callable[[Logs], tuple[Path, str]]] = {
    "the end is cut": cut_the_end,
    "a segment is empty": empty_a_segment,
    "a segment is gone": remove_a_segment,
    "a bit of a payload": flip_a_payload,
    "a misdirected write": write_a_batch_elsewhere,
    "a bit of an index": flip_in("*.index", 1, 5, "wrong index"),
    "a bit of a time index": flip_in("*.timeindex", 1, 6, "wrong index"),
    "a cut index": cut_an_index,
    "a missing index": remove_an_index,
    "a bit of a snapshot": flip_in("*.snapshot", -1, 15, "damaged snapshot"),
    "an offset in the index of transactions": flip_in("*.txnindex", 0, 25, "wrong index of transactions"),
    "the version in the index of transactions": flip_in("*.txnindex", 0, 1, "wrong index of transactions"),
    "a missing index of transactions": remove_an_index_of_transactions,
    "the checksums of the indexes of transactions": flip_in(
        "transaction-index-checksums", 0, 4, "damaged checksums of indexes of transactions"
    ),
    "wrong epochs": wrong_epochs,
    "no epochs": no_epochs,
    "an unreadable epoch file": overwrite("t-0/leader-epoch-checkpoint", b"0\n3\n", "wrong leader epochs"),
    "an unreadable topic id": overwrite("t-0/partition.metadata", b"version: 0\n", "damaged small file"),
    "an unreadable checkpoint": overwrite("log-start-offset-checkpoint", b"0\n2\nx", "damaged small file"),
    "a log start that is too high": overwrite("log-start-offset-checkpoint", b"0\n1\nt 0 30\n", "damaged small file"),
    "meta.properties without its cluster": overwrite("meta.properties", b"version=1\n", "damaged small file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_of_every_kind_is_named_and_left_as_it_is(made: Logs, kind: str, capsys: pytest.CaptureFixture[str]):
    path, problem = DAMAGE[kind](made)
    before = content(made.path)
    status, problems, summary = verify(capsys, made.path)
    assert status == 1
    assert [(each["file"], each["problem"]) for each in problems] == [(str(path), problem)]
    assert summary["problems"] == 1
    assert content(made.path) == before


@pytest.mark.parametrize("has_epochs", [True, False])
def test_a_log_start_that_nothing_confirms_hides_no_damage(
    made: Logs, has_epochs: bool, capsys: pytest.CaptureFixture[str]
):
    """As at a node's start: the epoch file counts, or without it the first segment."""
    flip_a_payload(made)
    _, [damaged], _ = verify(capsys, made.path)
    (made.path / "log-start-offset-checkpoint").write_text(f"0\n1\nt 0 {damaged['end_offset']}\n")
    if not has_epochs:
        (made.folder / "leader-epoch-checkpoint").unlink()
    status, problems, _ = verify(capsys, made.path)
    assert status == 1
    assert damaged in problems
    assert str(made.path / "log-start-offset-checkpoint") in [each["file"] for each in problems]


def test_a_first_segment_that_is_missing_is_named(made: Logs, capsys: pytest.CaptureFixture[str]):
    first, second = segments(made)[:2]
    first.unlink()
    status, [problem], summary = verify(capsys, made.path)
    assert (status, summary["problems"]) == (1, 1)
    assert (problem["file"], problem["problem"]) == (str(first), "missing segment")
    assert (problem["first_offset"], problem["end_offset"]) == (0, int(second.name[:20]))


def test_a_line_names_file_bytes_offsets_and_reason(made: Logs, capsys: pytest.CaptureFixture[str]):
    path, _ = flip_a_payload(made)
    assert main(["log", "verify", str(made.folder)]) == 1
    problem, summary = capsys.readouterr().out.splitlines()
    position, header = next(each for each in iter_headers(path.read_bytes()) if each[0] + each[1].size_bytes > 500)
    assert problem == (
        f"{path}: bytes {position} to {position + header.size_bytes}, offsets {header.base_offset} to "
        f"{header.next_offset}: damaged records: the CRC is wrong, or the header"
    )
    assert summary.endswith("bytes verified, 1 problem")


def test_what_a_kill_leaves_is_no_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = Logs(tmp_path / "data", LogConfig(segment_bytes=2500))
    for n in range(30):
        made.append(batch(2, value=b"%03d" % n * 20))
    made.kill()
    path = segments(made)[-1]
    path.write_bytes(path.read_bytes()[:-10])
    (made.folder / made.files("*.timeindex")[-1]).unlink(missing_ok=True)
    before = content(made.path)
    status, problems, summary = verify(capsys, made.path)
    assert (status, summary["problems"]) == (0, 0)
    assert [(each["problem"], each["harmless"]) for each in problems] == [("torn end", True)]
    assert content(made.path) == before


def test_what_a_kill_does_not_explain_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = Logs(tmp_path / "data", LogConfig(segment_bytes=2500))
    for n in range(30):
        made.append(batch(2, value=b"%03d" % n * 20))
    made.log.flush()
    made.directory.write_checkpoints()
    made.kill()
    path = segments(made)[-1]
    path.write_bytes(path.read_bytes()[:-10])
    status, problems, _ = verify(capsys, made.path)
    assert status == 1
    assert problems[0]["problem"] == "damaged records"


def test_what_compaction_removed_is_no_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = LogConfig(cleanup_policy=frozenset({"compact"}), segment_bytes=1500, min_cleanable_dirty_ratio=0.0)
    made = Logs(tmp_path / "data", config)
    for n in range(60):
        made.append(batch(key=b"%d" % (n % 5), value=b"%03d" % n * 20, timestamp=NOW + n))
    clean(made.log)
    made.close()
    assert verify(capsys, made.path)[:2] == (0, [])
    (made.path / "cleaner-offset-checkpoint").write_text("0\n0\n")
    status, problems, _ = verify(capsys, made.path)
    assert status == 1
    assert {each["problem"] for each in problems} >= {"damaged records"}
    assert verify(capsys, "--compacted", "t", made.path)[:2] == (0, [])


@pytest.mark.parametrize("is_cleaned", [False, True])
def test_of_a_compacted_topic_only_the_copy_of_what_was_there_is_taken(
    tmp_path: Path, is_cleaned: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The broker's cleaner had removed a tombstone, and the key that it deletes is here: it was back for good."""
    config = LogConfig(
        cleanup_policy=frozenset({"compact"}), segment_bytes=1500, min_cleanable_dirty_ratio=0.0, delete_retention_ms=0
    )
    made, source = (Logs(tmp_path / name, config) for name in ("data", "source"))
    for each in (made, source):
        each.append(batch(key=b"deleted", value=b"1" * 50))
        for n in range(60):
            each.append(batch(key=b"%d" % n, value=b"%03d" % n * 20, timestamp=NOW + n))
        tombstone = each.append(batch(key=b"deleted", value=None, timestamp=NOW + 100))[0].first_offset
        for n in range(60):
            each.append(batch(key=b"%d" % n, value=b"%03d" % n * 20, timestamp=NOW + n))
        each.close()
    source.open()
    for days in (1, 2) if is_cleaned else ():
        clean(source.log, NOW + days * 86_400_000)

    async def fetch(self: object, connection: object, offset: int, **settings: object) -> bytes:
        return b"".join(bytes(each) for each in read(source.log, offset, 10**6, source.log.log_end_offset).regions)

    async def topic_id(self: object, *_: object) -> bytes:
        return b""

    async def connect(self: object) -> Mock:
        return Mock()

    monkeypatch.setattr(PartitionRepair, "_fetch", fetch)
    monkeypatch.setattr(RepairSource, "topic_id", topic_id)
    monkeypatch.setattr(RepairSource, "connect", connect)
    for path in segments(made):
        data = bytearray(path.read_bytes())
        for position, header in iter_headers(bytes(data)):
            if header.base_offset == tombstone:
                data[position : position + header.size_bytes] = bytes(header.size_bytes)
                path.write_bytes(data)
    status, problems, _ = verify(capsys, "--compacted", "t", "--repair-from", "a:1", made.path)
    assert [each["repaired"] for each in problems] == [not is_cleaned]
    assert status == is_cleaned
    if is_cleaned:
        assert "the node repairs it at its next start" in problems[0]["not_repaired_because"]
    source.close()


def test_the_metadata_log_says_which_topics_are_compacted(tmp_path: Path):
    directory = tmp_path / "__cluster_metadata-0"
    directory.mkdir()
    configs = [
        ConfigRecord(resource_type=2, resource_name="flights", name="cleanup.policy", value="compact,delete"),
        ConfigRecord(resource_type=2, resource_name="weather", name="cleanup.policy", value="delete"),
        ConfigRecord(resource_type=2, resource_name="planes", name="cleanup.policy", value="compact"),
        ConfigRecord(resource_type=2, resource_name="planes", name="cleanup.policy", value="delete"),
        ConfigRecord(resource_type=4, resource_name="1", name="cleanup.policy", value="compact"),
    ]
    data = encode_batch([(NOW, None, frame(each, 0), ()) for each in configs])
    (directory / "00000000000000000000.log").write_bytes(data)
    assert {each for each in compacted_topics(OsDisk(), str(directory)) if not each.startswith("__")} == {
        "flights",
        "planes",
    }


def test_a_directory_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = Logs(tmp_path / "data", LogConfig())
    made.append(batch())
    for path in (made.path, made.folder):
        assert main(["log", "verify", str(path)]) == 2
        assert capsys.readouterr().err == (
            f"tidelog: {made.path} is in use by a running node, which holds its .lock file\n"
        )
    made.close()
    assert main(["log", "verify", str(made.path)]) == 0


@pytest.mark.parametrize("left", ["*.log", "partition.metadata"])
def test_a_log_directory_without_properties_is_known_by_a_file_of_a_log(
    made: Logs, capsys: pytest.CaptureFixture[str], left: str
) -> None:
    (made.path / "meta.properties").unlink()
    for path in set(made.folder.iterdir()) - set(made.folder.glob(left)):
        path.unlink()
    assert main(["log", "verify", str(made.path)]) == 1
    assert "meta.properties: damaged small file: is missing" in capsys.readouterr().out


def test_what_is_no_log_directory_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "etc" / "dbus-1" / "system.d").mkdir(parents=True)
    no_logs = [(name, "is no log directory") for name in ("empty", "etc")]
    for name, words in (("none", "does not exist"), ("file", "is no directory"), *no_logs):
        assert main(["log", "verify", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.startswith(f"tidelog: {tmp_path / name} {words}")
    assert main(["log", "verify", "--repair-from", "a:b", str(tmp_path)]) == 2
    assert "is not host:port" in capsys.readouterr().err


class Replica:
    """A copy of the files of a broker that runs: what a second replica would have."""

    def __init__(self, broker: EmbeddedBroker, path: Path) -> None:
        self.path = path
        self.folder = path / "t-0"
        self.whole: Content = {}

    def files(self, pattern: str) -> list[str]:
        return sorted(path.name for path in self.folder.glob(pattern))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    config = {"log.segment.bytes": 1024 * 1024}
    with EmbeddedBroker(tmp_path / "running", config) as broker:
        with Producer(bootstrap_servers=broker.bootstrap_servers, linger_ms=0) as producer:
            for n in range(300):
                producer.send("t", b"%03d" % n * 5000)
                producer.flush()
        broker.stop()
        shutil.copytree(tmp_path / "running", tmp_path / "data")
        yield broker.start()


@pytest.fixture
def replica(broker: EmbeddedBroker, tmp_path: Path) -> Replica:
    replica = Replica(broker, tmp_path / "data")
    replica.whole = content(replica.folder)
    assert len(replica.files("*.log")) >= 4
    return replica


def zeros_over_a_page(made: Replica) -> None:
    path = made.folder / made.files("*.log")[1]
    data = bytearray(path.read_bytes())
    data[4096:8192] = bytes(4096)
    path.write_bytes(data)


def flips_in_two_segments(made: Replica) -> None:
    for number in (0, -1):
        flip(made.folder / made.files("*.log")[number], 3000)


REPAIRED: dict[str, Callable[[Any], object]] = {
    "zeros over a page": zeros_over_a_page,
    "flips in two segments": flips_in_two_segments,
    **{name: DAMAGE[name] for name in (
        "the end is cut", "a segment is empty", "a bit of a payload", "a misdirected write", "a bit of an index",
        "a cut index", "a missing index", "no epochs", "an unreadable epoch file",
    )},
}  # fmt: skip


# One kind of each file; the others are for `make test`.
FAST = ("zeros over a page", "the end is cut", "a missing index", "an unreadable epoch file")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FAST else (pytest.mark.slow,)) for kind in REPAIRED]
)
def test_a_running_broker_makes_it_whole_again(
    broker: EmbeddedBroker, replica: Replica, kind: str, capsys: pytest.CaptureFixture[str]
):
    REPAIRED[kind](replica)
    assert verify(capsys, replica.path)[0] == 1
    status, problems, summary = verify(capsys, "--repair-from", broker.bootstrap_servers, replica.path)
    assert problems
    assert all(each["repaired"] for each in problems), problems
    assert (status, summary["repaired"]) == (0, summary["problems"])
    assert {name: data for name, (data, _) in content(replica.folder).items()} == {
        name: data for name, (data, _) in replica.whole.items()
    }
    assert verify(capsys, replica.path)[:2] == (0, [])


@pytest.mark.slow
def test_what_another_cluster_or_topic_has_is_not_taken(
    broker: EmbeddedBroker, replica: Replica, capsys: pytest.CaptureFixture[str]
):
    flips_in_two_segments(replica)
    path = replica.folder / "partition.metadata"
    own = path.read_bytes()
    path.write_bytes(encode_partition_metadata(bytes(range(16))))
    before = content(replica.folder)
    status, problems, _ = verify(capsys, "--repair-from", broker.bootstrap_servers, replica.path)
    assert status == 1
    assert "another topic" in problems[0]["not_repaired_because"]
    assert content(replica.folder) == before
    path.write_bytes(own)
    properties = replica.path / "meta.properties"
    properties.write_text(re.sub("cluster.id=.*", "cluster.id=elsewhere", properties.read_text()))
    before = content(replica.folder)
    status, problems, _ = verify(capsys, "--repair-from", broker.bootstrap_servers, replica.path)
    assert status == 1
    assert "is of cluster" in problems[0]["not_repaired_because"]
    assert content(replica.folder) == before


@pytest.mark.slow
def test_nothing_is_repaired_where_nobody_answers(replica: Replica, capsys: pytest.CaptureFixture[str]):
    flips_in_two_segments(replica)
    before = content(replica.folder)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        status, problems, summary = verify(
            capsys, "--repair-from", f"127.0.0.1:{unused.getsockname()[1]}", replica.path
        )
    assert (status, summary["repaired"]) == (1, 0)
    assert "cannot connect" in problems[0]["not_repaired_because"]
    assert content(replica.folder) == before


@pytest.mark.slow
def test_a_torn_end_is_left_to_the_next_start_while_damage_before_it_is_repaired(
    broker: EmbeddedBroker, replica: Replica, capsys: pytest.CaptureFixture[str]
):
    (replica.path / ".kafka_cleanshutdown").unlink()
    path = replica.folder / replica.files("*.log")[-1]
    whole = path.read_bytes()
    checkpoint = replica.path / "recovery-point-offset-checkpoint"
    checkpoint.write_text(re.sub(r"(?m)^t 0 300$", "t 0 299", checkpoint.read_text()))
    path.write_bytes(whole[:-7])
    flip(path, 500)
    status, problems, summary = verify(capsys, "--repair-from", broker.bootstrap_servers, replica.path)
    assert (status, summary["problems"], summary["repaired"]) == (0, 1, 1)
    assert [each["problem"] for each in problems] == ["damaged records", "torn end"]
    assert path.read_bytes() == whole[:-7], "the node's next start must see that its end was torn"
