"""Kafka's Java clients as clients of a history, all in one JVM (TransactionalClients.java).

What Java polls comes up to ten records at a time; what a plan's limit leaves over is kept for its next poll.
"""

from __future__ import annotations

import atexit
import itertools
import json
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.transactions.history import Record
from tests.transactions.performing import ClientError
from tests.transactions.topics import ClientSettings
from tidelog.bench import peers

PROGRAM = Path(__file__).with_name("TransactionalClients.java")
ANSWER_S = 120.0
START_S = 600.0
"""Of the JVM, which compiles the program first: a loaded machine takes minutes for it."""
STARTED = -1


class JavaProcess:
    """The JVM, and who waits for which line of its output."""

    _shared: JavaProcess | None = None
    _shared_lock = threading.Lock()

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            peers.java_command(str(PROGRAM), heap="256m"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self._process.kill)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._started: Future[Any] = Future()
        self._waiting: dict[int, Future[Any]] = {STARTED: self._started}
        self.unacknowledged: dict[tuple[str, int], Callable[[int | None], None]] = {}
        threading.Thread(target=self._read, name="java", daemon=True).start()

    @classmethod
    def shared(cls) -> JavaProcess:
        """The only JVM, when it takes requests; many threads ask for it at once."""
        with cls._shared_lock:
            if cls._shared is None:
                cls._shared = cls()
        cls._shared._started.result(START_S)
        return cls._shared

    def ask(self, request: dict[str, Any]) -> Any:
        number = next(self._numbers)
        future: Future[Any] = Future()
        self._waiting[number] = future
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps({**request, "number": number}) + "\n")
            self._process.stdin.flush()
        answer = future.result(ANSWER_S)
        if "error" in answer:
            raise ClientError(f"{request['call']}: {answer['error']}", may_abort=answer["may_abort"])
        return answer["result"]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("{"):
                continue
            message = json.loads(line)
            if "reply" in message:
                self._waiting.pop(message["reply"]).set_result(message)
            else:
                done = self.unacknowledged.pop((message["client"], message["acknowledged"]), None)
                if done is not None:
                    done(message["offset"])
        for future in list(self._waiting.values()):
            future.set_exception(RuntimeError("the JVM has ended"))


class JavaClient:
    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._java = JavaProcess.shared()
        self._name = f"{settings.topics.topic}-{settings.transactional_id}"
        self._left: list[Record] = []
        self._assignment: dict[int, int | None] | None = None
        self._told = {
            "bootstrap": settings.bootstrap,
            "input": settings.topics.input_topic,
            "transactional_id": settings.transactional_id,
            "isolation": settings.isolation.value,
            "group": settings.group,
            "timeout_ms": int(settings.timeout_s * 1000),
            "transaction_timeout_ms": settings.transaction_timeout_ms,
        }

    def _ask(self, call: str, **more: Any) -> Any:
        return self._java.ask({"client": self._name, "settings": self._told, "call": call, **more})

    def open(self) -> None:
        self._ask("open")

    def rival(self) -> None:
        self._ask("rival")

    def settle(self) -> None:
        self._ask("settle")

    def begin(self) -> None:
        self._ask("begin")

    def commit(self) -> None:
        self._ask("commit")

    def abort(self) -> None:
        self._ask("abort")

    def flush(self) -> None:
        self._ask("flush")

    def send(self, partition: int, value: int, done: Callable[[int | None], None]) -> None:
        self._send("send", partition, value, done)

    def send_plain(self, partition: int, value: int, done: Callable[[int | None], None]) -> None:
        self._send("send_plain", partition, value, done)

    def _send(self, call: str, partition: int, value: int, done: Callable[[int | None], None]) -> None:
        topic, index = self._settings.topics.place(partition)
        self._java.unacknowledged[self._name, value] = done
        self._ask(call, topic=topic, partition=index, value=str(value))

    def send_offsets(self, offsets: dict[int, int]) -> None:
        self._ask("send_offsets", positions=self._positions(offsets))

    def attach(self, positions: dict[int, int]) -> None:
        self._left = []
        self._ask("attach", positions=self._positions(positions))

    def _positions(self, offsets: dict[int, int]) -> list[list[Any]]:
        return [[*self._settings.topics.place(at), offset] for at, offset in offsets.items()]

    def poll(self, limit: int) -> list[Record]:
        if not self._left:
            number = self._settings.topics.number
            found = self._ask("poll")
            if found["assigned"] is not None:
                self._assignment = {number(topic, index): None for topic, index in found["assigned"]}
            self._left = [Record(number(each[0], each[1]), each[2], each[3]) for each in found["records"]]
        records, self._left = self._left[:limit], self._left[limit:]
        return records

    def assignment(self) -> dict[int, int | None] | None:
        changed, self._assignment = self._assignment, None
        return changed

    def rewind(self) -> None:
        self._left = []
        number = self._settings.topics.number
        self._assignment = {number(topic, index): offset for topic, index, offset in self._ask("rewind")}

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self._ask("close")
