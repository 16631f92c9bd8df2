"""`tidelog produce`: every line of standard input becomes a record.

Lines are bytes and are sent as they are, without their newline. Reading stands still while the producer's buffer is
full, so any amount can be piped in. The first record that is refused ends the command with exit code 1.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import click

from tidelog.cli.common import (
    HELP,
    PATIENCE_MS,
    client_options,
    connecting,
    key_values,
    print_json,
    run,
    say_count,
)
from tidelog.client import Producer, RecordMetadata
from tidelog.protocol.batches.compression import CODECS

_READ_BYTES = 1 << 16
_LINE_BYTES_MAX = 1 << 27
_SETTLE_ABOVE = 1000


@click.command("produce", context_settings=HELP)
@click.argument("topic")
@click.option("-k", "--key-separator", metavar="TEXT", help="What stands before it in a line is the key.")
@click.option("-p", "--partition", type=click.IntRange(0), help="Send everything to this partition.")
@click.option("-H", "--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header for every record.")
@click.option("--null", "null_marker", metavar="TEXT", help="A key or value that is exactly this is sent as null.")
@click.option("-z", "--compression", type=click.Choice(list(CODECS)), default="none", show_default=True)
@click.option("--acks", type=click.Choice(["all", "1", "0"]), default="all", show_default=True)
@click.option("-q", "--quiet", is_flag=True, help="Do not say how many records were sent.")
@click.option("--json", "json_wanted", is_flag=True, help="Print JSON: how many records went to which offsets.")
@connecting
def command(
    topic: str,
    key_separator: str | None,
    partition: int | None,
    headers: tuple[str, ...],
    null_marker: str | None,
    compression: str,
    acks: str,
    quiet: bool,
    json_wanted: bool,
    bootstrap: str,
    properties: dict[str, str],
) -> None:
    """Send each line of standard input to TOPIC.

    \b
    Examples:
      echo hello | tidelog produce greetings
      printf 'DL:Delta\\nUA:United\\n' | tidelog produce airlines -k : -z zstd
    """
    if key_separator == "":
        raise click.UsageError("--key-separator is empty")
    shape = Shape(key_separator, null_marker, headers)
    options = client_options(bootstrap, properties, compression_type=compression, acks=acks, max_block_ms=PATIENCE_MS)
    # The first failure is what this command ends with; there is no need to hear of every batch behind it.
    logging.getLogger("tidelog.client.producing.sender").addHandler(logging.NullHandler())
    sent = run(_produce(options, topic, partition, shape))
    if json_wanted:
        print_json({"topic": topic, "records": sent.count, "partitions": sent.partitions()})
    elif not quiet:
        say_count(sent.count)


class Sent:
    """What was acknowledged."""

    def __init__(self) -> None:
        self.count = 0
        self._offsets: dict[int, tuple[int, int]] = {}

    def add(self, metadata: RecordMetadata) -> None:
        self.count += 1
        first, last = self._offsets.get(metadata.partition, (metadata.offset, metadata.offset))
        self._offsets[metadata.partition] = min(first, metadata.offset), max(last, metadata.offset)

    def partitions(self) -> list[dict[str, int | None]]:
        """The first and last offset in each; None with acks=0, where nothing is said of them."""
        return [
            {
                "partition": partition,
                "first_offset": first if first >= 0 else None,
                "last_offset": last if last >= 0 else None,
            }
            for partition, (first, last) in sorted(self._offsets.items())
        ]


class Shape:
    """How a line becomes a key and a value."""

    def __init__(self, key_separator: str | None, null_marker: str | None, headers: tuple[str, ...]) -> None:
        self._separator = key_separator.encode() if key_separator is not None else None
        self._null = null_marker.encode() if null_marker is not None else None
        self.headers = [(name, text.encode()) for name, text in key_values(headers).items()]

    def split(self, line: bytes) -> tuple[bytes | None, bytes | None]:
        """(key, value); without a separator in a line that should have one, a usage error."""
        if self._separator is None:
            return None, self._or_null(line)
        key, separator, value = line.partition(self._separator)
        if not separator:
            shown = line[:60].decode(errors="replace")
            raise click.ClickException(f"no key separator {self._separator.decode()!r} in the line {shown!r}")
        return self._or_null(key), self._or_null(value)

    def _or_null(self, data: bytes) -> bytes | None:
        return None if data == self._null else data


async def _produce(options: dict[str, Any], topic: str, partition: int | None, shape: Shape) -> Sent:
    """Sends until the input ends; what was acknowledged."""
    pending: deque[asyncio.Future[RecordMetadata]] = deque()
    sent = Sent()
    async with Producer(**options) as producer:
        async for line in _lines(sys.stdin.fileno()):
            key, value = shape.split(line)
            pending.append(await producer.send(topic, value, key, partition=partition, headers=shape.headers))
            while pending and (pending[0].done() or len(pending) > _SETTLE_ABOVE):
                sent.add(await pending.popleft())
        await producer.flush()
        for future in pending:
            sent.add(await future)
    return sent


async def _lines(descriptor: int) -> AsyncIterator[bytes]:
    """Lines as they come: what is there is taken at once, so that typing by hand works as well as a pipe."""
    begun: list[bytes] = []  # the pieces of a line whose end has not come yet
    while chunk := await _read(descriptor):
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
    if begun:
        yield b"".join(begun)


async def _read(descriptor: int) -> bytes:
    """The next bytes, empty at the end. Not in a thread: one that reads a terminal would hold up Ctrl-C."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(descriptor, readable.set)
    except PermissionError:  # a file, always ready
        await asyncio.sleep(0)
        return os.read(descriptor, _READ_BYTES)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
    return os.read(descriptor, _READ_BYTES)
