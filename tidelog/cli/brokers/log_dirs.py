"""`tidelog log-dirs`: the log directories of brokers, with the sizes and lags of their replicas."""

from __future__ import annotations

from typing import Any

import click

from tidelog.cli.common import (
    HELP,
    CommandGroup,
    answered_by_brokers,
    as_bytes,
    as_json,
    client_options,
    connecting,
    print_json,
    print_table,
    require_running,
    run,
)
from tidelog.client import Admin
from tidelog.client.model import LogDirDescription

Described = dict[int, list[LogDirDescription]]


@click.group("log-dirs", cls=CommandGroup, context_settings=HELP)
def command() -> None:
    """Describe the log directories of brokers. Moving replicas between them: `tidelog reassign`.

    \b
    Example:
      tidelog log-dirs describe
    """


def _ids(context: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    try:
        return None if value is None else [int(each) for each in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of broker ids such as 1,2") from None


@command.command("describe")
@click.option("--broker-list", callback=_ids, metavar="ID,ID", help="Only these brokers.")
@click.option("--topic-list", metavar="NAME,NAME", help="Only replicas of these topics.")
@click.option("--replicas", "replicas_wanted", is_flag=True, help="A line for each replica, not for each directory.")
@as_json
@connecting
def describe(
    bootstrap: str,
    properties: dict[str, str],
    broker_list: list[int] | None,
    topic_list: str | None,
    replicas_wanted: bool,
    json_wanted: bool,
) -> int:
    """Print each log directory with its size, the room left on its volume, and its replicas.

    \b
    Examples:
      tidelog log-dirs describe --broker-list 1,2
      tidelog log-dirs describe --topic-list flights --replicas
    """
    topics = None if topic_list is None else [name.strip() for name in topic_list.split(",")]

    async def ask() -> tuple[Described, int]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            nodes = (await admin.describe_cluster(include_fenced=True)).nodes
            require_running(nodes, broker_list or ())
            running = sorted(node.node_id for node in nodes if not node.fenced)
            if topics is not None:
                await admin.describe_topics(topics)  # raises an error for an unknown topic
            asking = admin.describe_log_dirs(sorted(set(broker_list or running)), topics)
            return await answered_by_brokers(asking)

    described, status = run(ask())
    if json_wanted:
        print_json(_as_dict(described))
    elif replicas_wanted or topics is not None:
        _print_replicas(described)
    else:
        _print_directories(described)
    return status or int(any(each.error for directories in described.values() for each in directories))


def _print_directories(described: Described) -> None:
    rows = [
        (
            broker_id,
            each.path,
            each.error.code.name if each.error else "cordoned" if each.is_cordoned else "online",
            len(each.replicas),
            as_bytes(sum(replica.size_bytes for replica in each.replicas)),
            as_bytes(each.usable_bytes),
            as_bytes(each.total_bytes),
        )
        for broker_id, directories in described.items()
        for each in directories
    ]
    print_table(("BROKER", "DIRECTORY", "STATE", "REPLICAS", "SIZE", "FREE", "VOLUME"), rows)


def _print_replicas(described: Described) -> None:
    rows = [
        (replica.topic, replica.partition, broker_id, replica.size_bytes, replica.offset_lag)
        + (f"{each.path} (on its way here)" if replica.is_future else each.path,)
        for broker_id, directories in described.items()
        for each in directories
        for replica in each.replicas
    ]
    print_table(("TOPIC", "PARTITION", "BROKER", "SIZE", "LAG", "DIRECTORY"), sorted(rows))


def _as_dict(described: Described) -> dict[str, Any]:
    """The output in the form of Kafka's `kafka-log-dirs.sh`."""
    return {
        "version": 1,
        "brokers": [
            {
                "broker": broker_id,
                "logDirs": [
                    {
                        "logDir": each.path,
                        "error": None if each.error is None else each.error.code.name,
                        "totalBytes": each.total_bytes,
                        "usableBytes": each.usable_bytes,
                        "isCordoned": each.is_cordoned,
                        "partitions": [
                            {
                                "partition": f"{replica.topic}-{replica.partition}",
                                "size": replica.size_bytes,
                                "offsetLag": replica.offset_lag,
                                "isFuture": replica.is_future,
                            }
                            for replica in each.replicas
                        ],
                    }
                    for each in directories
                ],
            }
            for broker_id, directories in described.items()
        ],
    }
