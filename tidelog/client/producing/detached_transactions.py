"""Transactions that one process writes and another one ends.

A producer `detach`es its open transaction: everything in it is delivered, nothing is decided. The
holder of the resulting identity ends it once, from any process, before `transaction.timeout.ms` is
over. Invariant: an end that was not answered is sent again with the same identity; the coordinator
answers it as the first one.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from tidelog.client.network.cluster import COORDINATOR, Cluster
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse

_TRANSACTION = 1
_LAST_VERSION_1 = 4
_ANY_VERSION = 32767


class DetachedTransaction(NamedTuple):
    """An open transaction without its producer."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    uses_version_2: bool


async def end_transaction(
    cluster: Cluster, transaction: DetachedTransaction, *, committed: bool, timeout_ms: float
) -> None:
    """Commit or abort; return when the coordinator has decided so.

    Raises KafkaError: of a commit when the transaction was aborted meanwhile (its time was over, or
    another producer has its transactional id now), REQUEST_TIMED_OUT when the outcome is not known.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_ms / 1000
    attempts = 0
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                return await _end_once(cluster, transaction, committed, timeout_ms)
        except TimeoutError:
            error = KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"EndTxn of {transaction.transactional_id!r}: no answer")
        except KafkaError as problem:
            error = problem
            if not problem.code.retriable:
                raise
        attempts += 1
        wait_s = cluster.retry_backoff.wait_ms(attempts) / 1000
        if loop.time() + wait_s >= deadline:
            raise KafkaError(
                ErrorCode.REQUEST_TIMED_OUT,
                f"no answer to the end of {transaction.transactional_id!r} in {timeout_ms:.0f} ms: {error}",
            )
        await asyncio.sleep(wait_s)


async def _end_once(cluster: Cluster, transaction: DetachedTransaction, committed: bool, timeout_ms: float) -> None:
    node_id = await cluster.find_coordinator(transaction.transactional_id, _TRANSACTION)
    connection = await cluster.connection(node_id, COORDINATOR)
    message = EndTxnRequest(
        transactional_id=transaction.transactional_id,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        committed=committed,
    )
    max_version = _ANY_VERSION if transaction.uses_version_2 else _LAST_VERSION_1
    answer = await connection.call(message, EndTxnResponse, timeout_ms, max_version)
    code = ErrorCode.of(answer.error_code)
    if code is not ErrorCode.NONE:
        verb = "committed" if committed else "aborted"
        raise KafkaError(code, f"transaction {transaction.transactional_id!r} cannot be {verb}: {code.name}")
