"""`tidelog groups`: lists, describes, resets and deletes consumer groups of any Kafka-compatible cluster.

This module has the requests; `show.py` formats the output, and `reset_command.py` resets offsets.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

import click

from tidelog.cli.common import (
    HELP,
    CommandGroup,
    alternative,
    answered_by_brokers,
    as_count,
    as_json,
    client_options,
    connecting,
    echo,
    fail,
    print_json,
    print_table,
    run,
)
from tidelog.cli.groups import show as groups_show
from tidelog.cli.groups.reset import ResetError, chosen
from tidelog.cli.groups.reset_command import reset_offsets
from tidelog.cli.groups.show import ShownGroup
from tidelog.cli.topic_records import of_answering, print_failures
from tidelog.client import Admin, PartitionErrors, TopicPartition
from tidelog.client.groups.model import DESCRIBED_TYPES, GROUP_STATES, GROUP_TYPES, GroupDescription, GroupListing
from tidelog.protocol.errors import ErrorCode, KafkaError

_LOOKS = 5
_GROUPS_AT_ONCE = 4
"""Each has a limit of its own from its begin, and with more at once all would come to their ends late."""


@click.group("groups", cls=CommandGroup, context_settings=HELP)
def command() -> None:
    """List and describe consumer groups, reset and delete their offsets.

    \b
    Example:
      tidelog groups describe billing
      tidelog groups reset-offsets billing --topic orders --to-earliest --execute
    """


command.add_command(reset_offsets)


@command.command("list")
@click.option(
    "--state",
    "states",
    type=click.Choice(GROUP_STATES, case_sensitive=False),
    multiple=True,
    metavar="STATE",
    help="Only those in it, such as Stable or Empty.",
)
@click.option(
    "--type",
    "types",
    type=click.Choice(GROUP_TYPES, case_sensitive=False),
    multiple=True,
    metavar="TYPE",
    help="Only those of it, such as classic.",
)
@as_json
@connecting
def list_groups(
    bootstrap: str, properties: dict[str, str], states: tuple[str, ...], types: tuple[str, ...], json_wanted: bool
) -> int:
    """Print every group of the cluster.

    \b
    Example:
      tidelog groups list --state Empty
    """

    async def ask() -> tuple[list[GroupListing], int]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            return await answered_by_brokers(admin.list_groups(states=states, types=types))

    listed, status = run(ask())
    if json_wanted:
        print_json(
            [
                {"group": each.group_id, "state": each.state, "type": each.type, "protocol_type": each.protocol_type}
                for each in listed
            ]
        )
        return status
    nothing = groups_show.NOTHING
    print_table(
        ("GROUP", "STATE", "TYPE", "PROTOCOL-TYPE"),
        [
            (each.group_id, each.state or nothing, each.type or nothing, each.protocol_type or nothing)
            for each in listed
        ],
    )
    return status


@command.command("describe")
@click.argument("groups", nargs=-1)
@alternative("--members", "view", "members", "Who is in it, instead of what it has read.")
@alternative("--state", "view", "state", "Its state, coordinator and assignor.")
@click.option("--verbose", is_flag=True, help="--members: which partitions each reads.")
@as_json
@connecting
def describe(
    bootstrap: str,
    properties: dict[str, str],
    groups: tuple[str, ...],
    view: str | None,
    verbose: bool,
    json_wanted: bool,
) -> int:
    """Print how far the groups GROUPS are behind.

    All groups without GROUPS. LAG counts unread records, LAG-SECONDS is the age of the first of them. That record is
    fetched for it, so --members and --state are cheaper.

    \b
    Example:
      tidelog groups describe billing
      tidelog groups describe billing --members --verbose
    """

    async def ask() -> tuple[list[ShownGroup], int]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            described, status = (await admin.describe_groups(groups), 0) if groups else await _describe_all(admin)
            room = asyncio.Semaphore(_GROUPS_AT_ONCE)
            looks = await asyncio.gather(
                *(_look(admin, each, room, with_offsets=view is None) for each in described.values())
            )
            return [each for each, _ in looks], max((each for _, each in looks), default=0) or status

    shown, status = run(ask())
    if json_wanted:
        print_json([groups_show.as_dict(each, with_offsets=view is None) for each in shown])
        return status
    for each in shown:
        if (remark := groups_show.remark(each.group)) is not None:
            click.echo(remark, err=True)
    if view == "state":
        print_table(groups_show.STATE_COLUMNS, [groups_show.state_row(each.group) for each in shown])
    elif view == "members":
        columns = (*groups_show.MEMBER_COLUMNS, "ASSIGNMENT") if verbose else groups_show.MEMBER_COLUMNS
        print_table(columns, [row for each in shown for row in groups_show.member_rows(each.group, verbose)])
    else:
        print_table(groups_show.OFFSET_COLUMNS, [row for each in shown for row in groups_show.offset_rows(each)])
    return status


async def _describe_all(admin: Admin) -> tuple[dict[str, GroupDescription], int]:
    """The groups of the brokers that answer, and the exit code."""
    for _ in range(_LOOKS):
        try:
            listed, status = await answered_by_brokers(admin.list_groups())
            names = [each.group_id for each in listed if each.type.lower() in DESCRIBED_TYPES]
            return await admin.describe_groups(names), status
        except KafkaError as error:
            if error.code is not ErrorCode.GROUP_ID_NOT_FOUND:
                raise  # otherwise a group was deleted meanwhile: list and describe again
    raise KafkaError(ErrorCode.GROUP_ID_NOT_FOUND, "groups go faster than they can be described")


async def _look(
    admin: Admin, group: GroupDescription, room: asyncio.Semaphore, *, with_offsets: bool
) -> tuple[ShownGroup, int]:
    """The group, and the exit code: 1 where the leader of a partition has not answered."""
    if not with_offsets:
        return ShownGroup(group, {}, 0), 0
    assigned = groups_show.partitions_of(group)
    async with room:
        partitions = sorted({*assigned, *await admin.list_group_offsets(group.group_id)}) if assigned else None
        try:
            lags, status = await of_answering(partial(admin.group_lag, group.group_id, times=True), partitions)
        except PartitionErrors as error:  # none has answered; leaders of other groups' partitions may
            print_failures(error.errors)
            lags, status = {}, 1
    return ShownGroup(group, lags, time.time_ns() // 1_000_000), status


@command.command("remove-members")
@click.argument("group")
@click.option("--instance", "instances", multiple=True, metavar="ID", help="A static member, by group.instance.id.")
@click.option("--all", "everybody", is_flag=True, help="All members.")
@as_json
@connecting
def remove_members(
    bootstrap: str,
    properties: dict[str, str],
    group: str,
    instances: tuple[str, ...],
    everybody: bool,
    json_wanted: bool,
) -> int:
    """Take members out of GROUP.

    This is for static members, which otherwise leave only when their sessions end. A member whose process is alive may
    rejoin.

    \b
    Example:
      tidelog groups remove-members billing --instance worker-7
    """
    if bool(instances) == everybody:
        raise click.UsageError("give the instances of members with --instance, or --all")

    async def ask() -> dict[str, KafkaError | None]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            return await admin.remove_group_members(group, None if everybody else instances)

    outcome = run(ask())
    if json_wanted:
        print_json([{"member": member, "error": error and error.code.name} for member, error in outcome.items()])
    for member, error in outcome.items():
        if error is not None:
            fail(str(error))
        elif not json_wanted:
            echo(f"Removed {member}.")
    return 1 if any(outcome.values()) else 0


@command.command("delete")
@click.argument("groups", nargs=-1, required=True)
@as_json
@connecting
def delete(bootstrap: str, properties: dict[str, str], groups: tuple[str, ...], json_wanted: bool) -> int:
    """Delete the groups GROUPS.

    Their committed offsets are deleted too; a group with members stays.

    \b
    Example:
      tidelog groups delete billing-test
    """

    async def ask() -> dict[str, KafkaError | None]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            return await admin.delete_groups(groups)

    outcome = run(ask())
    if json_wanted:
        print_json([{"group": group, "error": error and error.code.name} for group, error in outcome.items()])
    for group, error in outcome.items():
        if error is not None:
            fail(str(error))
        elif not json_wanted:
            echo(f"Deleted group {group}.")
    return 1 if any(outcome.values()) else 0


@command.command("delete-offsets")
@click.argument("group")
@click.option("--topic", "scopes", multiple=True, required=True, metavar="TOPIC[:P,P]", help="What to forget.")
@as_json
@connecting
def delete_offsets(
    bootstrap: str, properties: dict[str, str], group: str, scopes: tuple[str, ...], json_wanted: bool
) -> int:
    """Delete committed offsets of GROUP.

    No member of the group may subscribe to the topics.

    \b
    Example:
      tidelog groups delete-offsets billing --topic orders:0,1 --topic refunds
    """

    async def ask() -> dict[TopicPartition, KafkaError | None]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            described = await admin.describe_topics([scope.partition(":")[0] for scope in scopes])
            counts = {name: len(topic.partitions) for name, topic in described.items()}
            try:
                partitions = chosen(scopes, counts)
            except ResetError as error:
                raise click.UsageError(str(error)) from None
            return await admin.delete_group_offsets(group, partitions)

    outcome = run(ask())
    if json_wanted:
        print_json(
            [
                {"topic": topic, "partition": number, "error": error and error.code.name}
                for (topic, number), error in sorted(outcome.items())
            ]
        )
    else:
        rows = [
            (topic, number, "forgotten" if error is None else error.code.name)
            for (topic, number), error in sorted(outcome.items())
        ]
        print_table(("TOPIC", "PARTITION", "STATUS"), rows)
    refused = [error for error in outcome.values() if error is not None]
    return fail(f"{as_count(refused, 'partition')} kept") if refused else 0
