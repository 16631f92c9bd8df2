"""A quorum in memory and controllers over it, for tests of the asynchronous shells: commits when it is told to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tests.unit.replication.clusters import directory_id
from tidelog.protocol.messages.broker_heartbeat import BrokerHeartbeatRequest, BrokerHeartbeatResponse
from tidelog.protocol.messages.broker_registration import BrokerRegistrationRequest, Feature, Listener
from tidelog.replication.controller.controller import Controller
from tidelog.replication.controller.decisions.activation import ControllerIdentity
from tidelog.replication.controller.decisions.state import ControllerSettings
from tidelog.replication.controller.decisions.supported_features import SUPPORTED_FEATURES
from tidelog.replication.controller.metadata.image import EndpointImage, MetadataDelta, MetadataImage
from tidelog.replication.controller.metadata.tracker import MetadataTracker
from tidelog.replication.ports import Endpoint, PortState
from tidelog.replication.quorum.raft.snapshot import SnapshotId


class NotLeader(Exception):
    pass


class Batch(NamedTuple):
    last_offset: int
    epoch: int
    timestamp_ms: int
    values: list[bytes]


class Quorum:
    """One log, seen by all members; `hold` keeps it from committing."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.high_watermark = 0
        self.epoch = 0
        self.leader: MemberLog | None = None
        self.members: list[MemberLog] = []
        self.hold = False
        self._scheduled = False

    @property
    def end_offset(self) -> int:
        return self.batches[-1].last_offset + 1 if self.batches else 0

    def lead(self, member: MemberLog | None) -> None:
        """The lead changes; what was not committed is lost."""
        if self.leader is not None:
            former, self.leader = self.leader, None
            former.tracker.on_resign(self.epoch)
        self.batches = [batch for batch in self.batches if batch.last_offset < self.high_watermark]
        self.epoch += 1
        self.leader = member
        for each in self.members:
            each.tracker.on_leader(-1 if member is None else member.node_id, self.epoch)
        if member is not None:
            self.batches.append(Batch(self.end_offset, self.epoch, 0, []))
            self.commit()
            member.tracker.on_lead(self.epoch)

    def commit(self) -> None:
        self.high_watermark = self.end_offset
        for each in self.members:
            for _ in each.tracker.on_high_watermark(self.high_watermark) or ():
                pass

    def appended(self) -> None:
        if not self.hold and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._commit_soon)

    def _commit_soon(self) -> None:
        self._scheduled = False
        if not self.hold and self.leader is not None:
            self.commit()


class MemberLog:
    """`RaftLog` of one member."""

    def __init__(self, quorum: Quorum, node_id: int, tracker: MetadataTracker) -> None:
        self.quorum = quorum
        self.node_id = node_id
        self.tracker = tracker
        self.snapshots: list[tuple[SnapshotId, list[bytes]]] = []
        self.forgotten: list[SnapshotId] = []
        self.failure: OSError | None = None
        self.is_alone = self.has_lost_majority = False
        tracker.raft = self
        quorum.members.append(self)

    @property
    def is_leader(self) -> bool:
        return self.quorum.leader is self

    @property
    def epoch(self) -> int:
        return self.quorum.epoch

    @property
    def end_offset(self) -> int:
        return self.quorum.end_offset

    def append(self, values: Sequence[bytes], now_ms: int) -> int:
        if self.failure is not None:
            raise self.failure
        if not self.is_leader:
            raise NotLeader
        self.quorum.batches.append(
            Batch(self.quorum.end_offset + len(values) - 1, self.quorum.epoch, now_ms, list(values))
        )
        self.quorum.appended()
        return self.quorum.end_offset - 1

    def read(self, from_offset: int) -> list[Batch]:
        return [batch for batch in self.quorum.batches if from_offset <= batch.last_offset < self.quorum.high_watermark]

    def snapshot_writer(
        self, values: Iterable[bytes], identity: SnapshotId, last_timestamp_ms: int, now_ms: int
    ) -> Callable[[], None]:
        return lambda: self.snapshots.append((identity, list(values)))

    def snapshot_written(self, identity: SnapshotId) -> None:
        self.forgotten.append(identity)

    def resign(self) -> None:
        self.quorum.lead(None)


