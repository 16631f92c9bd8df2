"""`tidelog log verify`: checks all files of a stopped node's logs for damage, and repairs it from a running broker.

`storage/log/verification.py` has the checks, and `repair.py` gets the copies. This module handles the directory, its
checkpoints and the output. Without --repair-from all files are opened read-only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import click

from tidelog.cli.common import HELP, echo, reason, run, with_ports
from tidelog.cli.logs.policies import compacted_topics
from tidelog.cli.logs.repair import PartitionRepair, RepairSource
from tidelog.protocol.errors import KafkaError
from tidelog.replication.quorum.raft.snapshot import CorruptSnapshot, decode_snapshot
from tidelog.storage.files import checkpoints
from tidelog.storage.files.disk import DirectoryInUse, Disk, Lock, OsDisk, ReadOnlyDisk
from tidelog.storage.files.log_names import DELETE_SUFFIX, parse_future_name, parse_name
from tidelog.storage.log.directory import LOCK_FILE, METADATA_TOPIC
from tidelog.storage.log.verification import HARMLESS, SMALL_FILE, SNAPSHOT, LogFacts, Problem, StoppedLog
from tidelog.storage.segments.log_config import INT64_MAX
from tidelog.storage.segments.segment import LOG_SUFFIX

_OFFSET_FILES = (
    checkpoints.RECOVERY_POINT_FILE, checkpoints.LOG_START_FILE, checkpoints.HIGH_WATERMARK_FILE,
    checkpoints.CLEANER_OFFSET_FILE,
)  # fmt: skip
UNREADABLE = "unreadable file"
Offsets = dict[tuple[str, int], int]


class _Unusable(click.ClickException):
    """The directory cannot be verified."""

    exit_code = 2


class _Row(NamedTuple):
    problem: Problem
    outcome: str
    """The outcome of --repair-from: `repaired`, or the reason for no repair; empty without the option."""

    @property
    def counts(self) -> bool:
        return self.problem.kind not in HARMLESS

    def line(self) -> str:
        problem = self.problem
        places = []
        if problem.position >= 0:
            places.append(f"bytes {problem.position} to {problem.end_position}")
        if problem.first_offset >= 0:
            end = f"offsets {problem.first_offset} to {problem.end_offset}"
            places.append(end if problem.end_offset >= 0 else f"from offset {problem.first_offset} on")
        where = f"{', '.join(places)}: " if places else ""
        outcome = f" [{self.outcome}]" if self.outcome else ""
        return f"{problem.file}: {where}{problem.kind}: {problem.reason}{outcome}"

    def as_json(self) -> str:
        problem = self.problem
        row: dict[str, object] = {"file": problem.file, "problem": problem.kind, "reason": problem.reason}
        if problem.position >= 0:
            row |= {"position": problem.position, "end_position": problem.end_position}
        if problem.first_offset >= 0:
            row |= {"first_offset": problem.first_offset, "end_offset": problem.end_offset}
        row |= {"harmless": not self.counts, "repaired": self.outcome == "repaired"}
        if self.outcome not in ("", "repaired"):
            row["not_repaired_because"] = self.outcome
        return json.dumps(row, ensure_ascii=False)


def _address(text: str) -> str:
    server = with_ports(text)
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or "," in server:
        raise click.BadParameter(f"{text!r} is not host:port of one broker")
    return server


@click.command("verify", context_settings=HELP)
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option(
    "--repair-from",
    "source",
    metavar="HOST[:PORT]",
    callback=lambda context, parameter, value: None if value is None else _address(value),
    help="Take whole copies of damaged records from this running broker of the same cluster, and put them in place.",
)
@click.option(
    "--compacted",
    "compacted",
    metavar="TOPIC",
    multiple=True,
    help="Offsets may be missing in this topic, because it is or was compacted. Needed only where neither the "
    "cleaner's checkpoint nor the metadata log in DIR says so. May be given many times.",
)
@click.option("--json", "json_wanted", is_flag=True, help="One JSON object a line, the summary last.")
def command(directory: str, source: str | None, compacted: tuple[str, ...], json_wanted: bool) -> int:
    """Look for damage in DIR, a log directory (log.dirs) of a stopped node or one partition's directory in it.

    Every batch of every segment is read and checked, and the indexes, snapshots and checkpoints beside them. Without
    --repair-from nothing is changed. Exits with 0 when all is whole, or was repaired; with 1 when damage is left; with
    2 when DIR cannot be verified, because a node uses it or it is no log directory.

    \b
    Examples:
      tidelog log verify tidelog-data
      tidelog log verify --repair-from 10.0.0.2:9092 tidelog-data/flights-0
    """
    disk: Disk = ReadOnlyDisk() if source is None else OsDisk()
    verification = _Verification(disk, directory.rstrip("/") or directory, set(compacted))
    lock = verification.lock()
    left = problem_count = 0
    try:
        for row in verification.run(source):
            echo(row.as_json() if json_wanted else row.line())
            problem_count += row.counts
            left += row.counts and row.outcome != "repaired"
    except PermissionError as error:
        raise _Unusable(reason(error)) from None
    finally:
        lock.release()
    _print_summary(verification, problem_count, problem_count - left, source is not None, json_wanted)
    return 1 if left else 0


def _print_summary(
    verification: _Verification, problem_count: int, repaired: int, repairs: bool, json_wanted: bool
) -> None:
    segments, verified_bytes = verification.segments, verification.verified_bytes
    if json_wanted:
        summary = {
            "segments": segments,
            "verified_bytes": verified_bytes,
            "problems": problem_count,
            "repaired": repaired,
        }
        echo(json.dumps(summary))
        return
    problems = f"{problem_count or 'no'} problem{'' if problem_count == 1 else 's'}"
    outcome = f", {repaired} repaired" if repairs and problem_count else ""
    echo(f"{segments:,} segment{'' if segments == 1 else 's'}, {verified_bytes:,} bytes verified, {problems}{outcome}")


class _Verification:
    def __init__(self, disk: Disk, path: str, compacted: set[str]) -> None:
        self._disk = disk
        self._path = path
        try:
            names = {entry.name: entry.is_directory for entry in disk.list_directory(path)}
        except FileNotFoundError:
            raise _Unusable(f"{path} does not exist") from None
        except NotADirectoryError:
            raise _Unusable(f"{path} is no directory") from None
        self._is_partition = any(_is_segment(name) for name in names)
        if self._is_partition:
            self._root, _, name = path.rpartition("/") if "/" in path else (".", "", path)
            self._partitions = [name]
        else:
            self._root = path
            self._partitions = sorted(name for name, is_directory in names.items() if is_directory and _is_log(name))
            if checkpoints.META_PROPERTIES_FILE not in names and not any(map(self._holds_log, self._partitions)):
                raise _Unusable(
                    f"{path} is no log directory: it has neither logs nor {checkpoints.META_PROPERTIES_FILE}"
                )
        self._compacted = compacted
        self._cluster_id = ""
        self.segments = self.verified_bytes = 0

    def _holds_log(self, name: str) -> bool:
        """Whether the directory has a file of a log. Others may be named like a partition, as /etc/dbus-1 is."""
        files = (entry.name for entry in self._disk.list_directory(f"{self._root}/{name}"))
        return any(_is_segment(file) or file == checkpoints.PARTITION_METADATA_FILE for file in files)

    def lock(self) -> Lock:
        try:
            return self._disk.lock(f"{self._root}/{LOCK_FILE}")
        except DirectoryInUse:
            raise _Unusable(f"{self._root} is in use by a running node, which holds its {LOCK_FILE} file") from None

    def run(self, server: str | None) -> Iterator[_Row]:
        offsets, problems = self._read_checkpoints()
        source = None if server is None else RepairSource(server, self._cluster_id)
        if not self._is_partition:
            outcome = "" if source is None else "not repaired: the next start takes it as empty"
            yield from (_Row(problem, outcome) for problem in problems)
        compacted = self._compacted | compacted_topics(self._disk, f"{self._root}/{METADATA_TOPIC}-0")
        for name in self._partitions:
            log = StoppedLog(self._disk, f"{self._root}/{name}", self._facts(name, offsets, compacted))
            try:
                log_problems = list(self._problems_of(name, log))
                self.segments += len(log.segments)
                self.verified_bytes += log.verified_bytes
                yield from self._rows(name, log, log_problems, source)
            finally:
                log.release()

    def _rows(self, name: str, log: StoppedLog, problems: list[Problem], source: RepairSource | None) -> Iterator[_Row]:
        if source is None or not problems:
            yield from (_Row(problem, "") for problem in problems)
            return
        key = parse_future_name(name) or parse_name(name)
        if key is None or key[0] == METADATA_TOPIC:
            yield from (_Row(problem, "not repaired: only topics are") for problem in problems)
            return
        repair = PartitionRepair(log, key[0], key[1], problems)
        try:
            outcomes = run(repair.run(source))
        except KafkaError as error:
            outcomes = dict.fromkeys(problems, f"not repaired: {error}")
        yield from (_Row(problem, outcomes[problem]) for problem in problems)

    def _problems_of(self, name: str, log: StoppedLog) -> Iterator[Problem]:
        try:
            yield from log.verify()
            yield from self._verify_metadata_snapshots(name)
        except PermissionError:
            raise
        except OSError as error:
            yield Problem(error.filename or log.directory, UNREADABLE, error.strerror or str(error))

    # Files of the log directory

    def _read_checkpoints(self) -> tuple[dict[str, Offsets], list[Problem]]:
        problems = []
        offsets: dict[str, Offsets] = {}
        for name in _OFFSET_FILES:
            path = f"{self._root}/{name}"
            data = checkpoints.read_if_exists(self._disk, path)
            if data is None:
                continue
            try:
                offsets[name] = checkpoints.decode_offsets(data)
            except checkpoints.CorruptCheckpoint as error:
                problems.append(Problem(path, SMALL_FILE, str(error)))
        path = f"{self._root}/{checkpoints.META_PROPERTIES_FILE}"
        data = checkpoints.read_if_exists(self._disk, path)
        try:
            self._cluster_id = checkpoints.decode_properties(data or b"").get("cluster.id", "")
            if not self._cluster_id:
                problems.append(Problem(path, SMALL_FILE, "is missing" if data is None else "names no cluster.id"))
        except checkpoints.CorruptCheckpoint as error:
            problems.append(Problem(path, SMALL_FILE, str(error)))
        return offsets, problems

    def _facts(self, name: str, offsets: dict[str, Offsets], compacted: set[str]) -> LogFacts:
        key = parse_future_name(name) or parse_name(name) or (name, -1)
        cleaned = offsets.get(checkpoints.CLEANER_OFFSET_FILE)
        is_metadata = key[0] == METADATA_TOPIC
        # As at a node's start: without the cleaner's checkpoint any log may be compacted.
        is_compacted = not is_metadata and (cleaned is None or key in cleaned or key[0] in compacted)
        return LogFacts(
            is_clean=self._disk.exists(f"{self._root}/{checkpoints.CLEAN_SHUTDOWN_FILE}"),
            recovery_point=offsets.get(checkpoints.RECOVERY_POINT_FILE, {}).get(key, -1),
            high_watermark=offsets.get(checkpoints.HIGH_WATERMARK_FILE, {}).get(key, -1),
            log_start_offset=offsets.get(checkpoints.LOG_START_FILE, {}).get(key, 0),
            is_compacted=is_compacted,
            begins_with_snapshot=is_metadata,
            cleaned_offset=-1 if is_metadata else INT64_MAX if cleaned is None else cleaned.get(key, -1),
        )

    def _verify_metadata_snapshots(self, name: str) -> Iterator[Problem]:
        directory = f"{self._root}/{name}"
        for entry in self._disk.list_directory(directory):
            if not entry.name.endswith(".checkpoint"):
                continue
            try:
                decode_snapshot(self._disk.read_file(f"{directory}/{entry.name}"))
            except CorruptSnapshot as error:
                yield Problem(f"{directory}/{entry.name}", SNAPSHOT, str(error))


def _is_segment(name: str) -> bool:
    return name.endswith(LOG_SUFFIX) and name.removesuffix(LOG_SUFFIX).isdecimal()


def _is_log(name: str) -> bool:
    if name.endswith(DELETE_SUFFIX):
        return False
    return parse_name(name) is not None or parse_future_name(name) is not None
