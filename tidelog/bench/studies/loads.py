"""Scenario 11: loads that flatter less: one thing differs from the first row in each other row.

A benchmark with one producer of keyless records, a fresh topic, warm pages and no fsync shows a broker at its best.
Here each of these is taken away once. Three nodes, every record is acknowledged by all replicas unless a row says
otherwise.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tidelog.bench.compare import FAILURES, OPTIONS, OURS, THEIRS, contestants
from tidelog.bench.figures import one_line
from tidelog.bench.raw import BenchError
from tidelog.bench.scenarios.base import Contestant, CpuMeter, topic
from tidelog.bench.studies.base import Context
from tidelog.bench.studies.librdkafka import consume, produce
from tidelog.bench.studies.results import StudyResult, Table, Verdict, ratio

BROKERS, PARTITIONS, REPLICAS, MIN_INSYNC, RECORD_BYTES = 3, 12, 3, 2, 1000
# Kafka's smallest segment; a partition keeps one or two, and the records of one row fill several.
_RETENTION = {"segment.bytes": str(1 << 20), "retention.bytes": str(1 << 20)}
_NODE_CONFIG = {**OPTIONS, "log.retention.check.interval.ms": "1000"}
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Parameters:
    rounds: int
    records: int


QUICK, FULL = Parameters(1, 2_000), Parameters(3, 150_000)


@dataclass(frozen=True, slots=True)
class Load:
    """`topic_config` is added to that of the first row. A load with `reads` is read after it was written, uncounted."""

    name: str
    producers: int = 1
    is_keyed: bool = False
    acks: str = "all"
    topic_config: Mapping[str, str] = field(default_factory=dict)
    beside_backlog: bool = False
    reads: bool = False
    is_cold: bool = False


FIRST = "one producer, no keys"
LOADS = (
    Load(FIRST),
    Load("keys of 8 bytes", is_keyed=True),
    Load("16 producers", producers=16),
    Load("retention deletes meanwhile", topic_config=_RETENTION),
    Load("a consumer reads a backlog as large meanwhile", beside_backlog=True),
    Load("acks=1", acks="1"),
    Load("fsync before an answer (flush.messages=1)", topic_config={"flush.messages": "1"}),
    Load("read from the beginning, pages warm", reads=True),
    Load("read from the beginning, pages cold", reads=True, is_cold=True),
)


@dataclass(slots=True)
class Figures:
    """What the rounds of one load gave on one broker."""

    rates: list[float] = field(default_factory=list)
    """Records a second."""
    cpu_us: list[float] = field(default_factory=list)
    """CPU of all brokers for a record, the reader's share included where one reads meanwhile."""
    cached_shares: list[float] = field(default_factory=list)
    """Of the pages of the log files, before a cold read."""


class Loads:
    number = 11
    title = "Loads that flatter less"
    question = "What do keys, many producers, retention, a backlog, fsync and cold pages cost?"

    def measure(self, context: Context, result: StudyResult) -> None:
        chosen = QUICK if context.is_quick else FULL
        result.parameters = {
            "cluster": f"{BROKERS} nodes",
            "topic": f"{PARTITIONS} partitions, {REPLICAS} replicas, min.insync.replicas={MIN_INSYNC}",
            "client": "librdkafka, as fast as it can, acks=all, no compression, no idempotence",
            "load": f"{chosen.records:,} records of {RECORD_BYTES:,} bytes",
            "flush": "no fsync before an answer (both brokers' default), but where a row says so",
            "rounds": f"{chosen.rounds} after one that warms, brokers in turn; medians",
        }
        figures_of: dict[tuple[str, str], Figures] = {}

        def refused(name: str, error: Exception) -> None:
            result.failures.append(f"{name}: {one_line(error)}")

        try:
            with contestants(context.brokers, BROKERS, options=_NODE_CONFIG, refused=refused) as field_of_them:
                for contestant in field_of_them:
                    context.progress(f"loads: warming {contestant.name}")
                    _warm(contestant, chosen)
                for number in range(chosen.rounds):
                    for load in LOADS:
                        for contestant in field_of_them if number % 2 == 0 else field_of_them[::-1]:
                            context.progress(
                                f"loads: round {number + 1} of {chosen.rounds}: {load.name}: {contestant.name}"
                            )
                            try:
                                _measure(
                                    contestant,
                                    load,
                                    chosen,
                                    figures_of.setdefault((load.name, contestant.name), Figures()),
                                )
                            except FAILURES as error:
                                refused(f"{contestant.name}, {load.name}", error)
        finally:
            show(result, figures_of, context.brokers)


