"""The costs of the parts of a Produce and a Fetch: codecs, checksum, batches, compression. CPU time, best rounds."""

from __future__ import annotations

import time
from collections.abc import Callable

from tidelog.bench import frames
from tidelog.protocol.batches.compression import GZIP, LZ4, SNAPPY, ZSTD, compress, decompress
from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.batches.record_batch import read_header, stamp
from tidelog.protocol.batches.records import decode_batch, encode_batch
from tidelog.protocol.hot import ProducedPartition, decode_produce, encode_produce_response
from tidelog.protocol.messages.fetch import FetchRequest

_ROUNDS = 7
_ROUND_S = 0.05
_HEADER_BYTES = 10 + len("tidelog-bench") + 1
_RECORD = b"x" * 700 + bytes(range(256)) + b"y" * 44


def cost_us(call: Callable[[], object]) -> float:
    """CPU microseconds per call: the best of several rounds, each long enough for the clock."""
    count, best = 1, float("inf")
    while True:
        began = time.process_time_ns()
        for _ in range(count):
            call()
        taken_s = (time.process_time_ns() - began) / 1e9
        if taken_s >= _ROUND_S:
            break
        count *= 2
    for _ in range(_ROUNDS):
        began = time.process_time_ns()
        for _ in range(count):
            call()
        best = min(best, (time.process_time_ns() - began) / 1000 / count)
    return best


def calls() -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    now_ms = int(time.time() * 1000)
    small = frames.record_batch([b"v" * 200], now_ms)
    large = frames.record_batch([b"v" * 1000] * 16, now_ms)
    writable = bytearray(large)
    records = [(now_ms, b"key", _RECORD, ())] * 16
    encoded = bytes(encode_batch(records))
    produce_small = _body(frames.produce(frames.ProducePlan("topic", {0: small}), 1))
    produce_many = _body(frames.produce(frames.ProducePlan("topic", dict.fromkeys(range(12), large)), 1))
    fetch = _body(frames.fetch("topic", dict.fromkeys(range(12), 0), 1))
    answer = [("topic", [ProducedPartition(0, 0, 1, -1, 0)])]
    functions: dict[str, Callable[[], object]] = {
        "crc32c of 16 KB": lambda: crc32c(large),
        "decode Produce, 200 B": lambda: decode_produce(produce_small, frames.PRODUCE_VERSION),
        "decode Produce, 12 x 16 KB": lambda: decode_produce(produce_many, frames.PRODUCE_VERSION),
        "encode Produce answer": lambda: encode_produce_response(1, frames.PRODUCE_VERSION, answer),
        "decode Fetch, 12 partitions": lambda: FetchRequest.read(fetch, 0, frames.FETCH_VERSION),
        "read a batch header": lambda: read_header(large),
        "stamp offset and epoch": lambda: stamp(writable, 0, 7, 3),
        "encode a batch of 16 x 1 KB": lambda: encode_batch(records),
        "decode a batch of 16 x 1 KB": lambda: decode_batch(encoded),
    }
    block = _RECORD * 16
    for name, codec in (("gzip", GZIP), ("snappy", SNAPPY), ("lz4", LZ4), ("zstd", ZSTD)):
        packed = compress(codec, block)
        functions[f"{name} 16 KB"] = lambda codec=codec: compress(codec, block)  # type: ignore[misc]
        functions[f"un-{name} 16 KB"] = lambda codec=codec, packed=packed: decompress(  # type: ignore[misc]
            codec, packed, len(block)
        )
    return functions


def _body(frame: bytes) -> memoryview:
    """A request without its size field and header."""
    return memoryview(bytearray(frame[4 + _HEADER_BYTES :]))
