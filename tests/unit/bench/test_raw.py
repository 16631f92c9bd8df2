"""The raw connection keeps its window, and takes nothing for a success that is not one."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.patience import join
from tidelog.bench import frames
from tidelog.bench.raw import BenchError, RawConnection

PLAN = frames.ProducePlan("t", {0: frames.record_batch([b"v"], 1)})
Spoil = Callable[[int, bytes], bytes]


def success(correlation_id: int) -> bytes:
    body = (
        struct.pack(">ib", correlation_id, 0) + b"\x02\x02t\x02" + bytes(4 + 2 + 8 + 8 + 8) + b"\x01\x00\x00" + b"\x00"
    )
    body += bytes(4) + b"\x00"
    assert len(body) == PLAN.answer_size_bytes
    return struct.pack(">i", len(body)) + body


class FakeBroker:
    """Answers every frame with a success, `together` at a time; `spoil` may change one."""

    def __init__(self, together: int, spoil: Spoil) -> None:
        self.in_flight_max = 0
        self._together, self._spoil = together, spoil
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            # A client that has seen enough hangs up with answers on the way.
            self._answer()

    def _answer(self) -> None:
        with self._listener, self._listener.accept()[0] as connection:
            data, waiting, number = b"", [], 0
            while part := connection.recv(1 << 16):
                data += part
                while len(data) >= 4 and len(data) >= 4 + (size := struct.unpack_from(">i", data)[0]):
                    waiting.append(struct.unpack_from(">i", data, 8)[0])
                    data = data[4 + size :]
                self.in_flight_max = max(self.in_flight_max, len(waiting))
                while len(waiting) >= self._together:
                    answers = []
                    for correlation_id in waiting[: self._together]:
                        answers.append(self._spoil(number, success(correlation_id)))
                        number += 1
                    del waiting[: self._together]
                    connection.sendall(b"".join(answers))

    def close(self) -> None:
        self._thread.join(5)


@contextlib.contextmanager
def fake(together: int = 1, spoil: Spoil = lambda number, answer: answer) -> Iterator[tuple[FakeBroker, RawConnection]]:
    broker = FakeBroker(together, spoil)
    try:
        with RawConnection(broker.port, timeout_s=5) as connection:
            yield broker, connection
    finally:
        broker.close()


@pytest.mark.parametrize(("window", "together"), [(1, 1), (16, 1), (16, 4), (16, 16)])
def test_every_request_is_answered_and_timed(window: int, together: int) -> None:
    with fake(together) as (broker, connection):
        timing = connection.pipeline_produce(PLAN, 160, window)
    assert len(timing.latencies_ns) == 160
    assert all(latency > 0 for latency in timing.latencies_ns)
    assert broker.in_flight_max <= window
    assert timing.percentile_us(50) <= timing.percentile_us(99)
    assert timing.rate > 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda answer: answer[:4] + b"\x00\x00\x00\x63" + answer[8:],
        lambda answer: answer[: PLAN.first_error_offset] + b"\x00\x06" + answer[PLAN.first_error_offset + 2 :],
        lambda answer: struct.pack(">i", len(answer) + 6) + answer[4:] + bytes(10),
    ],
    ids=["another request's", "an error", "longer"],
)
def test_an_answer_that_is_no_success_stops_the_run(damage: Callable[[bytes], bytes]) -> None:
    with (
        fake(1, lambda number, answer: damage(answer) if number == 7 else answer) as (_, connection),
        pytest.raises(BenchError),
    ):
        connection.pipeline_produce(PLAN, 50, 4)


def test_a_closed_connection_stops_the_run() -> None:

    listener = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        with listener.accept()[0] as peer:
            peer.recv(10)

    thread = threading.Thread(target=hang_up)
    thread.start()
    with RawConnection(listener.getsockname()[1], 5) as connection, pytest.raises((BenchError, ConnectionError)):
        connection.pipeline_produce(PLAN, 5, 1)
    join(thread)
    listener.close()
