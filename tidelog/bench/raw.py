"""A raw connection: it sends encoded frames, and decodes only the checked parts of the answers.

It keeps a fixed number of requests in flight on one blocking socket and takes the latency of each. Every answer must
carry the correlation id of the oldest request in flight, have the length of an answer without errors, and say no error
for its first partition; the last answer is checked whole.
"""

from __future__ import annotations

import socket
import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tidelog.bench import frames
from tidelog.bench.figures import percentile

_JOIN_BELOW_BYTES = 65536
_SIZE = struct.Struct(">i")
_HEAD = struct.Struct(">ii")
_ERROR = struct.Struct(">h")


class BenchError(Exception):
    """The server answered something a benchmark must not count."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Latency of each request in the order sent, and the time from the first send to the last answer."""

    latencies_ns: array[int]
    elapsed_s: float

    @property
    def rate(self) -> float:
        return len(self.latencies_ns) / self.elapsed_s

    def percentile_us(self, percent: float) -> float:
        """Nearest-rank percentile of the latencies in microseconds.

        Raises:
            BenchError: no request was timed.
        """
        latency_ns = percentile(sorted(self.latencies_ns), percent)
        if latency_ns is None:
            raise BenchError("no request was timed")
        return latency_ns / 1000


class RawConnection:
    """One blocking connection to a broker on 127.0.0.1."""

    def __init__(self, port: int, timeout_s: float = 30.0, *, buffer_bytes: int = 1 << 16) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(buffer_bytes)

    def send(self, frame: bytes) -> None:
        self._socket.sendall(frame)

    def receive(self) -> memoryview:
        """The next whole answer, size field included; valid until the next call."""
        filled = self._fill(0, 4)
        size = _SIZE.unpack_from(self._buffer)[0] + 4
        if size > len(self._buffer):
            self._buffer.extend(bytes(size - len(self._buffer)))
        if self._fill(filled, size) != size:
            raise BenchError("more came than one answer, although one request was in flight")
        return memoryview(self._buffer)[:size]

    def _fill(self, filled: int, size_bytes: int) -> int:
        view = memoryview(self._buffer)
        while filled < size_bytes:
            received = self._socket.recv_into(view[filled:])
            if received == 0:
                raise BenchError("the server closed the connection")
            filled += received
        return filled

    def pipeline_produce(self, plan: frames.ProducePlan, count: int, window: int) -> Timing:
        """Send `count` requests of one plan with `window` in flight; every answer is checked."""
        ring = [frames.produce(plan, number) for number in range(window)]
        answer_bytes, error_at = plan.answer_size_bytes, plan.first_error_offset
        sent_at, latencies = [0] * window, array("q")
        buffer, view = self._buffer, memoryview(self._buffer)
        clock, recv_into, head, error = (
            time.perf_counter_ns,
            self._socket.recv_into,
            _HEAD.unpack_from,
            _ERROR.unpack_from,
        )
        began = clock()
        sent = self._send_some(ring, 0, min(window, count), sent_at)
        received = filled = 0
        while received < count:
            got = recv_into(view[filled:])
            now = clock()
            if not got:
                raise BenchError("the server closed the connection")
            filled += got
            whole = filled // (answer_bytes + 4)
            for position in range(0, whole * (answer_bytes + 4), answer_bytes + 4):
                slot = received % window
                if head(buffer, position) != (answer_bytes, slot) or error(buffer, position + error_at)[0]:
                    raise BenchError(
                        f"answer {received} is not the success expected: {bytes(view[position:filled])[:200]!r}"
                    )
                latencies.append(now - sent_at[slot])
                received += 1
            if received == count:
                errors = plan.errors(buffer, filled - answer_bytes - 4)
                if any(errors):
                    raise BenchError(f"error codes {errors}")
            elif whole:
                leftover = filled - whole * (answer_bytes + 4)
                view[:leftover] = view[filled - leftover : filled]
                filled = leftover
                sent = self._send_some(ring, sent, min(received + window, count), sent_at)
        return Timing(latencies, (clock() - began) / 1e9)

    def _send_some(self, ring: Sequence[bytes], sent: int, upto: int, sent_at: list[int]) -> int:
        """Send requests number `sent` up to `upto`: small ones in one write, as clients that batch their writes do."""
        due = [(number % len(ring)) for number in range(sent, upto)]
        if due and len(ring[0]) * len(due) <= _JOIN_BELOW_BYTES:
            now = time.perf_counter_ns()
            for slot in due:
                sent_at[slot] = now
            self._socket.sendall(ring[due[0]] if len(due) == 1 else b"".join([ring[slot] for slot in due]))
        else:
            for slot in due:
                sent_at[slot] = time.perf_counter_ns()
                self._socket.sendall(ring[slot])
        return upto

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
