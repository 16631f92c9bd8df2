"""Repairs a stopped node's log with copies from a running broker, for `log verify --repair-from`.

It fetches like a replica that repairs its log (`broker/replicas/repairs.py`); `storage/log/repair.py` decides which
copies may replace damage. Invariant: no copy comes from another cluster, or from another topic of the same name.
"""

from __future__ import annotations

import asyncio

from tidelog.broker.replicas.repairs import FETCH_BYTES_MAX, FETCH_VERSION, REPAIR_REPLICA_ID
from tidelog.client.network.connection import Connection, connect
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from tidelog.storage.log.gap_scan import GapScan
from tidelog.storage.log.repair import CopyRefused, GapsUnknown, OtherCleaning
from tidelog.storage.log.verification import RECORDS, Problem, StoppedLog
from tidelog.storage.segments.damage import DamagedRange
from tidelog.storage.segments.segment import Segment
from tidelog.version import __version__

TIMEOUT_MS = 10_000
_FRAME_BYTES_MAX = 256 * 1024 * 1024
_PAUSE_S = 0.2
REPAIRED = "repaired"


class RepairSource:
    """`server`: host:port of a broker. `cluster_id`: the id of its cluster, empty if unknown."""

    def __init__(self, server: str, cluster_id: str) -> None:
        host, _, port = server.rpartition(":")
        self.server = server
        self._host, self._port = host.strip("[]"), int(port) if port.isdecimal() else 0
        self._cluster_id = cluster_id

    async def connect(self) -> Connection:
        return await connect(
            self._host, self._port, client_id="tidelog-cli", max_frame_bytes=_FRAME_BYTES_MAX,
            software_version=__version__, timeout_ms=TIMEOUT_MS,
        )  # fmt: skip

    async def topic_id(self, connection: Connection, topic: str, own: bytes | None) -> bytes:
        """The broker's topic id. Raises KafkaError if the broker's cluster or its topic is another one."""
        request = MetadataRequest(topics=[MetadataRequestTopic(name=topic)], allow_auto_topic_creation=False)
        version = connection.version_of(MetadataRequest)
        answer = await connection.send(request, MetadataResponse, version, TIMEOUT_MS)
        if self._cluster_id and answer.cluster_id != self._cluster_id:
            raise KafkaError(ErrorCode.INCONSISTENT_CLUSTER_ID, f"{self.server} is of cluster {answer.cluster_id}")
        [description] = answer.topics
        if description.error_code:
            raise KafkaError(ErrorCode.of(description.error_code), f"{self.server} has no topic {topic}")
        if own is not None and description.topic_id != own:
            raise KafkaError(ErrorCode.INCONSISTENT_TOPIC_ID, f"{self.server} has another topic called {topic}")
        return description.topic_id


class PartitionRepair:
    """The repair of one partition. `run` returns the outcome of every problem."""

    def __init__(self, log: StoppedLog, topic: str, index: int, problems: list[Problem]) -> None:
        self._log = log
        self._topic = topic
        self._index = index
        self._problems = problems
        self._topic_id = b""

    async def run(self, source: RepairSource) -> dict[Problem, str]:
        """Raises KafkaError, before any change; OSError."""
        outcomes: dict[Problem, str] = {}
        if self._log.damage():
            connection = await source.connect()
            try:
                self._topic_id = await source.topic_id(connection, self._topic, self._log.topic_id)
                for segment, damage in reversed(self._log.damage()):  # damage behind a range counts as a gap
                    outcome = await self._repair_range(connection, segment, damage)
                    outcomes |= {
                        each: outcome for each in self._problems
                        if each.kind == RECORDS and each.file == segment.path
                        and (each.first_offset, each.end_offset) == (damage.first_offset, damage.end_offset)
                    }  # fmt: skip
            finally:
                connection.close()
        for problem in self._problems:
            if problem not in outcomes:
                outcomes[problem] = REPAIRED if self._log.mend(problem) else self._why_not(problem)
        return outcomes

    def _why_not(self, problem: Problem) -> str:
        if problem.kind == RECORDS:
            return "not repaired: nothing says how many records there were"
        return "not repaired: records are damaged" if self._log.damage() else "left to the next start"

    async def _repair_range(self, connection: Connection, segment: Segment, damage: DamagedRange) -> str:
        log, repair = self._log, self._log.repair_of(segment, damage)
        repair.lacks_below = log.cleaned_offset if damage.first_offset < log.compacted_below else None
        is_interior = damage.end_offset < log.end_offset
        try:
            while not repair.is_complete:
                data = await self._fetch(connection, repair.next_offset, up_to_log_end=is_interior)
                before = repair.next_offset
                try:
                    repair.accept(memoryview(data))
                except GapsUnknown:
                    scan = GapScan(log, segment, damage, log.compacted_below)
                    scan.run()
                    repair.lacks_below, repair.knows_gaps = scan.end_offset, True
                    continue
                if repair.next_offset == before:
                    return "not repaired: the broker sends no whole batch"
            if log.finish_repair(repair.finish()):
                return REPAIRED
            return "not repaired: the copy does not fit"
        except OtherCleaning as error:
            return f"not repaired: {error}; the node repairs it at its next start"
        except (CopyRefused, KafkaError) as error:
            if damage in segment.damage:
                return f"not repaired: {error}"
        # A check may have merged this range with another one of the same batch: repair the merged range.
        wide = next((each for each in segment.damage if each.holds(damage.first_offset)), None)
        return REPAIRED if wide is None else await self._repair_range(connection, segment, wide)

    async def _fetch(self, connection: Connection, offset: int, *, up_to_log_end: bool) -> bytes:
        request = FetchRequest(
            replica_id=REPAIR_REPLICA_ID if up_to_log_end else -1, max_wait_ms=0, min_bytes=1,
            max_bytes=FETCH_BYTES_MAX,
            topics=[
                FetchTopic(
                    topic_id=self._topic_id,
                    partitions=[
                        FetchPartition(
                            partition=self._index, fetch_offset=offset, partition_max_bytes=FETCH_BYTES_MAX
                        )
                    ],
                )
            ],
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        deadline = loop.time() + TIMEOUT_MS / 1000
        while True:
            response = await connection.send(request, FetchResponse, FETCH_VERSION, TIMEOUT_MS)
            answers = [each for topic in response.responses for each in topic.partitions]
            code = ErrorCode.of(response.error_code or (answers[0].error_code if answers else 0))
            if not code and answers and answers[0].records:
                return bytes(answers[0].records)
            error = KafkaError(code or ErrorCode.OFFSET_OUT_OF_RANGE, f"the broker has no records at offset {offset}")
            if not error.retriable or not code or loop.time() > deadline:
                raise error
            await asyncio.sleep(_PAUSE_S)
