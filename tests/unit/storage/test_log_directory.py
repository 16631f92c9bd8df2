"""One log.dir: whose it is, what is in it, and how it is left."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.simulation.simulated_disk import PowerLoss, SimulatedDisk
from tests.unit.storage.batches import NOW, TOPIC_ID, Logs, batch, offsets_of, records_of
from tidelog.protocol.uuids import METADATA_TOPIC_ID, uuid_from_text
from tidelog.storage.files import checkpoints
from tidelog.storage.files.checkpoints import (
    HIGH_WATERMARK_FILE,
    LOG_START_FILE,
    RECOVERY_POINT_FILE,
    CheckpointTask,
)
from tidelog.storage.files.disk import DirectoryInUse, OsDisk
from tidelog.storage.files.meta_properties import ForeignDirectory
from tidelog.storage.log import closing
from tidelog.storage.log import directory as log_directory
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.flush import FlushTask
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.log_config import LogConfig

MakeLogs = Callable[..., Logs]
CONFIG = LogConfig()
CHECKPOINTS = (RECOVERY_POINT_FILE, LOG_START_FILE, HIGH_WATERMARK_FILE)


def opened(path: Path, *, node_id: int = 1, cluster_id: str | None = None) -> LogDirectory:
    return LogDirectory.open(OsDisk(), str(path), node_id=node_id, cluster_id=cluster_id)


class TestFormatting:
    def test_an_empty_directory_is_formatted_as_kafka_does(self, tmp_path: Path):
        directory = opened(tmp_path / "a" / "b", node_id=3, cluster_id="some-cluster")
        lines = (tmp_path / "a" / "b" / "meta.properties").read_text().splitlines()
        assert lines[0] == "#"
        values = dict(line.split("=") for line in lines[1:])
        assert values["version"] == "1"
        assert values["node.id"] == "3"
        assert values["cluster.id"] == "some-cluster"
        assert uuid_from_text(values["directory.id"]) == directory.directory_id
        assert not values["directory.id"].startswith("-")
        directory.close()

    def test_without_a_cluster_id_one_is_made_and_kept(self, tmp_path: Path):
        first = opened(tmp_path)
        assert len(first.cluster_id) == 22
        first.close()
        second = opened(tmp_path)
        assert (second.cluster_id, second.directory_id) == (first.cluster_id, first.directory_id)
        second.close()

    def test_a_directory_without_an_id_gets_one(self, tmp_path: Path):
        (tmp_path / "meta.properties").write_text("version=1\ncluster.id=c\nnode.id=1\n")
        directory = opened(tmp_path)
        directory.close()
        assert "directory.id=" in (tmp_path / "meta.properties").read_text()


class TestForeign:
    def refused(self, path: Path, **kw: object) -> str:
        with pytest.raises(ForeignDirectory) as caught:
            opened(path, **kw)  # type: ignore[arg-type]
        message = str(caught.value)
        assert "\n" not in message
        return message

    def test_another_node_another_cluster(self, tmp_path: Path):
        opened(tmp_path, node_id=1, cluster_id="a").close()
        assert "belongs to node 1" in self.refused(tmp_path, node_id=2)
        assert "belongs to cluster a" in self.refused(tmp_path, cluster_id="b")
        opened(tmp_path, cluster_id="a").close()

    def test_a_line_about_lost_properties_has_the_remedy(self, tmp_path: Path):
        opened(tmp_path, node_id=1, cluster_id="a").close()
        path = tmp_path / "meta.properties"
        for text in ("nonsense", "version=1\nnode.id=1\n", "version=1\nnode.id=1\ncluster.id=a\ndirectory.id=?\n"):
            path.write_text(text)
            assert "write it anew: version=1, node.id, and the cluster.id" in self.refused(tmp_path, node_id=1)
        (tmp_path / "replication-offset-checkpoint").write_text("0\n0\n")
        path.unlink()
        assert "write it anew: version=1, node.id, and the cluster.id" in self.refused(tmp_path, node_id=1)

    def test_a_directory_with_other_things_in_it(self, tmp_path: Path):
        (tmp_path / "thesis.tex").write_text("x")
        assert "thesis.tex" in self.refused(tmp_path)
        assert not (tmp_path / "meta.properties").exists()

    @pytest.mark.parametrize(
        "text",
        ["version=0\nbroker.id=1\n", "nonsense", "version=1\nnode.id=1\n", "version=2\ncluster.id=c\nnode.id=1\n"],
    )
    def test_properties_of_another_kind(self, tmp_path: Path, text: str):
        (tmp_path / "meta.properties").write_text(text)
        assert "meta.properties" in self.refused(tmp_path)
        (tmp_path / "meta.properties").write_bytes(b"\xff\xff")
        self.refused(tmp_path)

    def test_a_refused_directory_is_not_left_locked(self, tmp_path: Path):
        opened(tmp_path, node_id=1).close()
        self.refused(tmp_path, node_id=2)
        opened(tmp_path, node_id=1).close()


class TestLock:
    def test_a_second_owner_is_refused_also_in_this_process(self, tmp_path: Path):
        directory = opened(tmp_path)
        with pytest.raises(DirectoryInUse):
            opened(tmp_path)
        directory.close()
        opened(tmp_path).close()

    def test_and_in_another_process(self, tmp_path: Path):
        directory = opened(tmp_path)
        code = (
            "import fcntl, sys\n"
            "try: fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
            "except OSError: print('locked')\n"
        )
        run = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / ".lock")],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
        assert run.stdout.strip() == "locked"
        directory.close()

    def test_what_cannot_be_written_is_an_os_error(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError):
            opened(tmp_path / "file" / "logs")


class TestLogs:
    def test_logs_are_found_again(self, tmp_path: Path):
        directory = opened(tmp_path)
        for topic, partition in (("a", 0), ("a", 11), ("with-dash.and_dot", 3)):
            log = directory.create_log(topic, partition, TOPIC_ID, CONFIG, NOW)
            log.append_as_leader(batch(partition + 1), 0, NOW)
            log.set_high_watermark(partition)
        directory.close()
        asked: list[str] = []

        def config_for(topic: str) -> LogConfig:
            asked.append(topic)
            return LogConfig(segment_bytes=12345)

        found = opened(tmp_path).load(config_for, NOW)
        assert sorted(found) == [("a", 0), ("a", 11), ("with-dash.and_dot", 3)]
        assert sorted(set(asked)) == ["a", "with-dash.and_dot"]
        log = found["a", 11]
        assert (log.topic, log.partition, log.topic_id) == ("a", 11, TOPIC_ID)
        assert (log.log_end_offset, log.high_watermark, log.config.segment_bytes) == (12, 11, 12345)

    def test_other_directories_are_left_alone(self, tmp_path: Path):
        opened(tmp_path).close()
        for name in (
            "remote-log-index-cache",
            "a-0.0123456789abcdef0123456789abcdef-future",
            "b-1.ff-stray",
            "lost+found",
        ):
            (tmp_path / name).mkdir()
        assert opened(tmp_path).load(lambda topic: CONFIG, NOW) == {}

    def test_one_that_cannot_be_opened_stays_offline_alone(self, tmp_path: Path):
        directory = opened(tmp_path)
        for partition in (0, 1):
            directory.create_log("a", partition, TOPIC_ID, CONFIG, NOW).append_as_leader(batch(), 0, NOW)
        directory.close()
        (tmp_path / "a-0" / "00000000000000000000.log").unlink()
        (tmp_path / "a-0" / "00000000000000000000.log").mkdir()
        (tmp_path / "a-0" / "leader-epoch-checkpoint").unlink()
        (tmp_path / "a-0" / "leader-epoch-checkpoint").mkdir()
        directory = opened(tmp_path)
        assert list(directory.load(lambda topic: CONFIG, NOW)) == [("a", 1)]
        assert list(directory.offline) == [("a", 0)]
        assert directory.vanished == set()
        directory.close()
        recovery_points = (tmp_path / RECOVERY_POINT_FILE).read_text().splitlines()
        assert recovery_points[2:] == ["a 0 1", "a 1 1"], "it may be put right"
        assert not (tmp_path / ".kafka_cleanshutdown").exists()

    def test_a_deleted_log_is_gone_at_once_and_its_files_later(self, tmp_path: Path):
        directory = opened(tmp_path)
        directory.create_log("a", 0, TOPIC_ID, LogConfig(file_delete_delay_ms=100), NOW)
        directory.delete_log("a", 0, NOW)
        assert ("a", 0) not in directory.logs
        [renamed] = [path.name for path in tmp_path.iterdir() if path.name.endswith("-delete")]
        assert renamed.startswith("a-0.")
        assert len(renamed) == len("a-0.") + 32 + len("-delete")
        directory.maintain(NOW + 99)
        assert (tmp_path / renamed).exists()
        directory.create_log("a", 0, bytes(16), CONFIG, NOW)
        directory.maintain(NOW + 100)
        assert not (tmp_path / renamed).exists()
        directory.close()

    @pytest.mark.parametrize("how", ["delete_log", "set_aside"])
    def test_one_that_cannot_be_renamed_now_is_nobody_elses(
        self, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
    ):
        directory = opened(tmp_path)
        old = directory.create_log("a", 0, TOPIC_ID, CONFIG, NOW)
        old.append_as_leader(batch(3), 0, NOW)
        directory.create_log("b", 0, TOPIC_ID, CONFIG, NOW)

        def refuse(*arguments: object) -> None:
            raise OSError(errno.ENOMEM, "no memory")

        with monkeypatch.context() as patch:
            patch.setattr(OsDisk, "rename", refuse)
            for topic in ("a", "b"):
                with pytest.raises(OSError, match="no memory"):
                    directory.delete_log(topic, 0, NOW) if how == "delete_log" else directory.set_aside(topic, 0)
            assert old.failure is None
            with pytest.raises(OSError, match="no memory"):
                directory.create_log("a", 0, bytes(16), CONFIG, NOW)
        assert directory.create_log("a", 0, b"n" * 16, CONFIG, NOW).log_end_offset == 0
        directory.maintain(NOW)
        assert list(directory.logs) == [("a", 0)]
        assert len([path for path in tmp_path.iterdir() if path.name.endswith(("-delete", "-stray"))]) == 2
        directory.close()

    def test_a_future_one_that_cannot_be_renamed_now_makes_way(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        directory = opened(tmp_path)
        directory.create_future("a", 0, TOPIC_ID, CONFIG, NOW)
        discarded = directory.futures["a", 0]

        def refuse(*arguments: object) -> None:
            raise OSError(errno.ENOMEM, "no memory")

        with monkeypatch.context() as patch:
            patch.setattr(OsDisk, "rename", refuse)
            with pytest.raises(OSError, match="no memory"):
                directory.discard_future("a", 0, NOW)
        assert (directory.futures["a", 0], discarded.failure) == (discarded, None)
        directory.create_future("a", 0, TOPIC_ID, CONFIG, NOW)
        assert discarded.failure is not None
        assert len([path for path in tmp_path.iterdir() if path.name.endswith("-delete")]) == 1
        directory.close()

    @pytest.mark.parametrize("ending", ["a stop", "a kill", "a kill before its first checkpoint"])
    @pytest.mark.parametrize("is_listed_last", [True, False])
    def test_of_two_future_ones_a_start_keeps_the_one_with_records(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, is_listed_last: bool
    ):
        """A shortage had interrupted the first creation. The directory that was listed first stayed for good."""

        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        directory = opened(tmp_path)
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(OsDisk, "write_file", fail)
                with pytest.raises(OSError, match="Too many"):
                    directory.create_future("a", 0, TOPIC_ID, CONFIG, NOW)
            assert directory.futures == {}
        directory.create_future("a", 0, TOPIC_ID, CONFIG, NOW)
        log = directory.futures["a", 0]
        log.append_as_leader(batch(3), 0, NOW, from_client=False)
        log.flush()
        if ending == "a stop":
            directory.close()
        else:
            if ending == "a kill":
                directory.write_checkpoints()
            directory._lock.release()
        directory = opened(tmp_path)
        directory.ending = Ending.CLEAN if ending == "a stop" else Ending.KILLED
        listed = OsDisk().list_directory
        monkeypatch.setattr(
            OsDisk,
            "list_directory",
            lambda _, path: sorted(
                listed(path), key=lambda each: (log.directory.endswith(each.name)) == is_listed_last
            ),
        )
        directory.load(lambda topic: CONFIG, NOW)
        [found] = directory.futures.values()
        assert (found.directory, found.log_end_offset, found.damaged_ranges()) == (log.directory, 3, [])
        directory.maintain(NOW)
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [Path(log.directory).name]
        directory.close()

    def test_a_deletion_that_was_begun_is_finished_after_a_restart(self, tmp_path: Path):
        directory = opened(tmp_path)
        directory.create_log("t" * 249, 0, TOPIC_ID, CONFIG, NOW)
        directory.delete_log("t" * 249, 0, NOW)
        directory.close()
        directory = opened(tmp_path)
        assert directory.load(lambda topic: CONFIG, NOW) == {}
        directory.maintain(NOW)
        assert not [path for path in tmp_path.iterdir() if path.is_dir()]
        directory.close()

    def test_a_lost_topic_id_can_be_written_again(self, tmp_path: Path):
        directory = opened(tmp_path)
        directory.create_log("a", 0, TOPIC_ID, CONFIG, NOW).append_as_leader(batch(), 0, NOW)
        directory.close()
        (tmp_path / "a-0" / "partition.metadata").unlink()
        directory = opened(tmp_path)
        assert directory.load(lambda topic: CONFIG, NOW)["a", 0].topic_id is None
        directory.set_topic_id("a", 0, TOPIC_ID)
        directory.close()
        assert opened(tmp_path).load(lambda topic: CONFIG, NOW)["a", 0].topic_id == TOPIC_ID

    def test_several_directories_do_not_know_each_other(self, tmp_path: Path):
        one, two = opened(tmp_path / "one"), opened(tmp_path / "two")
        one.create_log("a", 0, TOPIC_ID, CONFIG, NOW)
        two.create_log("a", 1, TOPIC_ID, CONFIG, NOW)
        assert one.directory_id != two.directory_id
        one.close()
        two.close()
        assert list(opened(tmp_path / "two").load(lambda topic: CONFIG, NOW)) == [("a", 1)]


@pytest.mark.parametrize("can_sync_at_once", [True, False])
def test_many_logs_are_closed_as_well_as_few(logs: MakeLogs, can_sync_at_once: bool, monkeypatch: pytest.MonkeyPatch):
    made = logs()
    monkeypatch.setattr(type(made.disk), "sync_all", lambda disk, directories, since: can_sync_at_once)
    put_in_place, in_place = FlushTask.put_in_place, []

    def note(task: FlushTask) -> None:
        in_place.append(task)
        put_in_place(task)

    monkeypatch.setattr(FlushTask, "put_in_place", note)
    for partition in range(40):
        log = made.directory.create_log("many", partition, TOPIC_ID, CONFIG, NOW)
        log.append_as_leader(batch(partition + 1), 7, NOW)
    made.append(batch(2))
    made.close()
    assert bool(in_place) is can_sync_at_once, "a small file that is not on the device replaces none"
    made.open()
    assert made.directory.was_clean
    for partition in range(40):
        log = made.directory.logs["many", partition]
        assert log.log_end_offset == partition + 1
        assert list(log.leader_epochs) == [(7, 0)]
    made.close()


def test_a_directory_has_few_files_open_at_a_start_and_a_stop(logs: MakeLogs, monkeypatch: pytest.MonkeyPatch):
    """A node with more partitions than it may have files ran well, and could not be stopped cleanly and started."""
    made = logs()
    for partition in range(40):
        made.directory.create_log("many", partition, TOPIC_ID, CONFIG, NOW).append_as_leader(batch(), 7, NOW)
    open_count = most = 0
    begin, finish = PartitionLog.begin_close, PartitionLog.finish_close

    def watched_begin(log: PartitionLog) -> Any:
        nonlocal open_count, most
        open_count += 1
        most = max(most, open_count)
        return begin(log)

    def watched_finish(log: PartitionLog, task: Any) -> None:
        nonlocal open_count
        finish(log, task)
        open_count -= 1

    monkeypatch.setattr(PartitionLog, "begin_close", watched_begin)
    monkeypatch.setattr(PartitionLog, "finish_close", watched_finish)
    monkeypatch.setattr(closing, "CLOSED_AT_ONCE_MAX", 10)
    made.close()
    assert (open_count, most) == (0, 10)
    for leave in (made.kill, made.close):
        made.open()
        opened_logs = made.directory.logs.values()
        assert len(opened_logs) == 41
        assert not any(segment.is_open for log in opened_logs for segment in log.segments)
        leave()


@pytest.mark.parametrize("is_stopped_between", [False, True])
@pytest.mark.parametrize("file", ["partition.metadata", f"{0:020}.log"])
@pytest.mark.parametrize("seed", range(6))
def test_a_log_that_is_created_at_the_second_attempt_survives_a_loss_of_power(
    file: str, seed: int, is_stopped_between: bool
):
    disk = SimulatedDisk(Random(seed))
    disk.make_directory("/disk")
    disk.sync_everything()

    def start() -> LogDirectory:
        directory = LogDirectory.open(disk, "/disk/logs", node_id=1, cluster_id="cluster")
        directory.load(lambda topic: CONFIG, NOW)
        return directory

    start().close()
    directory = start()
    assert directory.was_clean
    disk.break_directory(f"/disk/logs/t-0/{file}", errno.EMFILE, "write")
    with pytest.raises(OSError, match="simulated"):
        directory.create_log("t", 0, TOPIC_ID, CONFIG, NOW)
    disk.broken.clear()
    if is_stopped_between:
        directory.close()
        directory = start()
    log = directory.logs.get(("t", 0)) or directory.create_log("t", 0, TOPIC_ID, CONFIG, NOW)
    if log.topic_id is None:
        directory.set_topic_id("t", 0, TOPIC_ID)
    log.append_as_leader(batch(), 7, NOW)
    log.flush()
    disk.lose_power()
    log = start().logs["t", 0]
    assert (log.log_end_offset, log.topic_id) == (1, TOPIC_ID)


class UnluckyRandom(Random):
    """A loss of power takes all that was not synced."""

    def randrange(self, *_: Any) -> int:
        return 0


class RefusingDisk(SimulatedDisk):
    def __init__(self) -> None:
        super().__init__(UnluckyRandom(1))
        self.refused: dict[str, int] = {}
        """Directory -> the error of its sync."""

    def sync_directory(self, path: str) -> None:
        if path in self.refused:
            raise OSError(self.refused[path], "refused", path)
        super().sync_directory(path)


class TestNewDirectories:
    """What a flush has put on the device stays there, though a process before was killed while it made directories."""

    PATH = "/disk/node/logs"

    def disk(self) -> RefusingDisk:
        disk = RefusingDisk()
        disk.make_directory("/disk")
        disk.sync_everything()
        return disk

    def start(self, disk: SimulatedDisk) -> LogDirectory:
        directory = LogDirectory.open(disk, self.PATH, node_id=1, cluster_id="cluster")
        directory.load(lambda topic: CONFIG, NOW)
        return directory

    def write(self, directory: LogDirectory) -> int:
        """Returns the log end offset."""
        log = directory.logs.get(("t", 0)) or directory.create_log("t", 0, TOPIC_ID, CONFIG, NOW)
        log.append_as_leader(batch(), 7, NOW)
        log.flush()
        return log.log_end_offset

    def kept(self, disk: SimulatedDisk) -> int:
        disk.lose_power()
        log = self.start(disk).logs.get(("t", 0))
        return 0 if log is None else log.log_end_offset

    def test_the_process_was_killed_at_any_operation(self):
        operation, is_over = 0, False
        while not is_over:
            operation += 1
            disk = self.disk()
            disk.fail_after(operation)
            try:
                self.write(self.start(disk))
                is_over = True
            except PowerLoss:
                pass
            disk.end_process()  # the power stays
            assert self.write(self.start(disk)) == self.kept(disk), operation
        assert operation > 20

    def test_another_program_made_it(self):
        """As `mkdir -p` does, which syncs nothing."""
        disk = self.disk()
        disk.make_directory("/disk/node")
        disk.make_directory(self.PATH)
        assert self.write(self.start(disk)) == self.kept(disk)

    @pytest.mark.parametrize("code", [errno.EACCES, errno.EINVAL, errno.EROFS])
    def test_the_directory_above_cannot_be_synced(self, code: int):
        """It is another user's, and may only be passed (mode 711), or its file system has no such sync."""
        disk = self.disk()
        disk.refused = {"/disk": code, "/disk/node": code}
        self.start(disk).close()
        assert self.start(disk).was_clean

    def test_an_error_of_its_device_is_met(self):
        disk = self.disk()
        self.start(disk).close()
        disk.refused["/disk/node"] = errno.EIO
        with pytest.raises(OSError, match="/disk/node"):
            self.start(disk)


