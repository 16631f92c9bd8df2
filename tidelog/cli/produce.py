"""`tidelog produce`: sends every line of standard input as a record.

A line is sent as its bytes without the newline, or is a JSON object as printed by `tidelog consume --json`. The command
reads no input while the producer's buffer is full, so any amount can be piped in. The first refused record ends the
command with exit code 1, and an error that names its line. A signal ends the input: the lines that have been read are
sent and counted, and the exit code is 1, because the input may have had more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import click

from tidelog.cli.common import (
    HELP,
    PATIENCE_MS,
    IntegerRange,
    call_at_end_signals,
    client_options,
    connecting,
    print_json,
    reason,
    run,
    say_count,
    warn_of_unreachable_brokers,
)
from tidelog.cli.record_format import FORMATS, ParsedRecord, decode, from_json
from tidelog.client import Producer, RecordMetadata, TopicPartition
from tidelog.protocol.batches.compression import CODECS
from tidelog.protocol.errors import ErrorCode, KafkaError

_READ_BYTES = 1 << 16
_LINE_BYTES_MAX = 1 << 27
_SETTLE_ABOVE = 1000
# A user waits at the terminal. A cluster that lives elects another leader sooner than a record's time is over.
_TIMEOUTS = {"max_block_ms": PATIENCE_MS, "request_timeout_ms": 10_000, "delivery_timeout_ms": 30_000}


@click.command("produce", context_settings=HELP)
@click.argument("topic", required=False)
@click.option(
    "-F",
    "--input-format",
    type=click.Choice(["lines", "json"]),
    default="lines",
    show_default=True,
    help="json: objects as `tidelog consume --json` prints them.",
)
@click.option("-k", "--key-separator", metavar="TEXT", help="What stands before it in a line is the key.")
@click.option("-p", "--partition", type=IntegerRange(0), help="Send everything to this partition.")
@click.option("-H", "--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header for every record.")
@click.option("--repartition", is_flag=True, help="Choose partitions anew, whatever a JSON object says.")
@click.option(
    "--key-format", type=click.Choice(FORMATS), default="text", show_default=True, help="How keys are written."
)
@click.option("--value-format", type=click.Choice(FORMATS), default="text", show_default=True, help="And values.")
@click.option("--null", "null_marker", metavar="TEXT", help="A key or value that is exactly this is sent as null.")
@click.option("-z", "--compression", type=click.Choice(list(CODECS)), default="none", show_default=True)
@click.option("--acks", type=click.Choice(["all", "1", "0"]), default="all", show_default=True)
@click.option("-q", "--quiet", is_flag=True, help="Do not say how many records were sent.")
@click.option("--json", "json_wanted", is_flag=True, help="Print JSON: how many records went to which offsets.")
@connecting
def command(
    topic: str | None, partition: int | None, repartition: bool, compression: str, acks: str, quiet: bool,
    json_wanted: bool, bootstrap: str, properties: dict[str, str], **shape: Any,
) -> None:  # fmt: skip
    """Send each line of standard input to TOPIC.

    With --input-format json a line is an object with value or value_base64, value_hex or value_json, the same for key,
    and topic, partition, timestamp_ms and headers. TOPIC, --partition and --repartition override those of the object.

    \b
    Examples:
      echo hello | tidelog produce greetings
      printf 'DL:Delta\\nUA:United\\n' | tidelog produce airlines -k : -z zstd
      tidelog consume flights -o earliest -e --json | tidelog produce copy -F json
    """
    if repartition and partition is not None:
        raise click.UsageError("give --partition or --repartition, not both")
    target = Target(topic, partition, repartition)
    parse = _parser(target, **shape)
    options = client_options(bootstrap, properties, compression_type=compression, acks=acks, **_TIMEOUTS)
    # The command ends with its first failure, so the failures of later batches need no log lines.
    logging.getLogger("tidelog.client.producing.sender").addHandler(logging.NullHandler())
    warn_of_unreachable_brokers()
    if sys.stdin.isatty() and sys.stderr.isatty():
        click.echo("each line is a record; Ctrl-D ends", err=True)
    sent = run(_produce(options, target, parse))
    if json_wanted:
        topics = {"topic": topic} if topic is not None else {"topics": sent.topics()}
        print_json({**topics, "records": sent.count, "partitions": sent.partitions()})
    elif not quiet:
        say_count(sent.count)
    if sent.is_interrupted:
        raise click.ClickException("interrupted")


class SentRecords:
    """The acknowledged records. `is_interrupted`: a signal has ended the input."""

    def __init__(self) -> None:
        self.count = 0
        self.is_interrupted = False
        self._offsets: dict[TopicPartition, tuple[int, int]] = {}

    def add(self, metadata: RecordMetadata) -> None:
        self.count += 1
        partition = TopicPartition(metadata.topic, metadata.partition)
        first, last = self._offsets.get(partition, (metadata.offset, metadata.offset))
        self._offsets[partition] = min(first, metadata.offset), max(last, metadata.offset)

    def topics(self) -> list[str]:
        return sorted({partition.topic for partition in self._offsets})

    def partitions(self) -> list[dict[str, str | int | None]]:
        """The first and last offset per partition; None with acks=0, because no answer has them."""
        return [
            {
                "topic": partition.topic,
                "partition": partition.partition,
                "first_offset": first if first >= 0 else None,
                "last_offset": last if last >= 0 else None,
            }
            for partition, (first, last) in sorted(self._offsets.items())
        ]


class Target(NamedTuple):
    """The topic and partition of the options, which take precedence over those of a JSON record."""

    topic: str | None
    partition: int | None
    is_repartitioned: bool


def _parser(
    target: Target, input_format: str, key_separator: str | None, null_marker: str | None, **how: Any
) -> Callable[[bytes], ParsedRecord]:
    """The function from a line to a record, which raises ValueError. Raises a usage error."""
    shape = Shape(key_separator, null_marker, **how)
    if input_format == "lines":
        if key_separator == "":
            raise click.UsageError("--key-separator is empty")
        if target.topic is None:
            raise click.UsageError("Missing argument 'TOPIC'.")
        return shape.parse
    if (
        key_separator is not None
        or null_marker is not None
        or (how["key_format"], how["value_format"]) != ("text",) * 2
    ):
        raise click.UsageError(
            "JSON objects contain their keys: --key-separator, --null, --key-format and --value-format cannot be used"
        )

    def parse(line: bytes) -> ParsedRecord:
        record = from_json(line)
        if record.topic is None and target.topic is None:
            raise ValueError("no topic in it, and no TOPIC given")
        return record._replace(headers=record.headers + shape.headers)

    return parse


class Shape:
    """The conversion of a line to a key and a value."""

    def __init__(
        self,
        key_separator: str | None,
        null_marker: str | None,
        headers: tuple[str, ...],
        key_format: str = "text",
        value_format: str = "text",
    ) -> None:
        self._key_format, self._value_format = key_format, value_format
        # Bytes of the command line that are no text in the locale come back as they were written.
        self._separator = os.fsencode(key_separator) if key_separator is not None else None
        self._null = os.fsencode(null_marker) if null_marker is not None else None
        self.headers = [_header(text) for text in headers]

    def parse(self, line: bytes) -> ParsedRecord:
        """Raises ValueError for a key or value that does not have its format."""
        key, value = self.split(line)
        if key is not None:
            key = decode(key, self._key_format)
        if value is not None:
            value = decode(value, self._value_format)
        return ParsedRecord(None, None, None, key, value, self.headers)

    def split(self, line: bytes) -> tuple[bytes | None, bytes | None]:
        """(key, value). Raises ValueError for a line without the separator."""
        if self._separator is None:
            return None, self._or_null(line)
        key, separator, value = line.partition(self._separator)
        if not separator:
            shown = line[:60].decode(errors="replace")
            raise ValueError(f"no key separator {self._separator.decode(errors='replace')!r} in {shown!r}")
        return self._or_null(key), self._or_null(value)

    def _or_null(self, data: bytes) -> bytes | None:
        return None if data == self._null else data


def _header(text: str) -> tuple[str, bytes | None]:
    """`name=value`; a name may come several times. Raises a usage error."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--header")
    try:
        return os.fsencode(name.strip()).decode(), os.fsencode(value)
    except UnicodeDecodeError:
        raise click.BadParameter(f"the header name {name!r} is not UTF-8", param_hint="--header") from None


