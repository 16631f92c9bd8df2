"""kcat for the client matrix: a command for each thing, so nothing but its options and what it prints is used."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.compatibility.clients.speaking import headers_in, record_out, serve, to_bytes
from tests.patience import PATIENCE_S

WAIT_S = 60.0
# Its own words for what a record has; key and value come as they are, behind their sizes. A size of -1 is null.
FORMAT = "%p %o %T %K %S %h\\n%k%s"
DELIMITER = "|"
STRATEGIES = {"range": "range", "roundrobin": "roundrobin"}


class Member:
    """A kcat in a group; what it is assigned it tells on standard error."""

    def __init__(self, command: list[str]) -> None:
        self.got: list[tuple[int, int]] = []
        self.assigned: list[int] = []
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for stream, told in ((self._process.stdout, self._record), (self._process.stderr, self._event)):
            threading.Thread(target=self._listen, args=(stream, told), daemon=True).start()

    def _listen(self, stream: Any, told: Any) -> None:
        for line in stream:
            told(line.decode(errors="replace"))

    def _record(self, line: str) -> None:
        partition, offset = line.split()
        self.got.append((int(partition), int(offset)))

    def _event(self, line: str) -> None:
        print(line, end="", file=sys.stderr)
        if "rebalanced" in line:
            told = re.findall(r"\[(\d+)\]", line)
            self.assigned = sorted(int(index) for index in told) if "assigned:" in line else []

    def leave(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT_S)


class Adapter:
    def __init__(self, bootstrap: str) -> None:
        self.common = ["kcat", "-b", bootstrap, "-X", "client.id=kcat"]
        self.members: dict[str, Member] = {}

    def run(self, *arguments: str | bytes, feed: bytes = b"") -> bytes:
        """What it prints; an error where it does not succeed."""
        done = subprocess.run(
            [*self.common, *arguments], input=feed, capture_output=True, check=False, timeout=WAIT_S + 10
        )
        errors = done.stderr.decode(errors="replace")
        if done.returncode != 0 or "Delivery failed" in errors:
            raise RuntimeError(errors.strip()[-500:])
        return done.stdout

    def version(self) -> str:
        text = subprocess.run(["kcat", "-V"], capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
        found = re.search(r"Version (\S+) .*librdkafka (\S+)", text)
        assert found is not None, text
        return f"{found[1]} (librdkafka {found[2]})"

    def produce(self, topic: str, codec: str, records: list[dict[str, Any]], acks: str, idempotent: bool) -> list[int]:
        """A run for each record, as key and headers are options of a run; the value is a file."""
        options = ["-P", "-t", topic, "-z", codec, "-X", f"acks={acks}"]
        with tempfile.TemporaryDirectory(prefix="kcat-") as directory:
            file = Path(directory, "value")
            for record in records:
                key, value = to_bytes(record["key"]), to_bytes(record["value"])
                own: list[str | bytes] = ["-p", str(record["partition"])]
                for name, data in headers_in(record):
                    own += ["-H", name.encode() + b"=" + data if data is not None else name]
                if value:
                    file.write_bytes(value)
                    self.run(*options, *own, *([b"-k", key] if key else []), str(file))
                else:
                    # Empty lines are passed over, but nothing behind a key is an empty value, or null with -Z.
                    own += ["-Z"] if value is None else []
                    self.run(*options, *own, "-K", DELIMITER, feed=(key or b"") + DELIMITER.encode() + b"\n")
        return [-1] * len(records)

    def read(self, topic: str, partitions: int, count: int) -> list[dict[str, Any]]:
        output = self.run("-C", "-t", topic, "-o", "beginning", "-e", "-q", "-c", str(count), "-f", FORMAT)
        found, at = [], 0
        while at < len(output):
            end = output.index(b"\n", at)
            partition, offset, timestamp, key_size, value_size, headers = output[at:end].decode().split(" ", 5)
            key, at = _part(output, end + 1, int(key_size))
            value, at = _part(output, at, int(value_size))
            pairs = [part.partition("=")[::2] for part in headers.split(",") if part]
            told = [(name, None if data == "NULL" else data.encode()) for name, data in pairs]
            found.append(record_out(int(partition), int(offset), int(timestamp), key, value, told))
        return found

    # -- groups ------------------------------------------------------------------------------------------------------

    def _group(self, group: str, *more: str) -> list[str]:
        settings = ("auto.offset.reset=earliest", "session.timeout.ms=10000", "heartbeat.interval.ms=200")
        options = [option for setting in settings for option in ("-X", setting)]
        return [*self.common, "-G", group, *options, *more]

    def join(self, member: str, group: str, topic: str, strategy: str) -> None:
        chosen = ("-X", f"partition.assignment.strategy={STRATEGIES[strategy]}", "-X", "enable.auto.commit=false")
        self.members[member] = Member(self._group(group, *chosen, "-u", "-f", "%p %o\\n", topic))

    def member(self, member: str) -> dict[str, Any]:
        one = self.members[member]
        return {"assigned": one.assigned, "got": one.got}

    def leave(self, member: str) -> None:
        self.members.pop(member).leave()

    def commit(self, group: str, topic: str, offsets: dict[str, int]) -> None:
        """It commits what it read: the first records of partition 0."""
        assert list(offsets) == ["0"], "the records of one partition"
        command = self._group(group, "-q", "-c", str(offsets["0"]), topic)
        subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S)

    # -- what it lists -----------------------------------------------------------------------------------------------

    def _listed(self, *more: str) -> str:
        return self.run("-L", *more).decode()

    def topics(self) -> list[str]:
        return sorted(re.findall(r'^  topic "(.+)" with', self._listed(), re.MULTILINE))

    def brokers(self) -> int:
        return len(re.findall(r"^  broker \d+ at", self._listed(), re.MULTILINE))

    def _offset(self, topic: str, which: int) -> int:
        found = re.search(r"offset (-?\d+)", self.run("-Q", "-t", f"{topic}:0:{which}").decode())
        assert found is not None
        return int(found[1])

    def start_offset(self, topic: str) -> int:
        return self._offset(topic, -2)

    def end_offset(self, topic: str) -> int:
        return self._offset(topic, -1)

    def close(self) -> None:
        for member in list(self.members):
            self.leave(member)


def _part(output: bytes, at: int, size: int) -> tuple[bytes | None, int]:
    return (None, at) if size < 0 else (output[at : at + size], at + size)


if __name__ == "__main__":
    serve(Adapter(sys.argv[1]))
