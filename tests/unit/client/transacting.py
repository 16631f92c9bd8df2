"""What tests of transactional producers share: a cluster of either version, a producer, and scripted answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.test_producer import FAST
from tidelog.client import Producer
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from tidelog.protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest
from tidelog.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from tidelog.protocol.messages.find_coordinator import Coordinator, FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from tidelog.protocol.messages.produce import ProduceRequest
from tidelog.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest

NAMES: dict[Any, str] = {
    InitProducerIdRequest: "init",
    AddPartitionsToTxnRequest: "partitions",
    AddOffsetsToTxnRequest: "offsets",
    TxnOffsetCommitRequest: "commit-offsets",
    ProduceRequest: "produce",
}


def cluster_of(version: int, nodes: int = 1, **topics: int) -> FakeCluster:
    """Brokers that all have every API; the finalized level alone says the version of transactions."""
    cluster = FakeCluster(nodes=nodes, **(topics or {"t": 2}))
    finalize(cluster, version)
    return cluster


def finalize(cluster: FakeCluster, version: int) -> None:
    cluster.finalized_features = {"transaction.version": version}
    cluster.finalized_features_epoch += 1


def transactional(cluster: FakeCluster, **options: Any) -> Producer:
    return Producer(
        **{"bootstrap_servers": cluster.bootstrap, "linger_ms": 0, "transactional_id": "tx", **FAST, **options}
    )


@contextmanager
def limited(sending: Producer, **limits: int) -> Iterator[None]:
    """Sets limits of time for the calls that are to end by them.

    All others keep the long limits: a machine that stands still for a moment ends none of them.
    """
    config: Any = sending._config
    before = {name: getattr(config, name) for name in limits}
    memory: Any = sending._accumulator
    delivery_timeout_ms = None if memory is None else memory._delivery_timeout_ms
    try:
        for name, value in limits.items():
            object.__setattr__(config, name, value)
        if memory is not None and "delivery_timeout_ms" in limits:
            memory._delivery_timeout_ms = limits["delivery_timeout_ms"]
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(config, name, value)
        if memory is not None:
            memory._delivery_timeout_ms = delivery_timeout_ms


def story(cluster: FakeCluster) -> list[str]:
    """The transactional requests so far, in order: "init", "produce", "commit" and the like."""
    names = []
    for _, _, request in cluster.requests:
        if isinstance(request, EndTxnRequest):
            names.append("commit" if request.committed else "abort")
        elif type(request) in NAMES:
            names.append(NAMES[type(request)])
    return names


def refuse_init(code: ErrorCode) -> Any:
    return lambda request, node: InitProducerIdResponse(error_code=code)


def refuse_end(code: ErrorCode) -> Any:
    return lambda request, node: EndTxnResponse(error_code=code)


def refuse_group(code: ErrorCode) -> Any:
    return lambda request, node: AddOffsetsToTxnResponse(error_code=code)


def refuse_partitions(code: ErrorCode) -> Any:
    def action(request: AddPartitionsToTxnRequest, node: FakeNode) -> Any:
        answer: Any = node.cluster.transactions.handle(request)
        for topic in answer.results_by_topic_v3_and_below:
            for each in topic.results_by_partition:
                each.partition_error_code = code
        return answer

    return action


def refuse_offsets(code: ErrorCode) -> Any:
    def action(request: TxnOffsetCommitRequest, node: FakeNode) -> Any:
        answer: Any = node.cluster.transactions.handle(request)
        for topic in answer.topics:
            for each in topic.partitions:
                each.error_code = code
        return answer

    return action


def no_coordinator(request: FindCoordinatorRequest, node: FakeNode) -> Any:
    key = request.coordinator_keys[0]
    code = ErrorCode.COORDINATOR_NOT_AVAILABLE
    return FindCoordinatorResponse(coordinators=[Coordinator(key=key, node_id=-1, port=-1, error_code=code)])


def handled(request: Any, node: FakeNode) -> Any:
    """The coordinator does its part."""
    return node.cluster.transactions.handle(request)
