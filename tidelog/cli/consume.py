"""`tidelog consume`: print the records of topics, by assignment or as a member of a group.

Records go to standard output as bytes, messages to standard error. The command ends at `--max-messages`, `--until-end`
or `--until-time`, or after `--timeout-ms` without a record. Otherwise Ctrl-C ends it normally.
"""

from __future__ import annotations

import asyncio
import re
import select
import sys
import time
from dataclasses import dataclass
from typing import Any

import click

from tidelog.cli.common import (
    HELP,
    IntegerRange,
    call_at_end_signals,
    cannot_write,
    client_options,
    connecting,
    fail,
    run,
    say_count,
    time_in,
    warn_of_unreachable_brokers,
)
from tidelog.cli.record_format import FORMATS, Render, compile_template, json_writer
from tidelog.client import Consumer, ConsumerRecord, PartitionErrors, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError, join_some

_POLL_MS = 200
_POLL_RECORDS = 2000
_JOIN_MS = 10_000
"""The time that a group has to assign partitions. A new group waits for members for three of these seconds."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The records to read, and the conditions to stop."""

    topics: tuple[str, ...]
    pattern: str | None
    partition: int | None
    offset: str
    from_ms: int | None
    until_ms: int | None
    group: str | None
    max_messages: int | None
    until_end: bool
    timeout_ms: int | None


