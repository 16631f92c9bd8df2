"""`tidelog topics offsets` and `tidelog topics delete-records`: the first and last offsets of a topic's logs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from tidelog.cli.common import (
    HELP,
    IntegerRange,
    as_json,
    as_time,
    client_options,
    connecting,
    fail,
    print_json,
    print_table,
    run,
    text_in,
    time_in,
)
from tidelog.client import Admin, OffsetAndTimestamp, PartitionErrors, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError, join_some

Answer = TypeVar("Answer")

_TIMES = {"earliest": "earliest", "latest": "latest", "max-timestamp": "max_timestamp"}
_ELECTION_S = 1.0
_NUMBERS = {"-1": "latest", "-2": "earliest", "-3": "max_timestamp"}  # the values of Kafka's tool


def _time(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value in _TIMES:
        return None if value is None else _TIMES[value]
    if value in _NUMBERS:
        return _NUMBERS[value]
    return time_in(value)


@click.command("offsets", context_settings=HELP)
@click.argument("names", nargs=-1, required=True)
@click.option("-p", "--partition", "numbers", type=IntegerRange(0), multiple=True, help="Only this partition.")
@click.option(
    "--time",
    "at",
    callback=_time,
    metavar="TIME",
    help="The first offset from then on: earliest, latest, max-timestamp, ms since 1970, or 2026-03-01T12:00:00 (UTC).",
)
@as_json
@connecting
def offsets(
    names: tuple[str, ...],
    numbers: tuple[int, ...],
    at: int | str | None,
    bootstrap: str,
    properties: dict[str, str],
    json_wanted: bool,
) -> int:
    """Print the first and the next offset of each partition of the topics NAMES, or the offsets at a time.

    Between them there may be fewer records than offsets: compaction takes some away.

    \b
    Examples:
      tidelog topics offsets flights
      tidelog topics offsets flights --time 2026-03-01T12:00:00
    """

    async def ask() -> tuple[list[dict[str, Any]], list[TopicPartition], bool]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            partitions, leaderless = await led_partitions(admin, names, numbers)
            if at is not None:
                rows = _at_time(await answered(admin.list_offsets(dict.fromkeys(partitions, at))))
            else:
                rows = [
                    {"topic": partition.topic, "partition": partition.partition, "earliest": first, "latest": end}
                    for partition, (first, end) in (await bounds_of(admin, partitions)).items()
                ]
            return rows, leaderless, len(rows) == len(partitions)

    rows, leaderless, is_whole = run(ask())
    if json_wanted:
        print_json(rows)
    elif at is None:
        cells = [(*row.values(), row["latest"] - row["earliest"]) for row in rows]
        print_table(("TOPIC", "PARTITION", "EARLIEST", "LATEST", "OFFSETS"), cells)
    else:
        cells = [
            (row["topic"], row["partition"], "-" if row["offset"] is None else row["offset"])
            + (as_time(-1 if row["timestamp_ms"] is None else row["timestamp_ms"]),)
            for row in rows
        ]
        print_table(("TOPIC", "PARTITION", "OFFSET", "TIMESTAMP"), cells)
    return left_out(leaderless) or int(not is_whole)


def _at_time(answers: Mapping[TopicPartition, OffsetAndTimestamp | None]) -> list[dict[str, Any]]:
    """The rows of the answers. The offset is None if no record has that time or a later one."""
    return [
        {
            "topic": partition.topic,
            "partition": partition.partition,
            "offset": None if answer is None else answer.offset,
            "timestamp_ms": None if answer is None or answer.timestamp_ms < 0 else answer.timestamp_ms,
        }
        for partition, answer in sorted(answers.items())
    ]


async def led_partitions(
    admin: Admin, names: tuple[str, ...], numbers: tuple[int, ...]
) -> tuple[list[TopicPartition], list[TopicPartition]]:
    """The partitions of these topics, of all topics without names: those with a leader, and those without.

    An election that is under way has a second to end. Raises KafkaError.
    """
    leaders = await _leaders(admin, names, numbers)
    if None in leaders.values():
        await asyncio.sleep(_ELECTION_S)
        leaders = await _leaders(admin, names, numbers)
    leaderless = [partition for partition, leader in leaders.items() if leader is None]
    return [partition for partition, leader in leaders.items() if leader is not None], leaderless


async def _leaders(admin: Admin, names: tuple[str, ...], numbers: tuple[int, ...]) -> dict[TopicPartition, int | None]:
    topics = await admin.describe_topics(names or None)
    leaders: dict[TopicPartition, int | None] = {}
    for name in dict.fromkeys(names or sorted(topics)):
        known = {each.partition: each.leader for each in topics[name].partitions}
        for number in numbers or known:
            if number not in known:
                raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no {name}-{number}")
            leaders[TopicPartition(name, number)] = known[number]
    return leaders


def left_out(leaderless: list[TopicPartition]) -> int:
    """Print which partitions have no leader, which alone could answer. Returns the exit code of the command."""
    if not leaderless:
        return 0
    problem = f"without {join_some(leaderless)}: no leader, see `tidelog topics describe --unavailable`"
    return fail(str(KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, problem)))


async def bounds_of(admin: Admin, partitions: list[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
    """The log start offset and the end offset of each partition whose leader answers."""
    first = await answered(admin.list_offsets(dict.fromkeys(partitions, "earliest")))
    end = await answered(admin.list_offsets(dict.fromkeys(first, "latest")))

    def offset(answer: OffsetAndTimestamp | None) -> int:
        return 0 if answer is None else answer.offset

    return {
        partition: (offset(first[partition]), offset(end[partition])) for partition in partitions if partition in end
    }


def _as_it_is(error: KafkaError) -> KafkaError:
    return error


async def answered(
    asking: Awaitable[dict[TopicPartition, Answer]], explained: Callable[[KafkaError], KafkaError] = _as_it_is
) -> Mapping[TopicPartition, Answer]:
    """The results of the partitions whose leaders answer. Prints what the others have failed with.

    Raises KafkaError if none answers.
    """
    try:
        return await asking
    except PartitionErrors as error:
        if not error.answers:
            raise explained(error) from None
        print_failures({each: explained(problem) for each, problem in error.errors.items()})
        return error.answers


def print_failures(errors: Mapping[TopicPartition, KafkaError]) -> None:
    """Print a line for the partitions that have failed in the same way: a broker that is down leads many."""
    alike: dict[str, list[TopicPartition]] = {}
    for partition, problem in sorted(errors.items()):
        alike.setdefault(str(problem).replace(str(partition), "\0"), []).append(partition)
    for text, (first, *others) in alike.items():
        names = f"also {join_some(others)}" if "\0" in text else join_some([first, *others])
        fail(f"{errors[first]} ({names})" if others or "\0" not in text else str(errors[first]))


async def of_answering(
    find: Callable[[list[TopicPartition] | None], Awaitable[Answer]], partitions: list[TopicPartition] | None
) -> tuple[Answer, int]:
    """The outcome for the partitions whose leaders answer, and the exit code. Prints what the others have failed with.

    Raises KafkaError if none answers.
    """
    try:
        return await find(partitions), 0
    except PartitionErrors as error:
        if not error.answers:
            raise
        print_failures(error.errors)
        return await find(list(error.answers)), 1


@click.command("delete-records", context_settings=HELP)
@click.argument("name", required=False)
@click.option("-p", "--partition", "numbers", type=IntegerRange(0), multiple=True, help="Only this partition.")
@click.option("--before-offset", type=IntegerRange(0), metavar="N", help="What is before this offset.")
@click.option(
    "--before-time",
    "before_ms",
    metavar="TIME",
    callback=lambda context, parameter, value: None if value is None else time_in(value),
    help="What is before the first record from then on, as `offsets` says.",
)
@click.option("--all", "everything", is_flag=True, help="All records that there are now.")
@click.option(
    "--offset-json-file",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Offsets as Kafka\'s tool reads them: {"partitions":[{"topic":"t","partition":0,"offset":9}],"version":1}.',
)
@as_json
@connecting
def delete_records(
    name: str | None,
    numbers: tuple[int, ...],
    before_offset: int | None,
    before_ms: int | None,
    everything: bool,
    file: Path | None,
    bootstrap: str,
    properties: dict[str, str],
    json_wanted: bool,
) -> int:
    """Delete the records at the beginning of the partitions of the topic NAME. They are gone for every reader.

    \b
    Examples:
      tidelog topics delete-records flights --partition 0 --before-offset 1000
      tidelog topics delete-records flights --before-time 2026-03-01T00:00:00
      tidelog topics delete-records --offset-json-file plan.json
    """
    kinds = (before_offset is not None, before_ms is not None, everything, file is not None)
    if kinds.count(True) != 1 or (file is None) == (name is None) or (file is not None and numbers):
        raise click.UsageError(
            "give NAME with one of --before-offset, --before-time or --all, or --offset-json-file alone"
        )
    planned = {} if file is None else _read(file)

    async def targets(admin: Admin) -> tuple[dict[TopicPartition, int], list[TopicPartition]]:
        partitions, leaderless = await led_partitions(
            admin, (name,) if name else tuple(of for of, _ in planned), numbers
        )
        if planned:
            leaderless = [each for each in leaderless if each in planned]
            return {each: offset for each, offset in planned.items() if each not in leaderless}, leaderless
        return dict.fromkeys(partitions, -1 if everything else before_offset or 0), leaderless

    async def ask() -> tuple[Mapping[TopicPartition, int], list[TopicPartition], bool]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            offsets, leaderless = await targets(admin)
            count = len(offsets)
            if before_ms is not None:
                firsts = await answered(admin.list_offsets(dict.fromkeys(offsets, before_ms)))
                offsets = {each: -1 if at is None else at.offset for each, at in firsts.items()}
            low_watermarks = await answered(admin.delete_records(offsets), _explained)
            return low_watermarks, leaderless, len(low_watermarks) == count

    low_watermarks, leaderless, is_whole = run(ask())
    left = sorted(low_watermarks.items())
    if json_wanted:
        print_json([{"topic": topic, "partition": number, "low_watermark": offset} for (topic, number), offset in left])
    else:
        print_table(("TOPIC", "PARTITION", "EARLIEST"), [(*partition, offset) for partition, offset in left])
    return left_out(leaderless) or int(not is_whole)


def _explained(error: KafkaError) -> KafkaError:
    if error.code is not ErrorCode.OFFSET_OUT_OF_RANGE:
        return error
    return KafkaError(error.code, f"{error.message} ends before that offset: see `tidelog topics offsets`")


def _read(path: Path) -> dict[TopicPartition, int]:
    try:
        rows = json.loads(text_in(path))["partitions"]
        offsets = {TopicPartition(str(row["topic"]), int(row["partition"])): int(row["offset"]) for row in rows}
    except (ValueError, RecursionError, KeyError, TypeError):
        form = '{"partitions":[{"topic":"t","partition":0,"offset":9}],"version":1}'
        raise click.ClickException(f"{path}: expected {form}") from None
    if not offsets or len(offsets) != len(rows):
        raise click.ClickException(
            f"{path}: {'it names no partition' if not offsets else 'it names a partition twice'}"
        )
    return offsets
