"""`tidelog groups reset-offsets`: fetches the present offsets, computes new ones by `reset.py`, and commits them.

It commits only with --execute, and never for a group with members.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import click

from tidelog.cli.common import (
    IntegerRange,
    alternative,
    as_json,
    client_options,
    connecting,
    echo,
    fail,
    print_json,
    print_table,
    run,
    text_in,
)
from tidelog.cli.groups import reset as groups_reset
from tidelog.cli.groups.reset import Move, Offsets, ResetError
from tidelog.client import Admin, TopicPartition
from tidelog.client.groups.model import DESCRIBED_TYPES, EMPTY
from tidelog.protocol.errors import ErrorCode, KafkaError


class Target(NamedTuple):
    """The target of a reset; `value`: an offset, a number of records or a time in milliseconds."""

    kind: str
    value: int = 0


Moves = dict[TopicPartition, Move]


@click.command("reset-offsets")
@click.argument("groups", nargs=-1)
@click.option("--all-groups", is_flag=True, help="Every group of the cluster.")
@click.option("--topic", "scopes", multiple=True, metavar="TOPIC[:P,P]", help="Partitions of a topic, or all of them.")
@click.option("--all-topics", is_flag=True, help="Everything the group has committed.")
@alternative("--to-earliest", "kind", "earliest", "To the first record there is.")
@alternative("--to-latest", "kind", "latest", "Behind the last record.")
@alternative("--to-current", "kind", "current", "To what is committed; else behind the last record.")
@click.option("--to-offset", type=IntegerRange(0), metavar="OFFSET", help="To this offset.")
@click.option("--shift-by", type=int, metavar="N", help="N records on, or back if negative.")
@click.option("--to-datetime", metavar="TIME", help="To the first record from then on: YYYY-MM-DDTHH:MM:SS.sss, UTC.")
@click.option("--by-duration", metavar="DURATION", help="So long before now, such as PT30M or P1D.")
@click.option(
    "--from-file", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="As --export wrote it."
)
@click.option("--execute", is_flag=True, help="Do it. Otherwise it is only shown.")
@click.option("--dry-run", is_flag=True, help="Only show it, which is the default.")
@click.option("--export", is_flag=True, help="Print topic,partition,offset for --from-file.")
@as_json
@connecting
def reset_offsets(
    bootstrap: str,
    properties: dict[str, str],
    groups: tuple[str, ...],
    all_groups: bool,
    scopes: tuple[str, ...],
    all_topics: bool,
    kind: str | None,
    to_offset: int | None,
    shift_by: int | None,
    to_datetime: str | None,
    by_duration: str | None,
    file: Path | None,
    execute: bool,
    dry_run: bool,
    export: bool,
    json_wanted: bool,
) -> int:
    """Set the committed offsets of the groups GROUPS.

    The groups must have no members. An offset outside the log becomes the log's start or end.

    \b
    Example:
      tidelog groups reset-offsets billing --topic orders:0,1 --shift-by -100
      tidelog groups reset-offsets billing --all-topics --by-duration PT1H --execute
    """
    if bool(groups) == all_groups:
        raise click.UsageError("give the names of groups, or --all-groups")
    if execute and dry_run:
        raise click.UsageError("give --execute or --dry-run, not both")
    if sum((bool(scopes), all_topics, file is not None)) != 1:
        raise click.UsageError("give one of --topic, --all-topics, --from-file")
    try:
        target = _target(kind, to_offset, shift_by, to_datetime, by_duration, file)
        text = None if file is None else text_in(file)

        async def ask() -> tuple[dict[str, Moves], list[str]]:
            async with Admin(**client_options(bootstrap, properties)) as admin:
                names = list(groups) or await _groups_of_consumers(admin)
                reset = _Reset(admin, target, scopes)
                if text is not None:
                    reset.plans = groups_reset.plans_in(text, names)
                return await reset.all(names, execute), reset.refused

        moves, refused = run(ask())
    except ResetError as error:
        raise click.UsageError(str(error)) from None
    if moves or not refused:
        _show(moves, len(groups) != 1, export, json_wanted)
    for refusal in refused:
        fail(refusal)
    if not execute and any(moves.values()):
        click.echo("Nothing was changed; --execute does it.", err=True)
    return 1 if refused else 0


def _since(timestamp_ms: int) -> Target:
    """From this time on. A time before 1970 is the beginning: ListOffsets has other uses for negative numbers."""
    return Target("time", max(0, timestamp_ms))


def _target(
    kind: str | None,
    to_offset: int | None,
    shift_by: int | None,
    to_datetime: str | None,
    by_duration: str | None,
    file: Path | None,
) -> Target:
    targets = [] if kind is None else [Target(kind)]
    if to_offset is not None:
        targets.append(Target("offset", to_offset))
    if shift_by is not None:
        targets.append(Target("shift", shift_by))
    if to_datetime is not None:
        targets.append(_since(groups_reset.datetime_in(to_datetime)))
    if by_duration is not None:
        targets.append(_since(time.time_ns() // 1_000_000 - groups_reset.duration_in(by_duration)))
    if file is not None:
        targets.append(Target("file"))
    if len(targets) != 1:
        raise ResetError(
            "one of --to-earliest, --to-latest, --to-current, --to-offset, --shift-by, --to-datetime, --by-duration, "
            "--from-file is wanted"
        )
    return targets[0]


async def _groups_of_consumers(admin: Admin) -> list[str]:
    """For --all-groups, as in Kafka's tool: no share groups, and not the workers of Kafka Connect."""
    return [
        each.group_id
        for each in await admin.list_groups()
        if each.type.lower() in DESCRIBED_TYPES and each.protocol_type in ("", "consumer")
    ]


