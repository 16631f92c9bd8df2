"""The rows of the comparison with Spark's Kafka connector: what is read or written, how large, in which codec. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OURS, THEIRS = "tidelog", "kafka"
FORMATS = (OURS, THEIRS)
BATCH, STREAM, SINK, LATENCY = "batch", "stream", "sink", "latency"
RATE, CPU, P50, P99 = "rows/s", "CPU s per million rows", "p50 ms", "p99 ms"
SIZES = {"100b": 100, "1kb": 1024}
CODECS = ("none", "lz4", "zstd")
_RECORDS = {"100b": 2_000_000, "1kb": 500_000}
# The lowest acceptable ratio of the rates and the highest of the CPU, by size; compressed ones by codec.
_READ_TARGETS = {"100b": (3.0, 0.5), "1kb": (2.5, 0.7)}
_COMPRESSED_TARGET = (2.0, 0.9)
_SINK_TARGET = (2.0, None)


@dataclass(frozen=True, slots=True)
class SparkRow:
    """One thing to measure with both formats."""

    name: str
    kind: str
    size_bytes: int
    codec: str
    records: int
    rate_ratio_min: float | None = None
    """The target: our rate is at least so many times theirs."""
    cpu_ratio_max: float | None = None
    """The target: our CPU a record is at most so many times theirs."""
    timeout_s: float = 300.0
    """A job that takes longer has failed."""

    @property
    def metrics(self) -> tuple[str, str]:
        return (P50, P99) if self.kind == LATENCY else (RATE, CPU)


def catalogue() -> list[SparkRow]:
    """All rows, in the order in which they are measured."""
    rows = []
    for kind in (BATCH, STREAM, SINK):
        for size, size_bytes in SIZES.items():
            for codec in CODECS:
                rate, cpu = _SINK_TARGET if kind == SINK else _READ_TARGETS[size]
                if kind != SINK and codec != "none":
                    rate, cpu = _COMPRESSED_TARGET
                rows.append(
                    SparkRow(f"spark-{kind}-{size}-{codec}", kind, size_bytes, codec, _RECORDS[size], rate, cpu)
                )
    rows.append(SparkRow("spark-latency", LATENCY, SIZES["100b"], "none", 1_000))
    return rows


def select(texts: Sequence[str]) -> list[SparkRow]:
    """The rows whose name contains one of the texts; all without a text."""
    return [row for row in catalogue() if not texts or any(text in row.name for text in texts)]
