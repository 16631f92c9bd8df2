"""A transaction coordinator on fake logs, with a sender of markers that does what it is told."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from tests.unit.broker.coordinators.fakes import FakePorts, Reply
from tidelog.broker.coordinators.transaction.config import TransactionCoordinatorConfig
from tidelog.broker.coordinators.transaction.coordinator import WAIT_MS, TransactionCoordinator
from tidelog.broker.coordinators.transaction.service import TransactionCoordinatorService
from tidelog.broker.coordinators.transaction.transitions import ProducerIdentity, TransactionMetadata
from tidelog.broker.coordinators.transaction_ports import MarkerToSend
from tidelog.protocol.errors import ErrorCode

Done = Callable[[frozenset[tuple[str, int]]], None]
FIRST_PRODUCER_ID = 1000
T0 = ("t", 0)
T1 = ("t", 1)


class FakeMarkers:
    """Keeps the markers until the test has them written."""

    def __init__(self) -> None:
        self.sent: list[MarkerToSend] = []
        self.waiting: list[tuple[MarkerToSend, Done]] = []

    def send(self, marker: MarkerToSend, on_done: Done) -> None:
        self.sent.append(marker)
        self.waiting.append((marker, on_done))

    def cancel(self, log_partition: int) -> None:
        self.waiting = [each for each in self.waiting if each[0].log_partition != log_partition]

    def write_all(self) -> None:
        waiting, self.waiting = self.waiting, []
        for marker, on_done in waiting:
            on_done(marker.partitions)


class TransactionWorld:
    def __init__(
        self,
        config: TransactionCoordinatorConfig | None = None,
        *,
        version: int = 2,
        commits_at_once: bool = True,
        partitions: int = 1,
    ) -> None:
        self.ports = FakePorts(commits_at_once)
        self.markers = FakeMarkers()
        self.config = config or TransactionCoordinatorConfig()
        self.version = version
        self.partitions = partitions
        self.has_producer_ids = True
        self._producer_ids = count(FIRST_PRODUCER_ID)
        self.epoch = 0
        self.service = self._start()

    def _start(self) -> TransactionCoordinatorService:
        self.markers.waiting.clear()
        self.service = TransactionCoordinatorService(
            self.config, self.ports, self.markers, lambda: self.partitions, lambda: self.version, self._take
        )
        self.epoch += 1
        for partition in range(self.partitions):
            self.service.on_partition_elected(partition, self.epoch)
        self.ports.advance(0)
        return self.service

    def _take(self) -> int | None:
        return next(self._producer_ids) if self.has_producer_ids else None

    def restart(self) -> None:
        """Another coordinator loads the log, all of which is committed by then."""
        self.service.close()
        self.ports._timers.clear()
        self.ports._waiting.clear()
        for partition in range(self.partitions):
            self.ports.high_watermarks[partition] = self.ports.end_offsets.get(partition, 0)
        self._start()

    def coordinator(self, partition: int = 0) -> TransactionCoordinator:
        return self.service._runtime._shards[partition].coordinator

    def state(self, transactional_id: str = "tx") -> TransactionMetadata:
        metadata = self.coordinator().ids[transactional_id].metadata
        assert metadata is not None
        return metadata

    def set_state(self, transactional_id: str = "tx", **changes: Any) -> None:
        """As if the id's last record had been this one."""
        from tidelog.broker.coordinators.transaction.records import TransactionRecord

        record = TransactionRecord(transactional_id, self.state(transactional_id)._replace(**changes))
        self.coordinator().replay(0, record)

    def advance(self, by_ms: int = 0) -> None:
        self.ports.advance(by_ms)

    def write_markers(self) -> None:
        self.markers.write_all()
        self.ports.advance(0)

    # -- requests ----------------------------------------------------------------------------------------------------

    def init(
        self, transactional_id: str = "tx", expected: ProducerIdentity | None = None, timeout_ms: int = 60_000
    ) -> Reply:
        return Reply(lambda: self.service.initialize(transactional_id, timeout_ms, expected))

    def producer(self, transactional_id: str = "tx") -> ProducerIdentity:
        identity = self.init(transactional_id).response
        assert isinstance(identity, ProducerIdentity), identity
        return identity

    def add(
        self,
        producer: ProducerIdentity,
        *partitions: tuple[str, int],
        transactional_id: str = "tx",
        version: int = 2,
        verify: bool = False,
    ) -> Reply:
        return Reply(
            lambda: self.service.add_partitions(
                transactional_id, *producer, partitions or [T0], verify_only=verify, transaction_version=version
            )
        )

    def add_error(self, producer: ProducerIdentity, *partitions: tuple[str, int], **options: Any) -> ErrorCode:
        """The error that all partitions have, after the wait for a transition where one is under way."""
        reply = self.add(producer, *partitions, **options)
        if reply.response is None:
            self.advance(WAIT_MS)
        (error,) = set(reply.response.values())
        assert isinstance(error, ErrorCode)
        return error

    def end(
        self, producer: ProducerIdentity, commit: bool = True, *, transactional_id: str = "tx", version: int = 2
    ) -> Reply:
        return Reply(lambda: self.service.end(transactional_id, producer, commit, version))

    def transact(self, producer: ProducerIdentity, commit: bool = True, version: int = 2) -> ProducerIdentity:
        """A whole transaction; the identity for the next."""
        assert self.add_error(producer, version=version) is ErrorCode.NONE
        ended = self.end(producer, commit, version=version).response
        assert isinstance(ended, ProducerIdentity), ended
        self.write_markers()
        return ended if version >= 2 else producer