class _Reset:
    """`refused`: the reason by group that cannot be reset. `plans`: the offsets of a file."""

    def __init__(self, admin: Admin, target: Target, scopes: tuple[str, ...]) -> None:
        self._admin = admin
        self._target = target
        self._scopes = scopes
        self.plans: dict[str, Offsets] = {}
        self.refused: list[str] = []

    async def all(self, groups: Iterable[str], execute: bool) -> dict[str, Moves]:
        scoped: list[TopicPartition] | None = None
        if self._scopes:
            described = await self._admin.describe_topics([scope.partition(":")[0] for scope in self._scopes])
            scoped = groups_reset.chosen(
                self._scopes, {name: len(topic.partitions) for name, topic in described.items()}
            )
        moves: dict[str, Moves] = {}
        for group in groups:
            state = await self._state(group)
            if state != EMPTY:
                self.refused.append(
                    f"the offsets of group {group} can be reset while it has no members; it is {state} now"
                )
            elif self._target.kind == "file" and group not in self.plans:
                self.refused.append(f"the file has nothing for group {group}")
            else:
                moves[group] = await self._one(group, scoped)
        if execute:
            for group, planned in moves.items():
                await self._admin.alter_group_offsets(
                    group, {partition: move.new for partition, move in planned.items()}
                )
        return moves

    async def _state(self, group: str) -> str:
        try:
            return (await self._admin.describe_groups([group]))[group].state
        except KafkaError as error:
            if error.code is ErrorCode.GROUP_ID_NOT_FOUND:
                return EMPTY  # a new group starts with these offsets
            raise

    async def _one(self, group: str, scoped: list[TopicPartition] | None) -> Moves:
        committed_offsets = await self._admin.list_group_offsets(group)
        committed = {partition: offset.offset for partition, offset in committed_offsets.items()}
        partitions = scoped if scoped is not None else list(committed)
        if self._target.kind == "file":
            partitions = list(self.plans[group])
        offsets = await self._offsets(group, committed, partitions)
        return {partition: Move(committed.get(partition), offsets[partition]) for partition in sorted(offsets)}

    async def _offsets(
        self, group: str, committed: Mapping[TopicPartition, int], partitions: list[TopicPartition]
    ) -> Offsets:
        kind, value = self._target
        if kind in ("earliest", "latest"):
            return await self._ends(partitions, kind)
        if kind == "time":
            listed_offsets = await self._admin.list_offsets(dict.fromkeys(partitions, value))
            later = {partition: listed.offset for partition, listed in listed_offsets.items() if listed is not None}
            return later | await self._ends([each for each in partitions if each not in later], "latest")
        if kind == "current":
            kept = {partition: committed[partition] for partition in partitions if partition in committed}
            return kept | await self._ends([each for each in partitions if each not in kept], "latest")
        if kind == "shift":
            targets = groups_reset.shifted(committed, partitions, value)
        else:
            targets = self.plans[group] if kind == "file" else dict.fromkeys(partitions, value)
        starts, ends = await self._ends(partitions, "earliest"), await self._ends(partitions, "latest")
        offsets, warnings = groups_reset.within(targets, starts, ends)
        for warning in warnings:
            click.echo(warning, err=True)
        return offsets

    async def _ends(self, partitions: list[TopicPartition], which: str) -> Offsets:
        offsets = await self._admin.list_offsets(dict.fromkeys(partitions, which))
        return {partition: listed.offset for partition, listed in offsets.items() if listed is not None}


def _show(moves: Mapping[str, Moves], several: bool, export: bool, json_wanted: bool) -> None:
    rows = [
        (group, partition.topic, partition.partition, move.old, move.new)
        for group, planned in moves.items()
        for partition, move in planned.items()
    ]
    if json_wanted:
        keys = ("group", "topic", "partition", "old_offset", "new_offset")
        print_json([dict(zip(keys, row)) for row in rows])
    elif export:
        plans = {
            group: {partition: move.new for partition, move in planned.items()} for group, planned in moves.items()
        }
        echo(groups_reset.as_csv(plans, several), newline=False)
    else:
        header = ("GROUP", "TOPIC", "PARTITION", "OLD-OFFSET", "NEW-OFFSET")
        print_table(header, [(*row[:3], "-" if row[3] is None else row[3], row[4]) for row in rows])
