"""`tidelog elect-leaders`: elects the preferred (first) replica of partitions, or with --unclean any live replica."""

from __future__ import annotations

from pathlib import Path

import click

from tidelog.cli.common import (
    HELP,
    IntegerRange,
    alternative,
    as_count,
    client_options,
    connecting,
    echo,
    print_json,
    run,
    text_in,
)
from tidelog.cli.reassign import partition_lists
from tidelog.client import Admin, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError


@click.command("elect-leaders", context_settings=HELP)
@alternative("--preferred", "unclean", False, "The first replica (default).")
@alternative("--unclean", "unclean", True, "Any replica alive, though records may be lost.")
@click.option("--all", "everywhere", is_flag=True, help="In the whole cluster.")
@click.option(
    "--json",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Partitions as Kafka\'s tool reads them: {"partitions":[{"topic":"t","partition":0}]}.',
)
@click.option("-t", "--topic", help="One topic: all of its partitions, or those of --partition.")
@click.option("-p", "--partition", "numbers", type=IntegerRange(0), multiple=True, help="May be given many times.")
@click.option("--output-json", is_flag=True, help="Print JSON.")
@connecting
def command(
    bootstrap: str,
    properties: dict[str, str],
    unclean: bool | None,
    everywhere: bool,
    file: Path | None,
    topic: str | None,
    numbers: tuple[int, ...],
    output_json: bool,
) -> int:
    """Elect leaders: the preferred replica, which is the first of each partition, or with --unclean any that lives.

    \b
    Example:
      tidelog elect-leaders --all
      tidelog elect-leaders --unclean --topic flights --partition 3
    """
    if (everywhere, file is not None, topic is not None).count(True) != 1 or (numbers and topic is None):
        raise click.UsageError("give one of --all, --json FILE or --topic NAME, and --partition only with --topic")

    async def ask() -> dict[TopicPartition, KafkaError | None]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            partitions = None if file is None else _read(file)
            if topic is not None:
                known = (await admin.describe_topics([topic]))[topic].partitions
                partitions = [TopicPartition(topic, number) for number in numbers or [each.partition for each in known]]
            return await admin.elect_leaders(partitions, unclean=bool(unclean))

    outcomes = run(ask())
    if output_json:
        return _as_json(outcomes)
    return _report(outcomes)


def _read(path: Path) -> list[TopicPartition]:
    try:
        return partition_lists.partitions_in(text_in(path))
    except partition_lists.ListError as error:
        raise click.ClickException(f"{path}: {error}") from None


def _as_json(outcomes: dict[TopicPartition, KafkaError | None]) -> int:
    states = {
        partition: "elected"
        if error is None
        else "not needed"
        if error.code is ErrorCode.ELECTION_NOT_NEEDED
        else error.code.name
        for partition, error in sorted(outcomes.items())
    }
    print_json([{"topic": topic, "partition": number, "outcome": state} for (topic, number), state in states.items()])
    return int(any(state not in ("elected", "not needed") for state in states.values()))


def _report(outcomes: dict[TopicPartition, KafkaError | None]) -> int:
    elected: list[TopicPartition] = []
    failed = 0
    for partition, error in sorted(outcomes.items()):
        if error is None:
            elected.append(partition)
            echo(f"{partition}: elected")
        elif error.code is ErrorCode.ELECTION_NOT_NEEDED:
            echo(f"{partition}: no election needed")
        else:
            failed = 1
            click.echo(f"tidelog: {error}", err=True)
    click.echo(f"elected {as_count(elected, 'leader')}", err=True)
    return failed