def _offset(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and value not in ("earliest", "latest") and not value.removeprefix("-").isdecimal():
        raise click.BadParameter(f"{value!r} is not earliest, latest or a whole number")
    return value


def _time(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    return None if value is None else time_in(value)


def _pattern(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        re.compile(value or "")
    except re.error as error:
        raise click.BadParameter(f"{value!r} is not a regular expression: {error}") from None
    return value


@click.command("consume", context_settings=HELP)
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--include", "pattern", callback=_pattern, metavar="PATTERN", help="Topics whose whole name matches it.")
@click.option("--from-beginning", is_flag=True, help="The same as --offset earliest.")
@click.option(
    "-o", "--offset", callback=_offset, help="earliest, latest (default), N, or -N for the last N of each partition."
)
@click.option("--from-time", "from_ms", callback=_time, metavar="TIME", help="From the first record at TIME or later.")
@click.option(
    "--until-time", "until_ms", callback=_time, metavar="TIME", help="Stop before the first at TIME or later."
)
@click.option("-p", "--partition", type=IntegerRange(0), help="Only this partition.")
@click.option("-g", "--group", help="Read as a member of this group and commit; the group's offsets come first.")
@click.option("-n", "--max-messages", type=IntegerRange(1), help="Stop after so many records.")
@click.option("-e", "--until-end", is_flag=True, help="Stop at the end that the topics had at the start.")
@click.option("--timeout-ms", type=IntegerRange(1), help="Stop when nothing has come for so long.")
@click.option("-f", "--format", "template", default="{value}", metavar="TEMPLATE", help="Such as '{key}\\t{value}'.")
@click.option("--key-format", type=click.Choice(FORMATS), default="text", show_default=True, help="How keys are shown.")
@click.option("--value-format", type=click.Choice(FORMATS), default="text", show_default=True, help="And values.")
@click.option(
    "--json", "json_wanted", is_flag=True, help="One JSON object a record; `tidelog produce -F json` reads it."
)
@connecting
def command(
    template: str, key_format: str, value_format: str, json_wanted: bool, bootstrap: str, properties: dict[str, str],
    **selected: Any,
) -> int:  # fmt: skip
    """Print the records of each TOPIC, a line each.

    A TEMPLATE may name {topic}, {partition}, {offset}, {timestamp}, {key}, {value} and {headers}. A TIME is ms since
    1970 or YYYY-MM-DDTHH:MM:SS, UTC by default; the command waits for an --until-time in the future. --include is
    matched with the topics at the start; in a group also with topics created later.

    \b
    Examples:
      tidelog consume flights --from-beginning --max-messages 3
      tidelog consume flights -o earliest -e -f '{partition} {offset} {key}'
      tidelog consume flights airlines --from-time 2026-03-01T12:00:00 --until-time 2026-03-01T13:00:00
      tidelog consume --include 'metrics\\..*' --value-format hex
      tidelog consume flights -g delays --json
    """
    selection = _selection(**selected)
    try:
        render = (
            json_writer(key_format, value_format)
            if json_wanted
            else compile_template(template, key_format, value_format)
        )
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--format") from None
    options = client_options(
        bootstrap,
        properties,
        group_id=selection.group,
        auto_offset_reset=selection.offset if selection.offset == "latest" else "earliest",
        allow_auto_create_topics=False,
    )
    if sys.stderr.isatty() and _waits_for_new_records(selection):
        click.echo("waiting for new records; --from-beginning prints those that there are, Ctrl-C ends", err=True)
    reading = run(_consume(options, selection, render))
    say_count(reading.count)
    if not reading.unread:
        return int(reading.has_left_out)
    return fail(f"without {join_some(reading.unread)}: {next(iter(reading.unread.values()))}")


def _selection(*, from_beginning: bool, offset: str | None, **selected: Any) -> Selection:
    """The selection of the options. Raises a usage error if they contradict each other."""
    if from_beginning and offset not in (None, "earliest"):
        raise click.UsageError("give --from-beginning or --offset, not both")
    start = offset or ("earliest" if from_beginning else "latest")
    chosen = Selection(offset=start, **selected)
    if bool(chosen.topics) == (chosen.pattern is not None):
        raise click.UsageError("give one or several TOPICs, or --include PATTERN")
    if chosen.from_ms is not None and (offset or from_beginning):
        raise click.UsageError("--from-time sets the start: it cannot be used with --offset or --from-beginning")
    if chosen.until_ms is not None and (chosen.until_end or (chosen.from_ms or 0) > chosen.until_ms):
        raise click.UsageError("--until-time must be later than --from-time, and cannot be used with --until-end")
    bounded = chosen.until_end or chosen.from_ms is not None or chosen.until_ms is not None
    if chosen.group is not None and (chosen.partition is not None or start not in ("earliest", "latest") or bounded):
        raise click.UsageError(
            "a group assigns the partitions: --group cannot be used with --partition, --until-end, a number or a time"
        )
    return chosen


def _waits_for_new_records(selection: Selection) -> bool:
    bounds = (selection.from_ms, selection.until_ms, selection.group)
    return selection.offset == "latest" and not selection.until_end and bounds == (None, None, None)


async def _consume(options: dict[str, Any], selection: Selection, render: Render) -> _Reading:
    """Print records until a condition or a signal to stop."""
    stopping = asyncio.Event()
    async with Consumer(**options) as consumer:
        reading = _Reading(consumer, selection)
        await reading.prepare()
        warn_of_unreachable_brokers()
        call_at_end_signals(stopping.set)
        await reading.print_all(render, stopping)
        return reading


class _Reading:
    """A consumer, and the offsets at which it stops (`_stops`, by partition).

    `unread` are the partitions that were awaited until the timeout and could not be read.
    """

    def __init__(self, consumer: Consumer, selection: Selection) -> None:
        self._consumer = consumer
        self._selection = selection
        self._stops: dict[TopicPartition, int] = {}
        self._waits_for_time = False
        self.count = 0
        self.has_left_out = False
        self._has_waited = False
        self.unread: dict[TopicPartition, KafkaError] = {}

    # --- start offsets

    async def prepare(self) -> None:
        """Subscribe, or assign and seek. Raises KafkaError(UNKNOWN_TOPIC_OR_PARTITION)."""
        consumer, selection = self._consumer, self._selection
        if selection.group is not None and selection.pattern is not None:
            consumer.subscribe(pattern=selection.pattern)
            return
        chosen = await self._partitions()
        if selection.group is not None:
            consumer.subscribe(selection.topics)
            return
        if not self._needs_offsets():
            consumer.assign(chosen)
            return
        ends = await self._end_offsets(chosen)
        consumer.assign(ends)
        await self._seek(list(ends), ends)

    def _needs_offsets(self) -> bool:
        """Whether the start or the stop needs an answer for every partition. Otherwise each partition begins where
        `auto_offset_reset` says as soon as it has a leader: one that is offline does not hold up the others.
        """
        selection = self._selection
        bounded = selection.until_end or selection.from_ms is not None or selection.until_ms is not None
        return bounded or selection.offset not in ("earliest", "latest")

    async def _end_offsets(self, chosen: list[TopicPartition]) -> dict[TopicPartition, int]:
        """The end offsets of the partitions whose leaders answer. The others are named at once and left out.

        Raises KafkaError if none answers.
        """
        try:
            return await self._consumer.end_offsets(chosen)
        except PartitionErrors as error:
            ends = {each: answer.offset for each, answer in error.answers.items() if answer is not None}
            if not ends:
                raise
            fail(f"without {join_some(error.errors)}: {next(iter(error.errors.values()))}")
            self.has_left_out = True
            return ends

    async def _partitions(self) -> list[TopicPartition]:
        selection = self._selection
        names = list(dict.fromkeys(selection.topics))
        if selection.pattern is not None:
            pattern = re.compile(selection.pattern)
            names = sorted(name for name in await self._consumer.topics() if pattern.fullmatch(name))
            if not names:
                raise KafkaError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic that matches {selection.pattern!r}"
                )
        chosen = []
        for name in names:
            numbers = await self._consumer.partitions_for_topic(name) or set()
            if selection.partition is not None:
                numbers &= {selection.partition}
            if not numbers and selection.pattern is None:
                what = name if selection.partition is None else f"{name}-{selection.partition}"
                raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no {what}")
            chosen += [TopicPartition(name, number) for number in sorted(numbers)]
        return chosen

    async def _seek(self, chosen: list[TopicPartition], ends: dict[TopicPartition, int]) -> None:
        consumer, selection = self._consumer, self._selection
        if selection.until_end:
            self._stops = ends
        if selection.until_ms is not None:
            await self._stop_at_time(chosen, selection.until_ms, ends)
        if selection.from_ms is not None:
            offsets = await consumer.offsets_for_times(dict.fromkeys(chosen, selection.from_ms))
            for partition in chosen:
                at = offsets.get(partition)
                consumer.seek(partition, ends[partition] if at is None else at.offset)
        elif selection.offset == "earliest" or (selection.offset == "latest" and self._is_past()):
            await consumer.seek_to_beginning(*chosen)
        elif selection.offset == "latest":
            for partition, end in ends.items():
                consumer.seek(partition, end)
        else:
            number = int(selection.offset)
            begins = await consumer.beginning_offsets(chosen)
            if beyond := sum(number > ends[partition] for partition in chosen):
                text = f"offset {number} is beyond the end of {beyond} partition(s): reading from the end"
                click.echo(text, err=True)
            for partition in chosen:
                offset = number if number >= 0 else ends[partition] + number
                consumer.seek(partition, min(max(begins[partition], offset), ends[partition]))

    def _is_past(self) -> bool:
        """Whether --until-time is in the past, so that records from now on are not selected."""
        return self._selection.until_ms is not None and not self._waits_for_time

    async def _stop_at_time(self, chosen: list[TopicPartition], until_ms: int, ends: dict[TopicPartition, int]) -> None:
        """Stop each partition at its first record of that time or later. A partition without such a record stops at its
        end if the time is past; otherwise it is read until that time.
        """
        offsets = await self._consumer.offsets_for_times(dict.fromkeys(chosen, until_ms))
        self._waits_for_time = until_ms > time.time() * 1000
        for partition in chosen:
            at = offsets.get(partition)
            if at is not None:
                self._stops[partition] = at.offset
            elif not self._waits_for_time:
                self._stops[partition] = ends[partition]

    #  stop conditions

    async def print_all(self, render: Render, stopping: asyncio.Event) -> None:
        loop, consumer, selection = asyncio.get_running_loop(), self._consumer, self._selection
        started = last = loop.time()
        while not stopping.is_set() and not await self._is_at_end():
            most = selection.max_messages
            left = _POLL_RECORDS if most is None else min(_POLL_RECORDS, most - self.count)
            batches = await consumer.poll(timeout_ms=_POLL_MS, max_records=left)
            if batches:
                await self._print(batches, render)
                last = loop.time()
            elif selection.group is not None and not consumer.assignment() and last < started + _JOIN_MS / 1000:
                last = loop.time()
            elif selection.timeout_ms is not None and loop.time() - last >= selection.timeout_ms / 1000:
                if not await self._is_worth_waiting(stopping):
                    break
                last = loop.time()
            if most is not None and self.count >= most:
                break

    async def _is_worth_waiting(self, stopping: asyncio.Event) -> bool:
        """Whether a partition that was not fetched so far can be by now. The first silence is not that of partitions
        whose leaders had not said where to begin. What has no such leader is `unread`.
        """
        consumer = self._consumer
        silent = sorted(each for each in consumer.assignment() if consumer.lag(each) is None)
        if self._has_waited or not silent:
            self.unread = {each: error for each, error in self.unread.items() if each in silent}
            return False
        self._has_waited = True

        async def look() -> list[int | BaseException]:
            return await asyncio.gather(*map(consumer.position, silent), return_exceptions=True)

        looking = asyncio.create_task(look())  # a task: asyncio reports a gather that is cancelled and not awaited
        stop = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait((looking, stop), return_when=asyncio.FIRST_COMPLETED)
            if not looking.done():
                return False
        finally:
            looking.cancel()
            stop.cancel()
        outcomes = looking.result()
        for partition, outcome in zip(silent, outcomes, strict=True):
            if isinstance(outcome, KafkaError):
                self.unread[partition] = outcome
        return len(self.unread) < len(silent)

    async def _print(self, batches: dict[TopicPartition, list[ConsumerRecord]], render: Render) -> None:
        """Write the records. A group commits as read only what was written: the others come again."""
        lines: list[bytes] = []
        size_bytes = 0
        try:
            for partition, records in batches.items():
                for record in records:
                    if self._is_wanted(partition, record.offset, record.timestamp_ms):
                        lines.append(render(record))
                        size_bytes += len(lines[-1])
                        self.count += 1
                    if size_bytes >= select.PIPE_BUF:
                        await _write(b"".join(lines))
                        lines, size_bytes = [], 0
            await _write(b"".join(lines))
        except OSError as error:
            for partition, records in batches.items():
                self._consumer.seek(partition, records[0].offset)
            if isinstance(error, BrokenPipeError):
                raise
            raise cannot_write(error) from None

    def _is_wanted(self, partition: TopicPartition, offset: int, timestamp_ms: int) -> bool:
        """Whether the record precedes the partition's stop. The first record at or after --until-time sets the stop."""
        until_ms = self._selection.until_ms
        if partition not in self._stops and until_ms is not None and timestamp_ms >= until_ms:
            self._stops[partition] = offset
        stop = self._stops.get(partition)
        return stop is None or offset < stop

    async def _is_at_end(self) -> bool:
        consumer, selection = self._consumer, self._selection
        if not selection.until_end and selection.until_ms is None:
            return False
        if selection.until_ms is not None and self._waits_for_time and selection.until_ms <= time.time() * 1000:
            self._waits_for_time = False
            ends = await consumer.end_offsets(consumer.assignment())
            self._stops = {**ends, **self._stops}
        if self._waits_for_time and len(self._stops) < len(consumer.assignment()):
            return False
        return all([await consumer.position(partition) >= stop for partition, stop in self._stops.items()])


async def _write(data: bytes) -> None:
    """Write to standard output, a piece at a time that a pipe takes at once."""
    if sys.stdout.isatty():  # one that is writable may take less, and wait for its window
        await asyncio.to_thread(_write_at_once, data)
        return
    for start in range(0, len(data), select.PIPE_BUF):
        await _output_is_writable()
        _write_at_once(data[start : start + select.PIPE_BUF])


def _write_at_once(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


async def _output_is_writable() -> None:
    """Wait for a slow reader, as a pager is, on the loop: a group hears of its member meanwhile."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # no file: what captures the output
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if poll.poll(0):
        return
    loop = asyncio.get_running_loop()
    writable = asyncio.Event()
    loop.add_writer(descriptor, writable.set)
    try:
        await writable.wait()
    finally:
        loop.remove_writer(descriptor)
