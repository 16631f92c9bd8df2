"""`tidelog topics`: list, create, describe, alter, delete, through the admin client of any Kafka-compatible cluster."""

from __future__ import annotations

from typing import Any

import click

from tidelog.broker.cli.common import (
    HELP,
    as_count,
    as_json,
    client_options,
    connecting,
    key_values,
    print_json,
    print_table,
    run,
)
from tidelog.client import Admin, NewTopic, TopicPartition
from tidelog.client.model import ConfigEntry, PartitionDescription, PartitionReassignment, TopicDescription
from tidelog.protocol.uuids import uuid_to_text

Moves = dict[TopicPartition, PartitionReassignment]

_TOPIC_CONFIG = 1  # DescribeConfigs' source of a value set for the topic


@click.group("topics", context_settings=HELP)
def command() -> None:
    """List, create, describe, alter and delete topics.

    \b
    Example:
      tidelog topics create flights --partitions 6
      tidelog topics describe flights
    """


@command.command("list")
@click.option("--exclude-internal", is_flag=True, help="Leave out topics that Kafka keeps for itself.")
@as_json
@connecting
def list_topics(bootstrap: str, properties: dict[str, str], exclude_internal: bool, json_wanted: bool) -> None:
    """Print the name of every topic.

    \b
    Example:
      tidelog topics list -b 127.0.0.1:9092
    """

    async def ask() -> list[str]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            return await admin.list_topics(include_internal=not exclude_internal)

    names = run(ask())
    if json_wanted:
        print_json(names)
    else:
        for name in names:
            click.echo(name)


@command.command("create")
@click.argument("name")
@click.option("-p", "--partitions", type=click.IntRange(1), help="How many; without it the broker's num.partitions.")
@click.option("-r", "--replication-factor", type=click.IntRange(1), help="Without it the broker's default.")
@click.option("-c", "--config", "configs", multiple=True, metavar="KEY=VALUE", help="A topic configuration.")
@click.option("--if-not-exists", is_flag=True, help="Succeed when the topic is there already.")
@connecting
def create(
    name: str,
    bootstrap: str,
    properties: dict[str, str],
    partitions: int | None,
    replication_factor: int | None,
    configs: tuple[str, ...],
    if_not_exists: bool,
) -> None:
    """Create the topic NAME.

    \b
    Example:
      tidelog topics create flights --partitions 6 --config retention.ms=86400000
    """
    topic = NewTopic(name, partitions or -1, replication_factor or -1, key_values(configs))

    async def ask() -> None:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            await admin.create_topics([topic])

    from tidelog.protocol.errors import ErrorCode, KafkaError

    try:
        run(ask())
    except KafkaError as error:
        if not (if_not_exists and error.code == ErrorCode.TOPIC_ALREADY_EXISTS):
            raise
        click.echo(f"Topic {name} is there already.")
    else:
        click.echo(f"Created topic {name}.")


@command.command("describe")
@click.argument("names", nargs=-1)
@click.option("--under-replicated", "wanted", flag_value="under-replicated", help="Only with replicas out of sync.")
@click.option("--unavailable", "wanted", flag_value="unavailable", help="Only those without a leader.")
@as_json
@connecting
def describe(
    names: tuple[str, ...], bootstrap: str, properties: dict[str, str], wanted: str | None, json_wanted: bool
) -> None:
    """Print who holds each partition of the topics NAMES, of all topics without NAMES.

    Replicas that a move is only adding do not make a partition under-replicated.

    \b
    Example:
      tidelog topics describe flights --json
      tidelog topics describe --under-replicated
    """

    async def ask() -> tuple[list[TopicDescription], dict[str, dict[str, str | None]], Moves]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            found = await admin.describe_topics(list(names) or None)
            entries = await admin.describe_configs(topics=found)
            moves = await _moves(admin) if wanted == "under-replicated" else {}
            return [found[name] for name in sorted(found)], {name: _set_here(entries[name]) for name in found}, moves

    topics, configs, moves = run(ask())

    def chosen_of(topic: TopicDescription) -> list[PartitionDescription]:
        if wanted == "under-replicated":
            return [each for each in topic.partitions if _lacks_replicas(topic.name, each, moves)]
        return [each for each in topic.partitions if wanted is None or each.leader is None]

    chosen = {topic.name: chosen_of(topic) for topic in topics}
    if wanted is not None:
        topics = [topic for topic in topics if chosen[topic.name]]
    if json_wanted:
        print_json([{**_as_dict(topic, chosen[topic.name]), "configs": configs[topic.name]} for topic in topics])
        return
    rows = [
        (topic.name, part.partition, "none" if part.leader is None else part.leader, part.leader_epoch)
        + (_ids(part.replicas), _ids(part.isr), _ids(part.offline_replicas))
        for topic in topics
        for part in chosen[topic.name]
    ]
    print_table(("TOPIC", "PARTITION", "LEADER", "EPOCH", "REPLICAS", "ISR", "OFFLINE"), rows)
    settings = [(topic.name, key, value) for topic in topics for key, value in sorted(configs[topic.name].items())]
    if settings:
        click.echo()
        print_table(("TOPIC", "CONFIG", "VALUE"), settings)