class TestMetadataLog:
    def test_it_is_created_and_opened_and_not_among_the_others(self, tmp_path: Path):
        directory = opened(tmp_path)
        assert directory.load(lambda topic: CONFIG, NOW) == {}
        log = directory.open_metadata_log(CONFIG, NOW)
        assert log.topic_id == METADATA_TOPIC_ID
        log.append_as_leader(batch(3), 1, NOW, from_client=False)
        directory.close()
        directory = opened(tmp_path)
        assert directory.load(lambda topic: CONFIG, NOW) == {}
        log = directory.open_metadata_log(CONFIG, NOW)
        assert offsets_of(records_of(log)) == [0, 1, 2]
        assert "__cluster_metadata" not in (tmp_path / "recovery-point-offset-checkpoint").read_text()
        directory.close()

    @pytest.mark.parametrize("shorten", [PartitionLog.truncate_to, PartitionLog.truncate_fully_and_start_at])
    def test_the_others_keep_their_checkpoints_when_it_is_cut_before_they_are_open(
        self, tmp_path: Path, shorten: Callable[[PartitionLog, int], None]
    ):
        """A node opens its other logs when it knows the metadata: after a snapshot, or after a cut at another leader's.

        Empty checkpoints took the place of theirs: high watermarks and the starts of logs were gone.
        """
        directory = opened(tmp_path)
        metadata = directory.open_metadata_log(CONFIG, NOW)
        metadata.append_as_leader(batch(3), 1, NOW, from_client=False)
        log = directory.create_log("t", 0, TOPIC_ID, CONFIG, NOW)
        log.append_as_leader(batch(3), 0, NOW, from_client=False)
        log.set_high_watermark(3)
        log.delete_records(2)
        directory.close()
        directory = opened(tmp_path)
        shorten(directory.open_metadata_log(CONFIG, NOW), 0)
        directory.finish_checkpoints(_run(directory.begin_checkpoints()))
        [log] = directory.load(lambda topic: CONFIG, NOW).values()
        assert (log.log_start_offset, log.high_watermark) == (2, 3)
        directory.close()


