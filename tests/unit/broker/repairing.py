"""One replica on broker 1, and the repairs of its log without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from tidelog.broker.replicas.repairs import Repairs
from tidelog.storage.segments.log_config import INT64_MAX


class RepairedReplica:
    """Subclasses override `fetch`. `refused` has the errors for which reads of the log are refused."""

    def __init__(self, log: Any, others: Callable[[], Sequence[int]]) -> None:
        self.refused: list[Exception] = []
        self.brokers: dict[int, Any] = {}
        self.partition: Any = Mock(topic="t", index=0, log=log, offline=False, leads=False)
        partitions: Any = SimpleNamespace(
            find=lambda topic, index: self.partition,
            refusal=lambda partition, error: self.refused.append(error),
            reported_values_changed=lambda partition: None,
        )
        unused: Any = None
        image: Any = lambda: SimpleNamespace(topics_by_id={}, brokers=self.brokers)  # noqa: E731
        repairs: Any = Repairs(1, partitions, image, unused, unused, asyncio.get_running_loop(), self.run)
        repairs.others = lambda partition: list(others())
        repairs.fetch, repairs.ask = self.fetch, self.ask
        self.repairs = repairs

    async def run(self, work: Callable[[], None]) -> None:
        work()

    async def fetch(
        self, partition: object, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = 1 << 20
    ) -> bytes:
        raise NotImplementedError

    async def ask(
        self, partition: object, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = 1 << 20
    ) -> Any:
        records = await self.fetch(partition, source, offset, up_to_log_end=up_to_log_end, bytes_max=bytes_max)
        return SimpleNamespace(records=records, high_watermark=self.high_watermark_of(source))

    def high_watermark_of(self, source: int) -> int:
        return INT64_MAX