@command.command("alter")
@click.argument("name")
@click.option("-p", "--partitions", type=click.IntRange(1), help="How many there shall be; never fewer than there are.")
@click.option("-c", "--config", "configs", multiple=True, metavar="KEY=VALUE", help="A configuration to set.")
@click.option("--delete-config", "deleted", multiple=True, metavar="KEY", help="One to put back to its default.")
@connecting
def alter(
    name: str,
    bootstrap: str,
    properties: dict[str, str],
    partitions: int | None,
    configs: tuple[str, ...],
    deleted: tuple[str, ...],
) -> None:
    """Give the topic NAME more partitions, or another configuration.

    \b
    Example:
      tidelog topics alter flights --partitions 12
      tidelog topics alter flights --config retention.ms=3600000 --delete-config segment.bytes
    """
    changes: dict[str, str | None] = {**key_values(configs), **dict.fromkeys(deleted)}
    if partitions is None and not changes:
        raise click.UsageError("nothing to change: --partitions, --config or --delete-config is wanted")

    async def ask() -> None:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            if changes:
                await admin.incremental_alter_configs(topics={name: changes})
                click.echo(f"Changed the configuration of topic {name}.")
            if partitions is not None:
                await admin.create_partitions({name: partitions})
                click.echo(f"Topic {name} has {as_count(range(partitions), 'partition')}.")

    run(ask())


@command.command("delete")
@click.argument("names", nargs=-1, required=True)
@connecting
def delete(names: tuple[str, ...], bootstrap: str, properties: dict[str, str]) -> None:
    """Delete the topics NAMES with all their records.

    \b
    Example:
      tidelog topics delete flights
    """

    async def ask() -> None:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            for name in names:
                await admin.delete_topics([name])
                click.echo(f"Deleted topic {name}.")

    run(ask())


async def _moves(admin: Admin) -> Moves:
    from tidelog.protocol.errors import ErrorCode, KafkaError

    try:
        return await admin.list_partition_reassignments()
    except KafkaError as error:
        if error.code is ErrorCode.UNSUPPORTED_VERSION:
            return {}  # a cluster too old to move partitions by request
        raise


def _lacks_replicas(topic: str, partition: PartitionDescription, moves: Moves) -> bool:
    move = moves.get(TopicPartition(topic, partition.partition))
    due = set(partition.replicas) - set(move.adding if move else ())
    return len(partition.isr) < len(due)


def _set_here(entries: dict[str, ConfigEntry]) -> dict[str, str | None]:
    """What was set for the topic itself, not what it has from its broker."""
    return {name: entry.value for name, entry in entries.items() if entry.source == _TOPIC_CONFIG}


def _ids(nodes: tuple[int, ...]) -> str:
    return ",".join(map(str, nodes)) or "-"


def _as_dict(topic: TopicDescription, partitions: list[PartitionDescription]) -> dict[str, Any]:
    return {
        "name": topic.name,
        "topic_id": uuid_to_text(topic.topic_id),
        "internal": topic.internal,
        "partitions": [
            {
                "partition": part.partition,
                "leader": part.leader,
                "leader_epoch": part.leader_epoch,
                "replicas": list(part.replicas),
                "isr": list(part.isr),
                "offline_replicas": list(part.offline_replicas),
            }
            for part in partitions
        ],
    }