def test_what_is_remembered_of_deleted_logs_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(log_directory, "REMOVED_LOGS_MAX", 3)
    directory = opened(tmp_path)
    for number in range(20):
        directory.create_log(f"t{number}", 0, TOPIC_ID, CONFIG, NOW)
        directory.delete_log(f"t{number}", 0, NOW)
        directory.finish_checkpoints(_run(directory.begin_checkpoints()))
        assert len(directory._removed_logs) <= 3
    directory.close()


def _run(task: CheckpointTask) -> CheckpointTask:
    task.run()
    return task


class TestCheckpoints:
    def test_what_they_say(self, logs: MakeLogs):
        made = logs(segment_bytes=200)
        made.append(*(batch(1, value=b"x" * 100) for _ in range(4)))
        made.log.delete_records(2)
        made.directory.write_checkpoints()
        read = {path.name: path.read_text() for path in made.path.glob("*checkpoint")}
        assert read == {
            "cleaner-offset-checkpoint": "0\n0\n",
            "recovery-point-offset-checkpoint": "0\n1\nt 0 0\n",
            "log-start-offset-checkpoint": "0\n1\nt 0 2\n",
            "replication-offset-checkpoint": "0\n1\nt 0 4\n",
        }
        made.log.flush()
        made.directory.write_checkpoints()
        # One below the end: the indexes of the last segment are not on the device while it is open.
        assert (made.path / "recovery-point-offset-checkpoint").read_text() == "0\n1\nt 0 3\n"
        made.close()
        assert (made.path / "recovery-point-offset-checkpoint").read_text() == "0\n1\nt 0 4\n"
        assert (made.path / ".kafka_cleanshutdown").read_text() == '{"version":0,"brokerEpoch":-1}'

    def test_what_has_not_changed_is_not_written_again(self, logs: MakeLogs):
        made = logs()
        made.append(batch())

        def written() -> set[str]:
            task = made.directory.begin_checkpoints()
            task.run()
            made.directory.finish_checkpoints(task)
            return set(task.files)

        assert {"recovery-point-offset-checkpoint", "replication-offset-checkpoint"} <= written()
        assert written() == set()
        made.append(batch())
        assert written() == {"replication-offset-checkpoint"}
        assert (made.path / "replication-offset-checkpoint").read_text() == "0\n1\nt 0 2\n"
        late = made.directory.begin_checkpoints()
        made.append(batch())
        made.directory.write_checkpoints()
        assert written() == set(), "on the device already"
        late.run()
        made.directory.finish_checkpoints(late)
        assert (made.path / "replication-offset-checkpoint").read_text() == "0\n1\nt 0 3\n"
        made.append(batch())
        lost = made.directory.begin_checkpoints()
        lost.error = OSError("no device")
        with pytest.raises(OSError, match="no device"):
            made.directory.finish_checkpoints(lost)
        assert written() == {"replication-offset-checkpoint"}, "what could not be written is tried again"

    def test_it_takes_the_offsets_of_some_logs_at_a_time(self, logs: MakeLogs, monkeypatch: pytest.MonkeyPatch):
        """Those of 10,000 logs held the loop for 45 ms, every five seconds."""
        monkeypatch.setattr(log_directory, "LOGS_AT_ONCE", 2)
        made = logs()
        directory = made.directory
        others = [directory.create_log("t", number, TOPIC_ID, CONFIG, NOW) for number in range(1, 7)]
        made.append(batch(3))
        steps = directory.checkpoint_steps()
        assert next(steps) is None  # it has seen t-0 and t-1
        for log in (made.log, others[3]):
            log.append_as_leader(batch(2), 1, NOW, from_client=False)
            log.set_high_watermark(log.log_end_offset)
        others[3].delete_records(1)
        directory.delete_log("t", 5, NOW)
        directory.create_log("t", 7, TOPIC_ID, CONFIG, NOW)
        assert [next(steps), next(steps)] == [None, None]
        task = next(steps)
        assert task is not None
        directory.delete_log("t", 6, NOW)
        assert directory.finish_checkpoints(_run(task)) is False
        lines = {name: (made.path / name).read_text().splitlines()[2:] for name in CHECKPOINTS}
        assert lines[HIGH_WATERMARK_FILE] == ["t 0 3", "t 1 0", "t 2 0", "t 3 0", "t 4 2", "t 6 0"]
        assert lines[LOG_START_FILE] == ["t 4 1"]
        assert [line.split()[1] for line in lines[RECOVERY_POINT_FILE]] == ["0", "1", "2", "3", "4", "6"]
        assert (made.path / "t-4" / "leader-epoch-checkpoint").read_text().split("\n")[2] == "1 1"
        assert task.unnamed == frozenset(), "t-5 was there when it began"

    def test_a_log_that_is_flushed_between_its_steps_still_counts_as_cleaned(
        self, logs: MakeLogs, monkeypatch: pytest.MonkeyPatch
    ):
        """Its recovery point is from before the flush: a start would take a lost segment for one that was cleaned."""
        monkeypatch.setattr(log_directory, "LOGS_AT_ONCE", 1)
        made = logs()
        made.append(batch(3))
        made.log.unsynced_gaps_below, made.log.cleaned_offset = 3, 2
        made.directory.create_log("t", 1, TOPIC_ID, CONFIG, NOW)
        steps = made.directory.checkpoint_steps()
        assert next(steps) is None
        made.log.flush()
        made.log.unsynced_gaps_below = 0
        assert next(steps) is None
        task = next(steps)
        assert task is not None
        assert task.files["cleaner-offset-checkpoint"] == {("t", 0): 2}
        assert task.files[RECOVERY_POINT_FILE]["t", 0] == 0
        assert [*task.files][-1] == "cleaner-offset-checkpoint"

    @pytest.mark.parametrize("is_in_place", [True, False])
    @pytest.mark.parametrize(("steps_before", "is_before_task"), [(1, True), (1, False), (3, False)])
    def test_a_log_that_is_cleaned_during_a_checkpoint_is_named_after_it(
        self,
        logs: MakeLogs,
        monkeypatch: pytest.MonkeyPatch,
        steps_before: int,
        is_before_task: bool,
        is_in_place: bool,
    ):
        """Its topic was not compacted for a moment, in which the checkpoint began. A start needs the name."""
        monkeypatch.setattr(log_directory, "LOGS_AT_ONCE", 1)
        made = logs(cleanup_policy=frozenset({"compact"}))
        made.directory.create_log("t", 1, TOPIC_ID, CONFIG, NOW)
        made.directory.write_checkpoints()
        compacted, made.log.config = made.log.config, CONFIG
        steps = made.directory.checkpoint_steps()
        taken = [next(steps) for _ in range(steps_before)]
        made.log.config = compacted
        if is_before_task:
            made.directory.enter_in_cleaner_checkpoint(made.log)
        task = [*taken, *steps][-1]
        assert task is not None
        task.run()
        if not is_in_place:
            made.directory.enter_in_cleaner_checkpoint(made.log)
        made.directory.finish_checkpoints(task)
        made.directory.enter_in_cleaner_checkpoint(made.log)
        made.directory.finish_synced_checkpoints(task, NOW)
        assert (made.path / "cleaner-offset-checkpoint").read_text() == "0\n1\nt 0 0\n"

    def test_newer_checkpoints_that_were_written_between_its_steps_stay(
        self, logs: MakeLogs, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(log_directory, "LOGS_AT_ONCE", 1)
        made = logs()
        steps = made.directory.checkpoint_steps()
        assert next(steps) is None
        made.append(batch(3))
        made.directory.write_checkpoints()
        task = next(steps)
        assert task is not None
        made.directory.finish_checkpoints(_run(task))
        assert (made.path / HIGH_WATERMARK_FILE).read_text() == "0\n1\nt 0 3\n"

    def test_files_that_a_bug_left_unwritten_are_not_put_in_place(
        self, logs: MakeLogs, monkeypatch: pytest.MonkeyPatch
    ):
        """Nor those of an earlier task, which newer ones had overtaken."""
        made = logs()
        _run(made.directory.begin_checkpoints())
        made.append(batch(3))
        made.directory.write_checkpoints()
        made.append(batch(3))
        task = made.directory.begin_checkpoints()

        def fail(offsets: object) -> bytes:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "encode_offsets", fail)
            with suppress(MemoryError):
                task.run()
        with suppress(MemoryError):
            made.directory.finish_checkpoints(task)
        assert (made.path / HIGH_WATERMARK_FILE).read_text() == "0\n1\nt 0 3\n"

    def test_the_directory_of_a_log_has_vanished(self, logs: MakeLogs):
        made = logs()
        task = made.directory.begin_checkpoints()
        shutil.rmtree(made.folder)
        task.run()
        with pytest.raises(FileNotFoundError, match="vanished"):
            made.directory.finish_checkpoints(task)

    def test_logs_that_come_and_go_during_a_checkpoint_have_not_vanished(self, logs: MakeLogs):
        made = logs()
        directory = made.directory
        for name in ("deleted", "created again", "moved"):
            directory.create_log(name, 0, TOPIC_ID, CONFIG, NOW)
        task = directory.begin_checkpoints()
        directory.delete_log("created again", 0, NOW)
        directory.set_aside("moved", 0)
        directory.create_future("moved", 0, TOPIC_ID, CONFIG, NOW)
        task.run()
        directory.delete_log("deleted", 0, NOW)
        directory.promote_future("moved", 0)
        directory.create_log("created again", 0, TOPIC_ID, CONFIG, NOW)
        directory.create_log("created", 0, TOPIC_ID, CONFIG, NOW)
        directory.finish_checkpoints(task)

    def test_how_far_a_log_is_cleaned_is_written_though_a_checkpoint_was_overtaken(self, logs: MakeLogs):
        made = logs(cleanup_policy=frozenset({"compact"}))
        made.append(batch(key=b"k"))
        made.log.cleaned_offset = 1
        overtaken = made.directory.begin_checkpoints()
        overtaken.run()
        made.directory._write_log_starts()  # retention, right after the cleaning
        made.directory.finish_checkpoints(overtaken)
        task = made.directory.begin_checkpoints()
        task.run()
        assert made.directory.finish_checkpoints(task)
        task.sync()
        made.directory.finish_synced_checkpoints(task, NOW)
        assert (made.path / "cleaner-offset-checkpoint").read_text() == "0\n1\nt 0 1\n"
        assert "cleaner-offset-checkpoint" not in made.directory.begin_checkpoints().files

    def test_the_marker_is_gone_as_soon_as_the_directory_is_open(self, logs: MakeLogs):
        made = logs()
        made.append(batch())
        made.close()
        directory = made._open()
        assert directory.was_clean
        assert not (made.path / ".kafka_cleanshutdown").exists()
        directory._lock.release()
        assert not made._open().was_clean


