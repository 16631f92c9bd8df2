"""`tidelog transactions`: lists and describes transactions, and finds and ends those that hang or block readers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import click

from tidelog.cli.common import (
    HELP,
    CommandGroup,
    IntegerRange,
    answered_by_brokers,
    as_json,
    as_time,
    client_options,
    connecting,
    fail,
    print_json,
    print_table,
    run,
)
from tidelog.cli.topic_records import led_partitions, left_out, of_answering
from tidelog.client import Admin, TopicPartition
from tidelog.client.model import (
    TRANSACTION_STATES,
    BlockedPartition,
    OpenTransaction,
    TransactionDescription,
    TransactionListing,
)
from tidelog.protocol.errors import ErrorCode, KafkaError

Transaction = TypeVar("Transaction", BlockedPartition, OpenTransaction)

_PARTITION = click.option(
    "-p", "--partition", "numbers", type=IntegerRange(0), multiple=True, help="Only this partition."
)


@click.group("transactions", cls=CommandGroup, context_settings=HELP)
def command() -> None:
    """List and describe transactions; find those that hold back readers or hang, and end them.

    \b
    Example:
      tidelog transactions list --state Ongoing
      tidelog transactions blocking flights
    """


@command.command("list")
@click.option(
    "--state",
    "states",
    type=click.Choice(TRANSACTION_STATES, case_sensitive=False),
    multiple=True,
    metavar="STATE",
    help="Only ids in this state, such as Ongoing.",
)
@click.option("--producer-id", "producer_ids", type=int, multiple=True, help="Only ids of this producer.")
@click.option(
    "--longer-than", "min_duration_ms", type=IntegerRange(0), metavar="MS", help="Only transactions open so long."
)
@click.option("--include", "id_pattern", metavar="REGEX", help="Only ids that match.")
@as_json
@connecting
def list_transactions(
    states: tuple[str, ...],
    producer_ids: tuple[int, ...],
    min_duration_ms: int | None,
    id_pattern: str | None,
    bootstrap: str,
    properties: dict[str, str],
    json_wanted: bool,
) -> int:
    """Print every transactional id with its coordinator and state.

    \b
    Example:
      tidelog transactions list --state Ongoing --longer-than 60000
    """

    async def fetch() -> tuple[list[TransactionListing], int]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            asking = admin.list_transactions(
                states=states, producer_ids=producer_ids, min_duration_ms=min_duration_ms, id_pattern=id_pattern
            )
            return await answered_by_brokers(asking)

    listings, status = run(fetch())
    rows = [
        {
            "transactional_id": listing.transactional_id,
            "coordinator": listing.coordinator_id,
            "producer_id": listing.producer_id,
            "state": listing.state,
        }
        for listing in listings
    ]
    if json_wanted:
        print_json(rows)
    else:
        print_table(("TRANSACTIONAL ID", "COORDINATOR", "PRODUCER", "STATE"), [tuple(row.values()) for row in rows])
    return status


@command.command("describe")
@click.argument("ids", nargs=-1, required=True)
@as_json
@connecting
def describe(ids: tuple[str, ...], bootstrap: str, properties: dict[str, str], json_wanted: bool) -> None:
    """Print state, producer, duration and partitions of the transactional IDS.

    \b
    Example:
      tidelog transactions describe billing-1
    """

    async def fetch() -> dict[str, TransactionDescription]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            return await admin.describe_transactions(ids)

    rows = [_described(description) for description in run(fetch()).values()]
    if json_wanted:
        print_json(rows)
        return
    header = ("TRANSACTIONAL ID", "COORDINATOR", "STATE", "PRODUCER", "EPOCH", "TIMEOUT MS", "OPEN SINCE", "OPEN MS")
    cells = [
        (row["transactional_id"], row["coordinator"], row["state"], row["producer_id"], row["producer_epoch"])
        + (row["timeout_ms"], as_time(_or(row["start_time_ms"], -1)), _or(row["duration_ms"], "-"))
        + (",".join(row["partitions"]) or "-",)
        for row in rows
    ]
    print_table((*header, "PARTITIONS"), cells)


@command.command("blocking")
@click.argument("names", nargs=-1)
@_PARTITION
@as_json
@connecting
def blocking(
    names: tuple[str, ...], numbers: tuple[int, ...], bootstrap: str, properties: dict[str, str], json_wanted: bool
) -> int:
    """Print the transactions that hold back last stable offsets, in the topics NAMES or in all.

    Readers with isolation.level=read_committed get no records from the last stable offset on.

    \b
    Example:
      tidelog transactions blocking flights
    """

    async def fetch() -> tuple[list[BlockedPartition], int]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            return await _of_partitions(admin, names, numbers, admin.blocked_partitions)

    blocked_partitions, status = run(fetch())
    rows = [_blocked(each) for each in blocked_partitions]
    if json_wanted:
        print_json(rows)
        return status
    header = ("TOPIC", "PARTITION", "STABLE", "END", "BEHIND", "PRODUCER", "TRANSACTIONAL ID", "STATE", "OPEN SINCE")
    cells = [
        (row["topic"], row["partition"], row["last_stable_offset"], row["log_end_offset"])
        + (row["log_end_offset"] - row["last_stable_offset"], row["producer_id"])
        + (_or(row["transactional_id"], "-"), _or(row["state"], "unknown"), as_time(row["open_since_ms"]))
        for row in rows
    ]
    print_table(header, cells)
    return status


@command.command("find-hanging")
@click.argument("names", nargs=-1)
@_PARTITION
@click.option(
    "--max-transaction-timeout",
    "minutes",
    type=IntegerRange(0),
    default=15,
    show_default=True,
    help="Minutes after which a transaction cannot be open; the brokers' transaction.max.timeout.ms.",
)
@as_json
@connecting
def find_hanging(
    names: tuple[str, ...],
    numbers: tuple[int, ...],
    minutes: int,
    bootstrap: str,
    properties: dict[str, str],
    json_wanted: bool,
) -> int:
    """Print open transactions that no coordinator will end, in the topics NAMES or in all.

    `tidelog transactions abort` ends one.

    \b
    Example:
      tidelog transactions find-hanging flights
    """

    async def fetch() -> tuple[list[OpenTransaction], int]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            find = partial(admin.find_hanging_transactions, max_transaction_timeout_ms=minutes * 60_000)
            return await _of_partitions(admin, names, numbers, find)

    hanging, status = run(fetch())
    rows = [_open(transaction) for transaction in hanging]
    if json_wanted:
        print_json(rows)
        return status
    header = ("TOPIC", "PARTITION", "PRODUCER", "EPOCH", "COORDINATOR EPOCH", "START OFFSET", "LAST WRITTEN")
    cells = [(*tuple(row.values())[:6], as_time(row["last_timestamp_ms"])) for row in rows]
    print_table(header, cells)
    return status


@command.command("abort")
@click.argument("topic")
@click.argument("partition", type=IntegerRange(0))
@click.option("--start-offset", type=IntegerRange(0), required=True, help="The first offset of the transaction.")
@as_json
@connecting
def abort(
    topic: str, partition: int, start_offset: int, bootstrap: str, properties: dict[str, str], json_wanted: bool
) -> int:
    """End a hanging transaction: write an abort marker into PARTITION of TOPIC.

    A transaction whose producer lives is ended by `tidelog transactions terminate`.

    \b
    Example:
      tidelog transactions abort flights 0 --start-offset 1742
    """
    target = TopicPartition(topic, partition)

    async def end() -> bool:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            await led_partitions(admin, (topic,), (partition,))  # refuses an unknown one at once
            for producer in (await admin.describe_producers([target]))[target]:
                if producer.transaction_start_offset == start_offset:
                    await admin.abort_transaction(
                        target, producer.producer_id, producer.producer_epoch, producer.coordinator_epoch
                    )
                    return True
        return False

    if not run(end()):
        return fail(f"no open transaction of {target} starts at offset {start_offset}")
    if json_wanted:
        print_json({"topic": topic, "partition": partition, "start_offset": start_offset, "outcome": "aborted"})
    else:
        click.echo(f"aborted the transaction of {target} from offset {start_offset} on", err=True)
    return 0


@command.command("terminate")
@click.argument("transactional_id")
@as_json
@connecting
def terminate(transactional_id: str, bootstrap: str, properties: dict[str, str], json_wanted: bool) -> None:
    """Fence the producer of TRANSACTIONAL_ID and abort its transaction, whatever its state.

    \b
    Example:
      tidelog transactions terminate billing-1
    """

    async def fence() -> tuple[int, int]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            await admin.describe_transactions([transactional_id])  # refuses an unknown id, which fencing would create
            result = (await admin.fence_producers([transactional_id]))[transactional_id]
            if isinstance(result, KafkaError):
                raise result
            return result

    producer_id, epoch = run(fence())
    if json_wanted:
        print_json({"transactional_id": transactional_id, "producer_id": producer_id, "next_epoch": epoch})
    else:
        click.echo(f"{transactional_id}: producer {producer_id} is fenced, the next epoch is {epoch}", err=True)


async def _of_partitions(
    admin: Admin,
    names: tuple[str, ...],
    numbers: tuple[int, ...],
    find: Callable[[list[TopicPartition] | None], Awaitable[list[Transaction]]],
) -> tuple[list[Transaction], int]:
    """The transactions in these topics, in all without names, as far as leaders answer; and the exit code.

    Prints what the other leaders have failed with. Raises KafkaError.
    """
    if numbers and not names:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "--partition needs a topic")
    partitions, leaderless = await led_partitions(admin, names, numbers)
    transactions, status = await of_answering(find, partitions)
    return transactions, left_out(leaderless) or status


def _described(description: TransactionDescription) -> dict[str, Any]:
    start_ms = description.start_time_ms
    return {
        "transactional_id": description.transactional_id,
        "coordinator": description.coordinator_id,
        "state": description.state,
        "producer_id": description.producer_id,
        "producer_epoch": description.producer_epoch,
        "timeout_ms": description.timeout_ms,
        "start_time_ms": start_ms,
        "duration_ms": None if start_ms is None else max(0, round(time.time() * 1000) - start_ms),
        "partitions": [str(partition) for partition in description.partitions],
    }


def _open(transaction: OpenTransaction) -> dict[str, Any]:
    producer = transaction.producer
    return {
        "topic": transaction.partition.topic,
        "partition": transaction.partition.partition,
        "producer_id": producer.producer_id,
        "producer_epoch": producer.producer_epoch,
        "coordinator_epoch": producer.coordinator_epoch,
        "start_offset": producer.transaction_start_offset,
        "last_timestamp_ms": producer.last_timestamp_ms,
    }


def _blocked(blocked: BlockedPartition) -> dict[str, Any]:
    blocker, description = blocked.blocker, blocked.blocker.description
    return {
        "topic": blocked.partition.topic,
        "partition": blocked.partition.partition,
        "last_stable_offset": blocked.last_stable_offset,
        "log_end_offset": blocked.high_watermark,
        "producer_id": blocker.producer.producer_id,
        "producer_epoch": blocker.producer.producer_epoch,
        "transactional_id": None if description is None else description.transactional_id,
        "state": None if description is None else description.state,
        "start_offset": blocker.producer.transaction_start_offset,
        "open_since_ms": blocker.open_since_ms,
    }


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
