"""The part of `tidelog reassign` that moves replicas between the log directories of their brokers.

`partition_lists.py` reads the directories of a plan. A plan may also move a replica to a new broker. That broker
accepts a directory for the replica only after it knows the replica, so the request is retried for a while, as in
Kafka's tool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import click

from tidelog.cli.common import as_count, fail
from tidelog.cli.reassign.partition_lists import COMPLETE, DOWN, IN_ANOTHER, MISSING, MOVING, UNANSWERED, Directories
from tidelog.client import Admin, BrokerErrors, TopicPartition
from tidelog.client.model import Replica, ReplicaLogDirs
from tidelog.protocol.errors import ErrorCode, KafkaError

RATE = "replica.alter.log.dirs.io.max.bytes.per.second"
_OF_THIS_BROKER = 2  # the source of a dynamic value that one broker has of its own

START_S = 10.0  # the time until a broker must know a new replica (Kafka's --timeout)
PAUSE_S = 0.1


async def _running(admin: Admin) -> set[int]:
    return {node.node_id for node in (await admin.describe_cluster()).nodes}


async def present(admin: Admin, assignment: Mapping[TopicPartition, Iterable[int]]) -> Directories:
    """The present directories of these replicas, as far as their brokers report them."""
    replicas = [Replica(*partition, broker) for partition, brokers in assignment.items() for broker in brokers]
    directories: Directories = {}
    for broker_id in sorted(await _running(admin)):
        own = [replica for replica in replicas if replica.broker_id == broker_id]
        try:
            described = await admin.describe_replica_log_dirs(own)
        except KafkaError as error:
            click.echo(f"tidelog: broker {broker_id} does not say where its replicas lie: {error}", err=True)
            continue
        directories.update(
            {replica: where.current for replica, where in described.items() if where.current is not None}
        )
    return directories


async def hold(admin: Admin, targets: Directories, bytes_per_s: int) -> None:
    """Limit the rate at which the brokers of these replicas copy between their directories. One that is down has no
    rate: it would have to take it, and has nothing to copy.
    """
    brokers = sorted({replica.broker_id for replica in targets} & await _running(admin))
    rate: dict[str, str | None] = {RATE: str(bytes_per_s)}
    if brokers:
        await admin.incremental_alter_configs(brokers=dict.fromkeys(brokers, rate))
    click.echo(f"{as_count(brokers, 'broker')} held to {bytes_per_s:,} B/s between directories", err=True)


async def release(admin: Admin, targets: Directories) -> None:
    """Remove the limits of `hold` where a broker that runs has one. A broker describes no limit that is not set."""
    if not targets:
        return
    brokers = sorted({replica.broker_id for replica in targets} & await _running(admin))
    entries = await admin.describe_configs(brokers=brokers, keys=[RATE]) if brokers else {}
    held = [broker for broker in brokers if any(each.source == _OF_THIS_BROKER for each in entries[broker].values())]
    none: dict[str, str | None] = {RATE: None}
    if held:
        await admin.incremental_alter_configs(brokers=dict.fromkeys(held, none))
        click.echo(f"took away the throttles between directories of {as_count(held, 'broker')}", err=True)


async def start(admin: Admin, targets: Directories) -> int:
    """Start the moves of replicas to their directories. Returns the exit code."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_S
    running = await _running(admin) if targets else set()
    pending = {replica: path for replica, path in targets.items() if replica.broker_id in running}
    status = 0
    for replica in sorted(targets.keys() - pending.keys()):
        click.echo(
            f"tidelog: cannot move {_describe(replica)} to {targets[replica]}: the broker does not run", err=True
        )
        status = 1
    while pending:
        outcomes = await admin.alter_replica_log_dirs(pending)
        for replica, error in sorted(outcomes.items()):
            if error is None or error.code is not ErrorCode.REPLICA_NOT_AVAILABLE:
                del pending[replica]
            if error is not None and replica not in pending:
                click.echo(f"tidelog: cannot move {_describe(replica)} to {targets[replica]}: {error}", err=True)
                status = 1
        if pending and loop.time() >= deadline:
            for replica in sorted(pending):
                click.echo(f"tidelog: {_describe(replica)} is not there yet, and was not sent to a directory", err=True)
            return 1
        if pending:
            await asyncio.sleep(PAUSE_S)
    if targets and not status:
        click.echo(f"moving {as_count(targets, 'replica')} between directories", err=True)
    return status


async def progress(admin: Admin, targets: Directories) -> dict[Replica, str]:
    """The state of each replica of a plan: IN_ANOTHER, or a constant of `partition_lists`."""
    running = await _running(admin)
    described, unanswered = await _log_dirs(admin, [each for each in targets if each.broker_id in running])
    states = {}
    for replica, path in sorted(targets.items()):
        where = described.get(replica)
        if replica.broker_id not in running:
            states[replica] = DOWN
        elif replica.broker_id in unanswered:
            states[replica] = UNANSWERED
        elif where is None:
            states[replica] = MISSING
        elif where.future == path:
            states[replica] = MOVING
        else:
            states[replica] = COMPLETE if where.current == path and where.future is None else IN_ANOTHER
    return states


async def cancel(admin: Admin, targets: Directories) -> tuple[int, int]:
    """Cancel the moves of replicas to the plan's directories. Returns the number of moves, and the exit code."""
    running = await _running(admin)
    for broker_id in sorted({replica.broker_id for replica in targets} - running):
        text = f"broker {broker_id} does not run: if it comes back, it goes on with its moves between directories"
        click.echo(f"tidelog: warning: {text}", err=True)
    described, unanswered = await _log_dirs(admin, [each for each in targets if each.broker_id in running])
    back = {
        replica: where.current
        for replica, where in described.items()
        if where.future == targets[replica] and where.current is not None
    }
    refused = {
        replica: error for replica, error in (await admin.alter_replica_log_dirs(back)).items() if error is not None
    }
    for replica, error in sorted(refused.items()):
        fail(f"cannot cancel the move of {_describe(replica)}: {error}")
    return len(back) - len(refused), int(bool(refused or unanswered))


async def _log_dirs(admin: Admin, replicas: Sequence[Replica]) -> tuple[Mapping[Replica, ReplicaLogDirs], set[int]]:
    """The directories of these replicas, and the brokers that did not answer. Prints a line for each of them."""
    try:
        return await admin.describe_replica_log_dirs(replicas), set()
    except BrokerErrors as error:
        answers, errors = error.answers, error.errors
    except KafkaError as error:
        answers, errors = {}, dict.fromkeys((replica.broker_id for replica in replicas), error)
    for broker_id, problem in sorted(errors.items()):
        fail(f"without broker {broker_id}: {problem}")
    return answers, set(errors)


def _describe(replica: Replica) -> str:
    return f"{replica.topic}-{replica.partition} on broker {replica.broker_id}"
