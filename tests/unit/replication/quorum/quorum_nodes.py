"""Whole quorums in one process: RaftNodes over real directories, talking through an exchange that can be cut."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S
from tidelog.protocol.api import ApiKey
from tidelog.protocol.messages.api_versions import ApiVersion, ApiVersionsRequest, ApiVersionsResponse
from tidelog.replication.ports import Endpoint, PeerUnreachable
from tidelog.replication.quorum.driver import QuorumSettings, RaftNode
from tidelog.replication.quorum.files.initial_voters import write_initial_voters
from tidelog.replication.quorum.files.metadata_log import log_start_in
from tidelog.replication.quorum.files.records_lost import note_loss_of
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter, VoterSet
from tidelog.storage.files.disk import Buffer, DirectoryEntry, File, OsDisk
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.loader import Ending
from tidelog.storage.segments.log_config import LogConfig

HANDLERS = {
    "VoteRequest": "vote",
    "BeginQuorumEpochRequest": "begin_quorum_epoch",
    "EndQuorumEpochRequest": "end_quorum_epoch",
    "FetchRequest": "fetch",
    "FetchSnapshotRequest": "fetch_snapshot",
    "UpdateRaftVoterRequest": "update_voter",
}
# A leader that stops or crashes is noticed at once. The time until one that hangs is replaced is long, so that a leader
# stays one while the machine stands still; `expect_leader_within` shortens it.
FAST = {"election_timeout_ms": 300, "fetch_timeout_ms": 30_000, "fetch_wait_ms": 200}


def endpoint(node_id: int) -> Endpoint:
    return Endpoint("node", 9000 + node_id)


def response_type(request: Any) -> Any:
    module = importlib.import_module(type(request).__module__)
    return getattr(module, type(request).__name__.replace("Request", "Response"))


class RefusingDisk(OsDisk):
    """While it has a `code`, nothing can be opened, and so neither written beside nor synced by name; what is open can
    be used. `path`, `kind`: only of paths that hold it, only by calls of that name."""

    __slots__ = ("code", "kind", "path", "refused")

    def __init__(self) -> None:
        self.code, self.path, self.kind = 0, "", ""
        self.refused: list[str] = []

    def _open(self, kind: str, path: str) -> None:
        if self.code and self.path in path and self.kind in kind:
            self.refused.append(path)
            raise OSError(self.code, os.strerror(self.code), path)

    def open(self, path: str, *, create: bool = False) -> File:
        self._open("open", path)
        return super().open(path, create=create)

    def read_file(self, path: str) -> bytes:
        self._open("read_file", path)
        return super().read_file(path)

    def write_file(self, path: str, data: Buffer, *, sync: bool) -> None:
        self._open("write_file", path)
        super().write_file(path, data, sync=sync)

    def list_directory(self, path: str) -> list[DirectoryEntry]:
        self._open("list_directory", path)
        return super().list_directory(path)

    def sync_file(self, path: str) -> None:
        self._open("sync_file", path)
        super().sync_file(path)

    def sync_directory(self, path: str) -> None:
        self._open("sync_directory", path)
        super().sync_directory(path)


class Listener:
    """What a node was told, in order; `values` is what it knows."""

    def __init__(self) -> None:
        self.raft: RaftNode | None = None
        self.told: list[tuple[Any, ...]] = []
        self.values: list[bytes] = []
        self.next_offset = 0

    async def has(self, values: list[bytes]) -> None:
        await until(lambda: self.values == values)

    def on_snapshot(self, identity: SnapshotId, values: list[bytes], timestamp_ms: int) -> None:
        self.told.append(("snapshot", identity))
        if identity.end_offset < self.next_offset:
            return
        self.values = list(values)
        self.next_offset = identity.end_offset

    def on_high_watermark(self, offset: int) -> None:
        assert self.raft is not None
        for batch in self.raft.read(self.next_offset):
            self.values += batch.values
            self.next_offset = batch.last_offset + 1
        assert self.next_offset <= offset or self.next_offset <= self.raft.high_watermark

    def on_leader(self, leader_id: int, epoch: int) -> None:
        self.told.append(("leader", leader_id, epoch))

    def on_lead(self, epoch: int) -> None:
        self.told.append(("lead", epoch))

    def on_resign(self, epoch: int) -> None:
        self.told.append(("resign", epoch))

    def on_damage(self) -> None:
        self.told.append(("damage",))

    def on_failure(self, error: Exception) -> None:
        self.told.append(("failure", str(error)))


class Member:
    """One node; `start` again after `crash` or `stop`."""

    def __init__(self, quorum: Quorum, node_id: int, *, can_vote: bool = True, **settings: Any) -> None:
        self.quorum = quorum
        self.node_id = node_id
        self.can_vote = can_vote
        self.settings = settings
        self.ending: Ending | None = None
        """How the process before ended, None for what the directory says."""
        self.raft: RaftNode
        self.new_listener: Callable[[], Listener] = Listener
        self.listener = Listener()
        self.directory: LogDirectory

    async def start(self) -> Member:
        quorum = self.quorum
        self.directory = quorum.directory(self.node_id)
        if self.ending is not None:
            self.directory.was_clean, self.directory.ending = False, self.ending
        config = LogConfig(
            max_message_bytes=1 << 23, segment_bytes=quorum.segment_bytes, retention_ms=-1, file_delete_delay_ms=0
        )
        log = self.directory.open_metadata_log(
            config, 0, log_start_in, note_loss_of(quorum.disk(self.node_id), self.directory)
        )
        loop = asyncio.get_running_loop()
        self.listener = self.new_listener()
        self.raft = self.listener.raft = RaftNode(
            node_id=self.node_id,
            directory_id=self.directory.directory_id,
            cluster_id=quorum.cluster_id,
            disk=quorum.disk(self.node_id),
            root=self.directory.path,
            log=log,
            settings=QuorumSettings(
                **{
                    "voters": quorum.voters,
                    "own_endpoints": [("CONTROLLER", endpoint(self.node_id))],
                    **FAST,
                    **self.settings,
                }
            ),
            can_vote=self.can_vote,
            loop=loop,
            exchange=lambda *args, **kwargs: quorum.exchange(self.node_id, *args, **kwargs),
            run_in_executor=lambda work: loop.run_in_executor(None, work),
            clock_ms=lambda: int(time.time() * 1000),
            rng=random.Random(self.node_id),
            listener=self.listener,
            keeps_writes=self.directory.ending is not Ending.POWER_LOSS,
        )
        await self.raft.start()
        quorum.up[self.node_id] = self
        return self

    async def expect_leader_within(self, fetch_timeout_ms: int) -> None:
        """Sets the timeout. A follower applies it from the leader's next answer on, which this awaits."""
        core = self.raft.raft
        core.settings = replace(core.settings, fetch_timeout_ms=fetch_timeout_ms)
        give_up_at_ms = getattr(core.state, "give_up_at_ms", None)
        if give_up_at_ms is not None:
            await until(lambda: getattr(core.state, "give_up_at_ms", None) != give_up_at_ms)

    async def stop(self) -> None:
        await self.raft.close()
        self.quorum.up.pop(self.node_id, None)
        self.directory.close()

    async def crash(self) -> None:
        """Gone without a word; what it wrote stays."""
        self.quorum.up.pop(self.node_id, None)
        self.raft.resign = lambda: None  # type: ignore[method-assign]
        await self.raft.close()
        self.directory.close()


