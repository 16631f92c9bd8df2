"""`tidelog producers`: the idempotent producers of a topic's partitions, as their leaders know them."""

from __future__ import annotations

from collections.abc import Mapping

import click

from tidelog.cli.common import (
    HELP,
    IntegerRange,
    as_json,
    as_time,
    client_options,
    connecting,
    print_json,
    print_table,
    run,
)
from tidelog.cli.topic_records import answered, led_partitions, left_out
from tidelog.client import Admin, TopicPartition
from tidelog.client.model import ProducerState


@click.command("producers", context_settings=HELP)
@click.argument("topic")
@click.option("-p", "--partition", "numbers", type=IntegerRange(0), multiple=True, help="Only this partition.")
@as_json
@connecting
def command(topic: str, numbers: tuple[int, ...], bootstrap: str, properties: dict[str, str], json_wanted: bool) -> int:
    """Print the idempotent producers that the partitions of TOPIC know, and the sequence that each wrote last.

    A producer is forgotten producer.id.expiration.ms after its last record (a day by default).

    \b
    Example:
      tidelog producers flights --partition 0
    """

    async def ask() -> tuple[Mapping[TopicPartition, list[ProducerState]], list[TopicPartition], bool]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            partitions, leaderless = await led_partitions(admin, (topic,), numbers)
            described = await answered(admin.describe_producers(partitions))
            return described, leaderless, len(described) == len(partitions)

    described, leaderless, is_whole = run(ask())
    if json_wanted:
        print_json(
            [
                {"topic": partition.topic, "partition": partition.partition, **each._asdict()}
                for partition, producers in described.items()
                for each in producers
            ]
        )
        return left_out(leaderless) or int(not is_whole)
    rows = [
        (partition.topic, partition.partition, each.producer_id, each.producer_epoch, each.last_sequence)
        + (as_time(each.last_timestamp_ms), _or_dash(each.transaction_start_offset))
        for partition, producers in described.items()
        for each in producers
    ]
    header = ("TOPIC", "PARTITION", "PRODUCER", "EPOCH", "LAST SEQUENCE", "LAST WRITTEN", "TRANSACTION FROM")
    print_table(header, rows)
    return left_out(leaderless) or int(not is_whole)


def _or_dash(offset: int) -> str:
    return "-" if offset < 0 else str(offset)
