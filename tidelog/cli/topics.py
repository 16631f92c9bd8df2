"""`tidelog topics`: lists, creates, describes, alters and deletes topics of any Kafka-compatible cluster.

`topic_records.py` has `topics offsets` and `topics delete-records`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from tidelog.cli.brokers.log_dirs import Described
from tidelog.cli.common import (
    HELP,
    CommandGroup,
    IntegerRange,
    alternative,
    answered_by_brokers,
    as_count,
    as_json,
    change_each,
    client_options,
    connecting,
    echo,
    fail,
    key_value_option,
    print_json,
    print_table,
    run,
)
from tidelog.cli.configs import warn_of_unknown
from tidelog.cli.topic_records import bounds_of, delete_records, offsets
from tidelog.client import Admin, NewTopic, TopicPartition
from tidelog.client.model import ConfigEntry, PartitionDescription, PartitionReassignment, TopicDescription
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.uuids import uuid_to_text

Moves = dict[TopicPartition, PartitionReassignment]
Configs = dict[str, dict[str, str | None]]
Details = dict[TopicPartition, dict[str, int | None]]

_TOPIC_CONFIG = 1  # the source in DescribeConfigs of a topic's own value


@click.group("topics", cls=CommandGroup, context_settings=HELP)
def command() -> None:
    """List, create, describe, alter and delete topics; show their offsets, delete records.

    \b
    Example:
      tidelog topics create flights --partitions 6
      tidelog topics describe flights
    """


command.add_command(offsets)
command.add_command(delete_records)


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
            echo(name)


def _assignment(context: click.Context, parameter: click.Parameter, text: str | None) -> list[list[int]]:
    """`1:2,2:3` as the replicas of each partition, in the form of kafka-topics."""
    try:
        return [[int(broker) for broker in part.split(":")] for part in text.split(",")] if text else []
    except ValueError:
        raise click.BadParameter(f"{text!r} is not of the form 1:2,2:3: brokers of each partition") from None


@command.command("create")
@click.argument("name")
@click.option("-p", "--partitions", type=IntegerRange(1), help="How many; without it the broker's num.partitions.")
@click.option("-r", "--replication-factor", type=IntegerRange(1), help="Without it the broker's default.")
@click.option(
    "-a",
    "--assignment",
    metavar="B:B,B:B",
    callback=_assignment,
    help="Brokers of each partition instead of numbers: 1:2,2:3.",
)
@key_value_option("-c", "--config", "configs", about="A topic configuration.")
@click.option("--if-not-exists", is_flag=True, help="Succeed when the topic is there already.")
@click.option("--dry-run", is_flag=True, help="Only ask whether it would be allowed.")
@as_json
@connecting
def create(
    name: str,
    bootstrap: str,
    properties: dict[str, str],
    partitions: int | None,
    replication_factor: int | None,
    assignment: list[list[int]],
    configs: dict[str, str],
    if_not_exists: bool,
    dry_run: bool,
    json_wanted: bool,
) -> None:
    """Create the topic NAME.

    \b
    Example:
      tidelog topics create flights --partitions 6 --config retention.ms=86400000
      tidelog topics create flights --assignment 1:2,2:3,3:1
    """
    warn_of_unknown("topics", configs)
    if assignment and (partitions or replication_factor):
        raise click.UsageError("--assignment already gives the numbers of partitions and replicas")
    topic = NewTopic(name, partitions or -1, replication_factor or -1, configs, dict(enumerate(assignment)))

    async def ask() -> bytes | None:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            try:
                return (await admin.create_topics([topic], validate_only=dry_run))[name]
            except KafkaError as error:
                if not (if_not_exists and error.code == ErrorCode.TOPIC_ALREADY_EXISTS):
                    raise
                return None

    topic_id = run(ask())
    outcome = "exists" if topic_id is None else "would be created" if dry_run else "created"
    if json_wanted:
        text = uuid_to_text(topic_id) if topic_id is not None and not dry_run else None
        print_json({"name": name, "topic_id": text, "outcome": outcome})
    elif topic_id is None:
        echo(f"Topic {name} is there already.")
    else:
        echo(f"{'Would create' if dry_run else 'Created'} topic {name}.")


@command.command("describe")
@click.argument("names", nargs=-1)
@alternative("--under-replicated", "condition", "under-replicated", "Only with replicas out of sync.")
@alternative("--unavailable", "condition", "unavailable", "Only those without a leader.")
@click.option("--sizes", "sizes_wanted", is_flag=True, help="Also the size of each partition's log, at its leader.")
@click.option("--offsets", "offsets_wanted", is_flag=True, help="Also the first and the next offset.")
@click.option("--configs", "all_configs", is_flag=True, help="All configs, not only those set for the topic.")
@as_json
@connecting
def describe(
    names: tuple[str, ...],
    bootstrap: str,
    properties: dict[str, str],
    condition: str | None,
    sizes_wanted: bool,
    offsets_wanted: bool,
    all_configs: bool,
    json_wanted: bool,
) -> int:
    """Print the leader and the replicas of each partition of the topics NAMES, of all topics without NAMES.

    Replicas that a move is only adding do not make a partition under-replicated.

    \b
    Example:
      tidelog topics describe flights --json
      tidelog topics describe flights --sizes --offsets --configs
      tidelog topics describe --under-replicated
    """

    async def ask() -> tuple[list[TopicDescription], Configs, Details, int]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            descriptions = await admin.describe_topics(list(names) or None)
            entries = await admin.describe_configs(topics=descriptions)
            moves = await _moves(admin) if condition == "under-replicated" else {}
            topics = [_chosen(descriptions[name], condition, moves) for name in sorted(descriptions)]
            if condition is not None:
                topics = [topic for topic in topics if topic.partitions]
            configs = {topic.name: _configs(entries[topic.name], everything=all_configs) for topic in topics}
            return topics, configs, *await _details(admin, topics, sizes=sizes_wanted, offsets=offsets_wanted)

    topics, configs, details, status = run(ask())
    if json_wanted:
        print_json([{**_as_dict(topic, details), "configs": configs[topic.name]} for topic in topics])
        return status
    more = (("SIZE",) if sizes_wanted else ()) + (("EARLIEST", "LATEST") if offsets_wanted else ())
    rows = [
        (topic.name, part.partition, "none" if part.leader is None else part.leader, part.leader_epoch)
        + (_ids(part.replicas), _ids(part.isr), _ids(part.offline_replicas))
        + tuple(
            "-" if value is None else value
            for value in details.get(TopicPartition(topic.name, part.partition), {}).values()
        )
        for topic in topics
        for part in topic.partitions
    ]
    print_table(("TOPIC", "PARTITION", "LEADER", "EPOCH", "REPLICAS", "ISR", "OFFLINE", *more), rows)
    settings = [(topic.name, key, value) for topic in topics for key, value in sorted(configs[topic.name].items())]
    if settings:
        echo()
        print_table(("TOPIC", "CONFIG", "VALUE"), settings)
    return status


def _chosen(topic: TopicDescription, condition: str | None, moves: Moves) -> TopicDescription:
    """The topic with only the selected partitions."""
    if condition is None:
        return topic
    if condition == "under-replicated":
        partitions = [each for each in topic.partitions if _lacks_replicas(topic.name, each, moves)]
    else:
        partitions = [each for each in topic.partitions if each.leader is None]
    return replace(topic, partitions=tuple(partitions))


async def _details(admin: Admin, topics: list[TopicDescription], *, sizes: bool, offsets: bool) -> tuple[Details, int]:
    """Sizes and offsets by partition, None for those that are not known; and the exit code, 1 where a leader has not
    answered. Its line is on standard error.
    """
    leaders = {TopicPartition(topic.name, part.partition): part.leader for topic in topics for part in topic.partitions}
    led = {partition: leader for partition, leader in leaders.items() if leader is not None}
    details: Details = {partition: {} for partition in leaders}
    status = 0
    if sizes:
        asked = sorted(set(led.values()))
        described: Described = {}
        try:
            asking = admin.describe_log_dirs(asked, [topic.name for topic in topics])
            described, status = await answered_by_brokers(asking)
        except KafkaError as error:  # none has answered; the rest of the description is known
            status = fail(str(error))
        known = {
            (replica.topic, replica.partition, broker_id): replica.size_bytes
            for broker_id, directories in described.items()
            for directory in directories
            for replica in directory.replicas
            if not replica.is_future
        }
        for partition, leader in leaders.items():
            details[partition]["size_bytes"] = None if leader is None else known.get((*partition, leader))
    if offsets:
        bounds: dict[TopicPartition, tuple[int, int]] = {}
        try:
            bounds = await bounds_of(admin, list(led))
        except KafkaError as error:
            fail(str(error))
        status = status or int(len(bounds) < len(led))
        for partition in leaders:
            details[partition]["earliest"], details[partition]["latest"] = bounds.get(partition, (None, None))
    return details, status


@command.command("alter")
@click.argument("name")
@click.option("-p", "--partitions", type=IntegerRange(1), help="How many there shall be; never fewer than there are.")
@click.option(
    "-a", "--assignment", metavar="B:B,B:B", callback=_assignment, help="Brokers of each new partition: 1:2,2:3."
)
@key_value_option("-c", "--config", "configs", about="A configuration to set.")
@click.option("--delete-config", "deleted", multiple=True, metavar="KEY", help="One to put back to its default.")
@click.option("--if-exists", is_flag=True, help="Succeed when there is no such topic.")
@click.option("--dry-run", is_flag=True, help="Only ask whether it would be allowed.")
@as_json
@connecting
def alter(
    name: str,
    bootstrap: str,
    properties: dict[str, str],
    partitions: int | None,
    assignment: list[list[int]],
    configs: dict[str, str],
    deleted: tuple[str, ...],
    if_exists: bool,
    dry_run: bool,
    json_wanted: bool,
) -> None:
    """Give the topic NAME more partitions, or another configuration.

    \b
    Example:
      tidelog topics alter flights --partitions 12
      tidelog topics alter flights --config retention.ms=3600000 --delete-config segment.bytes
    """
    changes: dict[str, str | None] = {**configs, **dict.fromkeys(deleted)}
    if both := configs.keys() & set(deleted):
        raise click.UsageError(f"give --config or --delete-config for {min(both)}, not both")
    if partitions is None and not changes:
        raise click.UsageError("nothing to change: give --partitions, --config or --delete-config")
    if assignment and partitions is None:
        raise click.UsageError("--assignment is only for new partitions: give their new total number with --partitions")
    replicas = {name: assignment} if assignment else None
    warn_of_unknown("topics", changes)

    def tell(line: str) -> None:
        if not json_wanted:
            echo(line)

    async def ask() -> None:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            if changes:
                await admin.incremental_alter_configs(topics={name: changes}, validate_only=dry_run)
                tell(f"{'Would change' if dry_run else 'Changed'} the configuration of topic {name}.")
            if partitions is not None:
                await admin.create_partitions({name: partitions}, assignments=replicas, validate_only=dry_run)
                verb = "would have" if dry_run else "has"
                tell(f"Topic {name} {verb} {as_count(range(partitions), 'partition')}.")

    outcome = "would change" if dry_run else "changed"
    try:
        run(ask())
    except KafkaError as error:
        if not (if_exists and error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
            raise
        outcome = "missing"
        tell(f"There is no topic {name}.")
    if json_wanted:
        print_json({"name": name, "partitions": partitions, "configs": changes, "outcome": outcome})


@command.command("delete")
@click.argument("names", nargs=-1, required=True)
@click.option("--if-exists", is_flag=True, help="Succeed when there is no such topic.")
@as_json
@connecting
def delete(
    names: tuple[str, ...], bootstrap: str, properties: dict[str, str], if_exists: bool, json_wanted: bool
) -> int:
    """Delete the topics NAMES with all their records.

    \b
    Example:
      tidelog topics delete flights
    """

    async def ask() -> tuple[dict[str, str], int]:
        async with Admin(**client_options(bootstrap, properties)) as admin:

            async def change(name: str) -> str:
                try:
                    await admin.delete_topics([name])
                except KafkaError as error:
                    if not (if_exists and error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
                        raise
                    outcome, line = "not there", f"There is no topic {name}."
                else:
                    outcome, line = "deleted", f"Deleted topic {name}."
                if not json_wanted:
                    echo(line)
                return outcome

            return await change_each(dict.fromkeys(names), change)

    outcomes, status = run(ask())
    if json_wanted:
        print_json([{"name": name, "outcome": outcome} for name, outcome in outcomes.items()])
    return status


async def _moves(admin: Admin) -> Moves:
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


def _configs(entries: dict[str, ConfigEntry], *, everything: bool) -> dict[str, str | None]:
    """The topic's own configs; with `everything` also the values from the broker."""
    return {name: entry.value for name, entry in entries.items() if everything or entry.source == _TOPIC_CONFIG}


def _ids(nodes: tuple[int, ...]) -> str:
    return ",".join(map(str, nodes)) or "-"


def _as_dict(topic: TopicDescription, details: Details) -> dict[str, Any]:
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
                **details.get(TopicPartition(topic.name, part.partition), {}),
            }
            for part in topic.partitions
        ],
    }