class TestNewLogsOfOldNames:
    """A topic that is deleted and created again soon, or a directory that is set aside."""

    @pytest.mark.parametrize("leave", [LogDirectory.delete_log, lambda directory, *of: directory.set_aside(*of[:2])])
    @pytest.mark.parametrize("is_future", [False, True])
    @pytest.mark.parametrize("is_restarted", [False, True])
    def test_what_the_checkpoints_say_of_the_old_log_is_not_said_of_the_new_one(
        self, tmp_path: Path, leave: Callable[..., object], is_restarted: bool, is_future: bool
    ):
        """After a kill before the next checkpoints its records were taken for ones below the old log's start."""
        directory = opened(tmp_path)
        log = directory.create_log("t", 0, TOPIC_ID, CONFIG, NOW)
        log.append_as_leader(batch(30), 0, NOW, from_client=False)
        log.set_high_watermark(30)
        log.delete_records(20)
        log.flush()
        directory.write_checkpoints()
        leave(directory, "t", 0, NOW)
        if is_restarted:
            directory._lock.release()  # a kill
            directory = opened(tmp_path)
            directory.load(lambda topic: CONFIG, NOW)
        if is_future:
            directory.create_future("t", 0, TOPIC_ID, CONFIG, NOW)
            log = directory.futures["t", 0]
        else:
            log = directory.create_log("t", 0, TOPIC_ID, CONFIG, NOW)
        log.append_as_leader(batch(3), 0, NOW, from_client=False)
        directory._lock.release()  # a kill
        directory = opened(tmp_path)
        directory.ending = Ending.KILLED
        directory.load(lambda topic: CONFIG, NOW)
        [log] = (directory.futures if is_future else directory.logs).values()
        assert (log.log_start_offset, log.log_end_offset, log.high_watermark) == (0, 3, 0)
        assert not log.damaged_ranges()
        assert not directory.shortened_logs
        directory.close()


