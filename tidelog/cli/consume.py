"""`tidelog consume`: print the records of a topic, by assignment or as a member of a group.

Records go to standard output as bytes, everything said about them to standard error. Ends by itself at
`--max-messages`, at `--until-end` or after `--timeout-ms` of silence, else by Ctrl-C, which is its normal end.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from tidelog.cli.common import HELP, client_options, connecting, run, say_count
from tidelog.cli.record_format import as_json, compile_template
from tidelog.client import Consumer, ConsumerRecord, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError

_POLL_MS = 200
_POLL_RECORDS = 2000


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to read and when to stop."""

    topic: str
    partition: int | None
    offset: str
    group: str | None
    max_messages: int | None
    until_end: bool
    timeout_ms: int | None


def _template(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> Callable[[ConsumerRecord], bytes]:
    try:
        return compile_template("{value}" if value is None else value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _offset(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and value not in ("earliest", "latest") and not value.removeprefix("-").isdecimal():
        raise click.BadParameter(f"{value!r} is neither earliest, latest nor a whole number")
    return value


@click.command("consume", context_settings=HELP)
@click.argument("topic")
@click.option("--from-beginning", is_flag=True, help="The same as --offset earliest.")
@click.option(
    "-o", "--offset", callback=_offset, help="earliest, latest (default), N, or -N for the last N of each partition."
)
@click.option("-p", "--partition", type=click.IntRange(0), help="Only this partition.")
@click.option("-g", "--group", help="Read as a member of this group and commit; the group's offsets come first.")
@click.option("-n", "--max-messages", type=click.IntRange(1), help="Stop after so many records.")
@click.option("-e", "--until-end", is_flag=True, help="Stop at the end that the topic had at the start.")
@click.option("--timeout-ms", type=click.IntRange(1), help="Stop when nothing has come for so long.")
@click.option("-f", "--format", "template", callback=_template, metavar="TEMPLATE", help="Such as '{key}\\t{value}'.")
@click.option("--json", "json_wanted", is_flag=True, help="One JSON object a record.")
@connecting
def command(
    topic: str,
    from_beginning: bool,
    offset: str | None,
    partition: int | None,
    group: str | None,
    max_messages: int | None,
    until_end: bool,
    timeout_ms: int | None,
    template: Callable[[ConsumerRecord], bytes],
    json_wanted: bool,
    bootstrap: str,
    properties: dict[str, str],
) -> None:
    """Print the records of TOPIC, a line each.

    A TEMPLATE may name {topic}, {partition}, {offset}, {timestamp}, {key}, {value} and {headers}.

    \b
    Examples:
      tidelog consume flights --from-beginning --max-messages 3
      tidelog consume flights -o earliest -e -f '{partition} {offset} {key}'
      tidelog consume flights -g delays --json
    """
    if from_beginning and offset not in (None, "earliest"):
        raise click.UsageError("--from-beginning and --offset contradict each other")
    start = offset or ("earliest" if from_beginning else "latest")
    if group is not None and (partition is not None or start not in ("earliest", "latest") or until_end):
        raise click.UsageError("a group shares out the partitions: --group takes no --partition, --until-end or number")
    wanted = Wanted(topic, partition, start, group, max_messages, until_end, timeout_ms)
    options = client_options(
        bootstrap,
        properties,
        group_id=group,
        auto_offset_reset=start if start == "latest" else "earliest",
        allow_auto_create_topics=False,
    )
    render = as_json if json_wanted else template
    count = run(_consume(options, wanted, render))
    say_count(count)


async def _consume(options: dict[str, Any], wanted: Wanted, render: Callable[[ConsumerRecord], bytes]) -> int:
    """Prints until told to stop; how many records."""
    told = asyncio.Event()
    async with Consumer(**options) as consumer:
        stops = await _prepare(consumer, wanted)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
        return await _print(consumer, wanted, render, stops, told)


async def _prepare(consumer: Consumer, wanted: Wanted) -> dict[TopicPartition, int]:
    """Subscribes or assigns and seeks; partition -> the offset to stop at, where one is known."""
    found = await consumer.partitions_for_topic(wanted.topic) or set()
    if wanted.partition is not None:
        found &= {wanted.partition}
    if not found:
        what = wanted.topic if wanted.partition is None else f"{wanted.topic}-{wanted.partition}"
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no {what}")
    if wanted.group is not None:
        consumer.subscribe([wanted.topic])
        return {}
    chosen = [TopicPartition(wanted.topic, number) for number in sorted(found)]
    consumer.assign(chosen)
    ends = await consumer.end_offsets(chosen)
    if wanted.offset == "earliest":
        await consumer.seek_to_beginning(*chosen)
    elif wanted.offset == "latest":
        for partition, end in ends.items():
            consumer.seek(partition, end)
    else:
        number = int(wanted.offset)
        begins = await consumer.beginning_offsets(chosen)
        for partition in chosen:
            offset = number if number >= 0 else ends[partition] + number
            consumer.seek(partition, min(max(begins[partition], offset), ends[partition]))
    return ends if wanted.until_end else {}


async def _print(
    consumer: Consumer,
    wanted: Wanted,
    render: Callable[[ConsumerRecord], bytes],
    stops: dict[TopicPartition, int],
    told: asyncio.Event,
) -> int:
    loop = asyncio.get_running_loop()
    output = sys.stdout.buffer
    count = 0
    last = loop.time()
    while not told.is_set():
        if wanted.until_end and all([await consumer.position(part) >= end for part, end in stops.items()]):
            break
        left = _POLL_RECORDS if wanted.max_messages is None else min(_POLL_RECORDS, wanted.max_messages - count)
        batches = await consumer.poll(timeout_ms=_POLL_MS, max_records=left)
        for partition, records in batches.items():
            stop = stops.get(partition)
            for record in records:
                if stop is None or record.offset < stop:
                    output.write(render(record))
                    count += 1
        if batches:
            output.flush()
            last = loop.time()
        elif wanted.timeout_ms is not None and loop.time() - last >= wanted.timeout_ms / 1000:
            break
        if wanted.max_messages is not None and count >= wanted.max_messages:
            break
    return count
