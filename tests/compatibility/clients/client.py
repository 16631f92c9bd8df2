"""A stock client in a process of its own, asked by JSON lines: what all adapters share on the side of the tests."""

from __future__ import annotations

import base64
import json
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tests.patience import PATIENCE_S, join

ROOT = Path(__file__).resolve().parents[3]
# Starting a JVM on two busy cores is the slowest of what is asked.
WAIT_S = 90.0


class ClientFailed(Exception):
    """The client could not do it; the message is its own."""


class Record(NamedTuple):
    """A record as a client wrote or read it; `offset` is of no meaning to one that is written."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp: int | None = None
    partition: int = 0
    offset: int = -1


class Client:
    """`ask("produce", ...)` and its likes; the names are the methods of the adapters."""

    def __init__(self, name: str, command: Sequence[str], bootstrap: str, log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                [*command, bootstrap],
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    def ask(self, what: str, **arguments: Any) -> Any:
        """What the client answers; ClientFailed with its words when it could not."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=WAIT_S)
        except (queue.Empty, BrokenPipeError):
            line = b""
        if not line:
            self.close()
            raise ClientFailed(f"{self.name} did not answer {what}:\n{self.last_words()}")
        answer = json.loads(line)
        if "failed" in answer:
            raise ClientFailed(f"{self.name} {what}: {answer['failed']}")
        return answer["ok"]

    def last_words(self) -> str:
        return self.log.read_bytes()[-2000:].decode(errors="replace")

    # -- records -----------------------------------------------------------------------------------------------------

    def produce(
        self, topic: str, records: Sequence[Record], codec: str = "none", acks: str = "all", idempotent: bool = False
    ) -> list[int]:
        """Write records one after the other; their offsets, as far as the client is told."""
        wanted = [
            {
                "key": _text(record.key),
                "value": _text(record.value),
                "headers": [[name, _text(value)] for name, value in record.headers],
                "timestamp": record.timestamp if record.timestamp is not None else round(time.time() * 1000),
                "partition": record.partition,
            }
            for record in records
        ]
        offsets = self.ask("produce", topic=topic, codec=codec, records=wanted, acks=acks, idempotent=idempotent)
        assert isinstance(offsets, list)
        return offsets

    def read(self, topic: str, count: int, partitions: int = 1) -> list[Record]:
        """The first `count` records, by partition and offset."""
        found = [
            Record(
                _bytes(one["key"]),
                _bytes(one["value"]),
                tuple((name, _bytes(value)) for name, value in one["headers"]),
                one["timestamp"],
                one["partition"],
                one["offset"],
            )
            for one in self.ask("read", topic=topic, partitions=partitions, count=count)
        ]
        return sorted(found, key=lambda record: (record.partition, record.offset))

    # -- its life ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(PATIENCE_S)
        join(self._listener)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
