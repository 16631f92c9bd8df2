"""Kafka's own idempotent Java producer that never stops (VerifiableProducer), and what it was told of each record."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path

from tests.patience import PATIENCE_S, join
from tidelog.bench import peers

SETTINGS = {
    "enable.idempotence": "true",
    "acks": "all",
    "retries": "2147483647",
    "delivery.timeout.ms": "600000",
    "request.timeout.ms": "10000",
    "linger.ms": "3",
    "batch.size": "2000",
    "reconnect.backoff.ms": "10",
    "reconnect.backoff.max.ms": "50",
    "retry.backoff.ms": "20",
    "retry.backoff.max.ms": "100",
}


class JavaSending:
    """Numbers from 0 on, in order. `acknowledged`: number -> (partition, offset)."""

    def __init__(self, directory: Path, bootstrap: str, topic: str, records_per_second: int = 300) -> None:
        self.topic = topic
        self.acknowledged: dict[int, tuple[int, int]] = {}
        self.failures: list[str] = []
        self.output: list[str] = []
        config = directory / f"{topic}.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in SETTINGS.items()))
        self._command = peers.java_command(
            "org.apache.kafka.tools.VerifiableProducer",
            *("--bootstrap-server", bootstrap, "--topic", topic, "--acks", "-1", "--max-messages", "-1"),
            *("--throughput", str(records_per_second), "--producer.config", str(config)),
            heap="128m",
        )
        self._errors = directory / f"{topic}.stderr"

    def start(self) -> JavaSending:
        with open(self._errors, "wb") as errors:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self._thread = threading.Thread(target=self._read, name=f"java {self.topic}", daemon=True)
        self._thread.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                self.output.append(line)
                continue
            if event["name"] == "producer_send_success":
                self.acknowledged[int(event["value"])] = (event["partition"], event["offset"])
            elif event["name"] == "producer_send_error":
                self.failures.append(line)

    def end(self, timeout_s: float = 120.0) -> None:
        """It sends what it has, and ends."""
        self._process.terminate()
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        join(self._thread)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def check(self, found: dict[int, list[tuple[int, int]]]) -> None:
        """`found`: partition -> (offset, number) of every record there. Nothing lost, doubled or out of order."""
        assert self.failures == []
        places = {(partition, offset): number for partition, rows in found.items() for offset, number in rows}
        for number, place in self.acknowledged.items():
            assert places.get(place) == number, f"{number}, acknowledged at {place}: there is {places.get(place)}"
        numbers = list(places.values())
        assert len(set(numbers)) == len(numbers), f"{len(numbers) - len(set(numbers))} stand twice in {self.topic}"
        for partition, rows in found.items():
            in_order = [number for _, number in sorted(rows)]
            assert in_order == sorted(in_order), f"{self.topic}-{partition} is out of order"