async def _produce(options: dict[str, Any], target: Target, parse: Callable[[bytes], ParsedRecord]) -> SentRecords:
    """Send records until the input ends. Returns the acknowledged records. An error names its line."""
    pending: deque[asyncio.Future[RecordMetadata]] = deque()
    sent = SentRecords()
    refusal: click.ClickException | None = None
    async with Producer(**options) as producer:
        number = 0
        standard_input = _Input(sys.stdin.fileno())
        call_at_end_signals(standard_input.stop)
        try:
            async for line in standard_input.lines():
                number += 1
                try:
                    record = parse(line)
                except ValueError as error:
                    raise click.ClickException(f"line {number}: {error}") from None
                pending.append(await _send(producer, target, record, number))
                while pending and pending[0].done():
                    await _settle(pending.popleft(), sent)
                if len(pending) > _SETTLE_ABOVE:
                    # Until the first one has its outcome no line comes that a batch could linger for.
                    flushing = asyncio.ensure_future(producer.flush())
                    try:
                        await _settle(pending.popleft(), sent)
                    finally:
                        flushing.cancel()
        except click.ClickException as error:
            refusal = error  # it may not hide that a line before it is not delivered
        await producer.flush()
        for future in pending:
            await _settle(future, sent)
    if refusal is not None:
        raise refusal
    sent.is_interrupted = standard_input.is_stopped
    return sent