class Quorum:
    def __init__(self, path: Path, voters: Mapping[int, Endpoint], *, segment_bytes: int = 1 << 20) -> None:
        self.path = path
        self.voters = voters
        self.segment_bytes = segment_bytes
        self.cluster_id = "AAAAAAAAAAAAAAAAAAAAAA"
        self.up: dict[int, Member] = {}
        self.hung: set[int] = set()
        self.asked: list[str] = []
        self.disks: dict[int, RefusingDisk] = {}

    def directory(self, node_id: int) -> LogDirectory:
        path = str(self.path / str(node_id))
        return LogDirectory.open(self.disk(node_id), path, node_id=node_id, cluster_id=self.cluster_id)

    def disk(self, node_id: int) -> RefusingDisk:
        return self.disks.setdefault(node_id, RefusingDisk())

    def format_dynamic(self, *node_ids: int) -> None:
        """These nodes begin a quorum that may change."""
        keys = {}
        for node_id in node_ids:
            directory = self.directory(node_id)
            keys[node_id] = ReplicaKey(node_id, directory.directory_id)
            directory.close()
        voters = VoterSet(Voter(key, (("CONTROLLER", endpoint(node_id)),)) for node_id, key in keys.items())
        for node_id in node_ids:
            write_initial_voters(OsDisk(), str(self.path / str(node_id)), voters, 0)

    async def exchange(
        self,
        source: int,
        target: Endpoint,
        request: Any,
        version: int,
        *,
        timeout_ms: int,
        lane: str = "",
        on_arriving: Callable[[], None] | None = None,
    ) -> Any:
        """Through bytes, as the network does it."""
        kind = type(request)
        self.asked.append(f"{source}>{target.port - 9000} {kind.__name__}")
        request = kind.decode(request.encode(version), version)
        await asyncio.sleep(0)
        if {source, target.port - 9000} & self.hung:
            await asyncio.sleep(timeout_ms / 1000)
            raise PeerUnreachable("no answer in time")
        member = self.up.get(target.port - 9000)
        if member is None:
            raise PeerUnreachable("refused", refused=True)
        if kind is ApiVersionsRequest:
            served = [ApiVersion(api_key=ApiKey.VOTE, max_version=2)] if member.can_vote else []
            return ApiVersionsResponse(api_keys=served)
        serve = getattr(member.raft, HANDLERS[kind.__name__])
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                response = await serve(request, version)
        except Exception as error:
            raise PeerUnreachable(f"broken: {error}") from None
        if self.up.get(member.node_id) is not member:
            raise PeerUnreachable("the connection broke")
        kind = response_type(request)
        return kind.decode(response.encode(version), version)

    @property
    def leaders(self) -> list[Member]:
        return [one for one in self.up.values() if one.raft.is_leader]


THREE = {1: endpoint(1), 2: endpoint(2), 3: endpoint(3)}


async def three(path: Path, **settings: Any) -> tuple[Quorum, list[Member]]:
    """Three voters, started."""
    quorum = Quorum(path, THREE)
    members = [await Member(quorum, node_id, **settings).start() for node_id in THREE]
    return quorum, members


async def stop_all(quorum: Quorum) -> None:
    for member in list(quorum.up.values()):
        await member.stop()


async def until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    async with asyncio.timeout(timeout_s):
        while not (found := condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    return found