class Member:
    """A controller node: tracker, log, controller; `refusing` are the ports where nobody listens."""

    def __init__(self, quorum: Quorum, node_id: int, *, snapshot_bytes_min: int = 1 << 30, **settings: Any) -> None:
        loop = asyncio.get_running_loop()
        self.told: list[tuple[MetadataImage, MetadataDelta]] = []
        self.refusing: set[int] = set()
        self.hanging: set[int] = set()
        self.probed: list[int] = []
        self.now_ms = 1_700_000_000_000

        async def run_in_executor(work: Any) -> Any:
            return work()

        self.tracker = MetadataTracker(
            on_image=lambda image, delta: self.told.append((image, delta)),
            loop=loop,
            run_in_executor=run_in_executor,
            clock_ms=lambda: self.now_ms,
            snapshot_bytes_min=snapshot_bytes_min,
        )
        self.log = MemberLog(quorum, node_id, self.tracker)
        self.controller = Controller(
            node_id=node_id,
            raft=self.log,
            tracker=self.tracker,
            settings=ControllerSettings(**settings),
            identity=ControllerIdentity(bytes([node_id]) * 16, [EndpointImage("CONTROLLER", "c", 9093)]),
            loop=loop,
            clock_ms=lambda: self.now_ms,
            rng=random.Random(node_id),
            probe=self._probe,
            bootstrap_values=lambda: (),
        )

    async def _probe(self, endpoint: Endpoint) -> PortState:
        self.probed.append(endpoint.port)
        if endpoint.port in self.hanging:
            await asyncio.get_running_loop().create_future()
        return PortState.REFUSES if endpoint.port in self.refusing else PortState.ACCEPTS

    def has_heard_nobody(self) -> None:
        """As after a takeover: no broker has spoken to this controller, so a restarted one need not wait."""
        for session in self.controller._sessions._sessions.values():
            session.was_heard = False

    async def learned(self) -> None:
        """Until the addresses of all brokers were tried, and forget that they were."""
        while tasks := list(self.controller._detector._learning.values()):
            await asyncio.gather(*tasks)
            await asyncio.sleep(0)  # from Python 3.12 on, gathering what is done does not let the loop run
        self.probed.clear()


class Broker:
    """What a broker says to the controller."""

    def __init__(self, node_id: int, *, incarnation: int = 1) -> None:
        self.node_id = node_id
        self.incarnation_id = bytes([node_id, incarnation]) * 8
        self.epoch = -1
        self.listener_name = "PLAINTEXT"

    def registration(self, *, previous_epoch: int = -1, **fields: Any) -> BrokerRegistrationRequest:
        values: dict[str, Any] = {
            "broker_id": self.node_id,
            "cluster_id": "",
            "incarnation_id": self.incarnation_id,
            "listeners": [
                Listener(name=self.listener_name, host="host", port=9000 + self.node_id, security_protocol=0)
            ],
            "features": [
                Feature(name=name, min_supported_version=low, max_supported_version=high)
                for name, (low, high) in SUPPORTED_FEATURES.items()
            ],
            "rack": None,
            "log_dirs": [directory_id(self.node_id)],
            "previous_broker_epoch": previous_epoch,
        }
        return BrokerRegistrationRequest(**(values | fields))

    async def register(self, controller: Controller, *, previous_epoch: int = -1) -> None:
        response = await controller.register_broker(self.registration(previous_epoch=previous_epoch), 4)
        self.epoch = response.broker_epoch

    async def heartbeat(self, controller: Controller, **fields: Any) -> BrokerHeartbeatResponse:
        values: dict[str, Any] = {
            "broker_id": self.node_id,
            "broker_epoch": self.epoch,
            "current_metadata_offset": controller.image.offset,
            "want_fence": False,
            "want_shut_down": False,
        }
        return await controller.broker_heartbeat(BrokerHeartbeatRequest(**(values | fields)), 2)

    async def join(self, controller: Controller, *, previous_epoch: int = -1) -> None:
        """Registered and unfenced."""
        await self.register(controller, previous_epoch=previous_epoch)
        response = await self.heartbeat(controller)
        assert not response.is_fenced


async def cluster(broker_ids: Sequence[int] = (1, 2, 3), **settings: Any) -> tuple[Quorum, Member, dict[int, Broker]]:
    """One active controller and unfenced brokers."""
    quorum = Quorum()
    member = Member(quorum, 100, **settings)
    quorum.lead(member.log)
    brokers = {broker_id: Broker(broker_id) for broker_id in broker_ids}
    for broker in brokers.values():
        await broker.join(member.controller)
    await member.learned()
    return quorum, member, brokers