@pytest.mark.parametrize("kind", ["present", "copy of a present one", "future alone"])
def test_the_torn_end_of_a_future_log_is_a_loss_only_where_no_present_log_is_there(tmp_path: Path, kind: str):
    """A kill in the middle of a write for a move made the broker leave the ISR of all its partitions."""
    directory, is_future = opened(tmp_path), kind != "present"
    create = directory.create_future if is_future else directory.create_log
    create("t", 0, TOPIC_ID, CONFIG, NOW)
    [log] = (directory.futures if is_future else directory.logs).values()
    log.append_as_leader(batch(30), 0, NOW, from_client=False)
    path = Path(log.segments.active.path)
    directory._lock.release()  # a kill
    data = path.read_bytes()
    path.write_bytes(data + data[: len(data) // 2])
    directory, losses = opened(tmp_path), list[int]()
    directory.ending = Ending.KILLED
    directory.has_present = lambda *key: key == ("t", 0) and kind != "future alone"
    directory.on_loss = lambda: losses.append(path.stat().st_size - len(data))
    directory.load(lambda topic: CONFIG, NOW)
    [log] = (directory.futures if is_future else directory.logs).values()
    assert log.log_end_offset == 30
    is_loss = kind != "copy of a present one"
    assert directory.shortened_logs == ({("t", 0)} if is_loss else set())
    assert losses == ([len(data) // 2] if is_loss else []), "a loss counts before the log is cut"
    directory.close()


class TestVanishedLogs:
    """The directory of a log is gone, though neither a deletion nor a move took it."""

    LONG = "t" * 249

    def made(self, path: Path, *topics: str, flushed: bool = True) -> LogDirectory:
        directory = opened(path)
        for topic in topics:
            log = directory.create_log(topic, 0, TOPIC_ID, LogConfig(file_delete_delay_ms=60_000), NOW)
            log.append_as_leader(batch(3), 0, NOW)
            log.set_high_watermark(3)
            if flushed:
                log.flush()
        directory.write_checkpoints()
        return directory

    def loaded(self, path: Path, ending: Ending) -> LogDirectory:
        directory = opened(path)
        directory.ending = ending
        directory.load(lambda topic: CONFIG, NOW)
        return directory

    @pytest.mark.parametrize(
        ("ending", "flushed", "vanished"),
        [
            (Ending.CLEAN, True, True),
            (Ending.KILLED, True, True),
            (Ending.KILLED, False, True),
            (Ending.POWER_LOSS, True, True),
            # The directory itself may not have been on the device.
            (Ending.POWER_LOSS, False, False),
        ],
    )
    def test_a_log_that_held_records_is_missed(self, tmp_path: Path, ending: Ending, flushed: bool, vanished: bool):
        self.made(tmp_path, "a", "b", flushed=flushed).fail("is left")
        shutil.rmtree(tmp_path / "a-0")
        directory = self.loaded(tmp_path, ending)
        assert directory.vanished == ({("a", 0)} if vanished else set())
        directory.close()

    def test_an_empty_one_is_not_missed(self, tmp_path: Path):
        directory = opened(tmp_path)
        directory.create_log("a", 0, TOPIC_ID, CONFIG, NOW)
        directory.close()
        shutil.rmtree(tmp_path / "a-0")
        directory = self.loaded(tmp_path, Ending.CLEAN)
        assert directory.vanished == set()
        directory.close()

    @pytest.mark.parametrize("topic", ["a", LONG])
    @pytest.mark.parametrize("how", ["delete_log", "set_aside"])
    def test_one_that_was_deleted_or_set_aside_is_not_missed(self, tmp_path: Path, topic: str, how: str):
        """The checkpoints still name it: the process was killed before it wrote them again."""
        directory = self.made(tmp_path, topic, "b")
        if how == "delete_log":
            directory.delete_log(topic, 0, NOW)
        else:
            directory.set_aside(topic, 0)
        directory.fail("is left")
        directory = self.loaded(tmp_path, Ending.KILLED)
        assert directory.vanished == set()
        directory.close()

    def test_the_files_of_a_deleted_log_stay_until_no_checkpoint_names_it(self, tmp_path: Path):
        directory = self.made(tmp_path, "a", "b")
        directory.delete_log("a", 0, NOW)
        assert directory.take_doomed(NOW + 60_000) == []
        assert directory.has_due(NOW + 60_000)
        task = directory.begin_checkpoints()
        task.run()
        directory.delete_log("b", 0, NOW)
        directory.finish_checkpoints(task)
        [path] = directory.take_doomed(NOW + 60_000)
        assert "/a-0." in path
        directory.close()

    def test_the_checkpoints_keep_naming_it_until_it_is_forgotten(self, tmp_path: Path):
        directory = self.made(tmp_path, "a", "b")
        directory.logs["a", 0].delete_records(2)
        directory.close()
        (tmp_path / "a-0").rename(tmp_path / "kept")
        before = [(tmp_path / name).read_text() for name in CHECKPOINTS]
        for _ in range(2):
            directory = self.loaded(tmp_path, Ending.CLEAN)
            assert directory.vanished == {("a", 0)}
            task = directory.begin_checkpoints()
            task.run()
            directory.finish_checkpoints(task)
            directory.close()
            assert [(tmp_path / name).read_text() for name in CHECKPOINTS] == before
        (tmp_path / "kept").rename(tmp_path / "a-0")
        directory = self.loaded(tmp_path, Ending.CLEAN)
        assert directory.vanished == set()
        assert (directory.logs["a", 0].log_start_offset, directory.logs["a", 0].high_watermark) == (2, 3)
        directory.close()

    @pytest.mark.parametrize("how", ["forget", "create"])
    def test_a_forgotten_one_is_not_missed_by_the_next_start(self, tmp_path: Path, how: str):
        self.made(tmp_path, "a", "b").close()
        shutil.rmtree(tmp_path / "a-0")
        directory = self.loaded(tmp_path, Ending.CLEAN)
        if how == "forget":
            directory.forget_vanished([("a", 0), ("b", 0)])
            directory.close()
        else:
            directory.create_log("a", 0, TOPIC_ID, CONFIG, NOW)
            directory.fail("is left")
            shutil.rmtree(tmp_path / "a-0")
        directory = self.loaded(tmp_path, Ending.KILLED)
        assert directory.vanished == set()
        directory.close()
