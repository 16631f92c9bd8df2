"""Asks a node for its pages over HTTP, and reads a scrape as Prometheus does."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.unit.broker.conftest import RunningNode, Wire, batch
from tests.unit.broker.test_node import fetch, produce
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tidelog.protocol.messages.produce import ProduceResponse

Series = tuple[str, frozenset[tuple[str, str]]]


async def get(node: RunningNode, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body."""
    sock: Any = node.node._metrics_socket
    reader, writer = await asyncio.open_connection(*sock.getsockname())
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), body


class Scrape:
    """`scrape("name", label="value")` is the value of a series; `types` says what each metric is."""

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self.series: dict[Series, float] = {}
        for family in text_string_to_metric_families(text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            assert name not in self.types, f"{name} is there twice"
            self.types[name] = family.type
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.series, f"{key} is there twice"
                self.series[key] = sample.value

    def __call__(self, metric: str, **labels: str) -> float:
        return self.series[metric, frozenset(labels.items())]

    def of(self, metric: str) -> dict[frozenset[tuple[str, str]], float]:
        return {labels: value for (name, labels), value in self.series.items() if name == metric}


async def scrape(node: RunningNode) -> Scrape:
    status, body = await get(node, "/metrics")
    assert status == 200, body
    return Scrape(body)


async def live(wire: Wire) -> None:
    """Topic `t` gets two times two records, which are read; group `g` commits offset 1; some requests are refused."""
    await wire.create_topic("t")
    data = batch(b"one", b"two")
    for _ in range(2):
        await wire.call(produce("t", data), 9, ProduceResponse)
    await wire.call(produce("missing", data), 9, ProduceResponse)
    await wire.call(fetch("t"), 11, FetchResponse)
    await wire.call(fetch("t", offset=99), 11, FetchResponse)
    asked = FindCoordinatorRequest(coordinator_keys=["g"])
    for _ in range(3000):
        if not (await wire.call(asked, 4, FindCoordinatorResponse)).coordinators[0].error_code:
            break
        await asyncio.sleep(0.01)
    await commit(wire, "g", "t", 1)


async def commit(wire: Wire, group: str, topic: str, offset: int) -> None:
    partition = OffsetCommitRequestPartition(partition_index=0, committed_offset=offset, committed_metadata="")
    topics = [OffsetCommitRequestTopic(name=topic, partitions=[partition])]
    request = OffsetCommitRequest(group_id=group, topics=topics)
    for _ in range(3000):
        answer = await wire.call(request, 8, OffsetCommitResponse)
        if not answer.topics[0].partitions[0].error_code:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(answer)