async def _settle(future: asyncio.Future[RecordMetadata], sent: SentRecords) -> None:
    """Wait for the first record without an outcome. Lines are settled in their order: all before it are in the log.

    The fault may be in a later line: a broker refuses a batch as a whole.
    """
    try:
        sent.add(await future)
    except KafkaError as error:
        raise _placed(error, f"from line {sent.count + 1} on") from None


def _placed(error: KafkaError, place: str) -> KafkaError:
    return KafkaError(error.code, f"{place}: {error.message}" if error.message else place)


async def _send(
    producer: Producer, target: Target, record: ParsedRecord, number: int
) -> asyncio.Future[RecordMetadata]:
    partition = None if target.is_repartitioned else record.partition
    try:
        return await producer.send(
            target.topic or record.topic or "",
            record.value,
            record.key,
            headers=record.headers,
            partition=partition if target.partition is None else target.partition,
            timestamp_ms=record.timestamp_ms,
        )
    except KafkaError as error:
        if error.code is ErrorCode.NETWORK_EXCEPTION:  # not of this record: there is no cluster
            raise
        raise click.ClickException(str(_placed(error, f"line {number}"))) from None


class _Input:
    """The lines of a descriptor, until its end or a signal (`is_stopped`)."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._readable = asyncio.Event()
        self.is_stopped = False

    def stop(self) -> None:
        self.is_stopped = True
        self._readable.set()

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield each line as soon as it is complete, so that typed input works as well as a pipe."""
        begun: list[bytes] = []  # the pieces of an incomplete line
        while not self.is_stopped and (chunk := await self._read()):
            first, newline, after = chunk.partition(b"\n")
            begun.append(first)
            if not newline:
                if len(begun) * _READ_BYTES > _LINE_BYTES_MAX:
                    raise click.ClickException(f"a line of more than {_LINE_BYTES_MAX >> 20} MiB")
                continue
            yield b"".join(begun)
            *lines, rest = after.split(b"\n")
            for line in lines:
                yield line
            begun = [rest] if rest else []
        if begun and not self.is_stopped:
            yield b"".join(begun)

    async def _read(self) -> bytes:
        """The next bytes, empty at the end. Uses no thread: one that reads a terminal delays a signal."""
        loop = asyncio.get_running_loop()
        self._readable.clear()
        try:
            loop.add_reader(self._descriptor, self._readable.set)
        except PermissionError:  # a file, always ready
            await asyncio.sleep(0)
        else:
            try:
                await self._readable.wait()
            finally:
                loop.remove_reader(self._descriptor)
        if self.is_stopped:
            return b""
        try:
            return os.read(self._descriptor, _READ_BYTES)
        except OSError as error:
            raise click.ClickException(f"cannot read standard input: {reason(error)}") from None