def show(result: StudyResult, figures_of: Mapping[tuple[str, str], Figures], brokers: Sequence[str]) -> None:
    """The table and the verdicts of what was measured so far."""
    columns = ["load"]
    for name in brokers:
        columns += [f"{name}, records/s", f"{name}, CPU us a record"]
    both = {OURS, THEIRS} <= set(brokers)
    table = Table("Rates and cost", columns + (["ratio of rates", "ratio of CPU"] if both else []))
    table.note = "CPU is that of all brokers; in the row with a backlog it pays for the reading too."
    for load in LOADS:
        row: list[str | float | int | None] = [load.name]
        rates, costs = {}, {}
        for name in brokers:
            figures = figures_of.get((load.name, name), Figures())
            rates[name] = median(figures.rates) if figures.rates else None
            costs[name] = median(figures.cpu_us) if figures.cpu_us else None
            row += [rates[name], costs[name]]
            if figures.cached_shares:
                table.note += f" {name}: {median(figures.cached_shares):.0%} of the cold row's pages were still cached."
        if both:
            row += [ratio(rates[OURS], rates[THEIRS]), ratio(costs[OURS], costs[THEIRS])]
            result.verdicts += verdicts(load.name, rates, costs)
        table.rows.append(row)
    result.tables.append(table)


def verdicts(load: str, rates: Mapping[str, float | None], costs: Mapping[str, float | None]) -> list[Verdict]:
    """Whether ours is faster and cheaper than Kafka's; none where one was not measured."""
    made = []
    rate, its_rate, cost, its_cost = rates[OURS], rates[THEIRS], costs[OURS], costs[THEIRS]
    if rate is not None and its_rate is not None:
        made.append(
            Verdict(f"{load}: faster than Kafka", OURS, rate > its_rate, f"{rate:,.0f} and {its_rate:,.0f} records/s")
        )
    if cost is not None and its_cost is not None:
        made.append(Verdict(f"{load}: cheaper than Kafka", OURS, cost < its_cost, f"{cost:.1f} and {its_cost:.1f} us"))
    return made


def _warm(contestant: Contestant, chosen: Parameters) -> None:
    with topic(contestant, PARTITIONS, REPLICAS, {"min.insync.replicas": str(MIN_INSYNC)}) as its:
        _produce(contestant, its.name, LOADS[0], chosen.records)
        consume(contestant, its.name, PARTITIONS, chosen.records)


def _measure(contestant: Contestant, load: Load, chosen: Parameters, figures: Figures) -> None:
    config = {"min.insync.replicas": str(MIN_INSYNC), **load.topic_config}
    with topic(contestant, PARTITIONS, REPLICAS, config) as its:
        if load.reads:
            _produce(contestant, its.name, load, chosen.records)
            if load.is_cold:
                figures.cached_shares.append(drop_pages(_log_files(contestant, its.name)))

        def work() -> None:
            if load.reads:
                consume(contestant, its.name, PARTITIONS, chosen.records)
            else:
                _produce(contestant, its.name, load, chosen.records)

        if load.beside_backlog:
            with topic(contestant, PARTITIONS, REPLICAS) as backlog:
                _produce(contestant, backlog.name, load, chosen.records)
                with _counted(contestant, chosen, figures), _reading(contestant, backlog.name, chosen.records):
                    work()
        else:
            with _counted(contestant, chosen, figures):
                work()


@contextmanager
def _counted(contestant: Contestant, chosen: Parameters, figures: Figures) -> Iterator[None]:
    start_s = time.monotonic()
    with CpuMeter(contestant.servers) as meter:
        yield
    figures.rates.append(chosen.records / (time.monotonic() - start_s))
    figures.cpu_us.append(meter.used_ns / 1000 / chosen.records)


@contextmanager
def _reading(contestant: Contestant, name: str, records: int) -> Iterator[None]:
    """Read the topic from its beginning on another thread, to its end."""
    failures: list[Exception] = []

    def read() -> None:
        try:
            consume(contestant, name, PARTITIONS, records)
        except FAILURES as error:
            failures.append(error)

    thread = threading.Thread(target=read, name="backlog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(2 * _TIMEOUT_S)
    if failures:
        raise BenchError(f"the backlog was not read: {one_line(failures[0])}")


def _produce(contestant: Contestant, name: str, load: Load, records: int) -> None:
    produce(contestant, name, records, RECORD_BYTES, producers=load.producers, acks=load.acks, is_keyed=load.is_keyed)


def _log_files(contestant: Contestant, name: str) -> list[Path]:
    return [
        file
        for server in contestant.servers
        for file in server.data_directory.glob(f"{name}-*/*.log")
        if file.is_file()
    ]


def drop_pages(files: Iterable[Path]) -> float:
    """Sync the files and ask the kernel to forget their pages. The share of the pages that it still has.

    It keeps those that a process has mapped.
    """
    cached = pages = 0
    for file in files:
        descriptor = os.open(file, os.O_RDWR)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            its_pages = resident_pages(descriptor)
        finally:
            os.close(descriptor)
        pages += len(its_pages)
        cached += sum(its_pages)
    return cached / pages if pages else 0.0


def resident_pages(descriptor: int) -> bytes:
    """One byte for each page of the file: 1 for a page in the page cache (mincore(2))."""
    size_bytes = os.fstat(descriptor).st_size
    pages = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
    if not size_bytes:
        return b""
    with mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size_bytes), pages
        )
        del start  # it would keep the mapping open
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return bytes(page & 1 for page in pages)
