"""The log cleaner of this node: chooses the next compacted log, starts its cleaning, and limits the rate.

Kafka's LogCleaner and LogCleanerManager. `storage/log/compaction.py` cleans one log. Its steps run on threads, at most
log.cleaner.threads at a time. Between two steps the loop throttles, and the log may be truncated or closed. A log that
cannot be cleaned stays readable and is not tried again before the next start or a repair. Invariants: in one log's
directory no cleaning starts before the last one has ended, even if that log is gone. While a replica may lack them,
tombstones and transaction markers stay on all: it would have a deleted record, or an open transaction, for good.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from tidelog.broker.replicas import rounds
from tidelog.storage.cleaner.tables import key_table
from tidelog.storage.log.compaction import CleaningFailed, CleaningStats, Compaction, find_cleanable, has_deleted_damage
from tidelog.storage.segments.damage import CorruptIndex
from tidelog.storage.segments.transaction_index import CorruptTransactionIndex

if TYPE_CHECKING:
    from tidelog.broker.config.dynamic_config import DynamicConfig
    from tidelog.broker.replicas.log_directories import LogDirectories
    from tidelog.storage.cleaner.choice import CleanableRange
    from tidelog.storage.log.directory import LogDirectory
    from tidelog.storage.log.partition_log import PartitionLog

logger = logging.getLogger("tidelog.cleaner")

ABSENCE_MS_MAX: Final = 7 * 24 * 3600 * 1000
"""How long tombstones and markers that are due to go wait for a replica that is not in sync."""
_PIECE_BYTES_MIN: Final = 64 * 1024
_SHORTAGE_PAUSE_S: Final = 0.1
_PAUSE_S_MAX: Final = 3600.0
_SWITCH_INTERVAL_S: Final = 0.0005
_USUAL_SWITCH_INTERVAL_S: Final = sys.getswitchinterval()
"""How long the loop may wait for the interpreter lock. The usual 5 ms, during a cleaning, would raise every p99."""
_SETTINGS: Final = (
    "log.cleaner.threads", "log.cleaner.backoff.ms", "log.cleaner.io.max.bytes.per.second",
)  # fmt: skip


class UpkeepOfLogs(Protocol):
    """The part of `upkeep.Upkeep` that the cleaner uses."""

    def checkpoint(self) -> None:
        """Write all checkpoints, with the offsets up to which each log is cleaned."""
        ...

    def look_after(self) -> None:
        """Apply retention, which waits during a log's cleaning."""
        ...

    def cleaned(self, log: PartitionLog) -> None:
        """Flush the log, if its cleaning has changed what a flush writes."""
        ...


TURN_S: Final = 0.005
"""How long one turn of the loop looks at logs."""

RunInExecutor = Callable[[Callable[[], None]], "asyncio.Future[None]"]
_Due = tuple[float, "LogDirectory", "PartitionLog"]
"""The dirty ratio of a log that is to be cleaned, its directory, the log."""


@dataclass(slots=True)
class CleanerTotals:
    """Totals since the start. `last_*` is about the last finished cleaning (Kafka's gauges of the same names)."""

    cleanings: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    messages_read: int = 0
    messages_written: int = 0
    last_duration_s: float = 0.0
    last_recopy_percent: int = 0
    last_buffer_utilization_percent: int = 0


class LogCleaner:
    def __init__(
        self,
        directories: LogDirectories,
        settings: DynamicConfig,
        loop: asyncio.AbstractEventLoop,
        clock_ms: Callable[[], int],
        run_in_executor: RunInExecutor,
        upkeep: UpkeepOfLogs,
        is_on_all_replicas: Callable[[PartitionLog], bool],
    ) -> None:
        """`is_on_all_replicas(log)`: every replica has what is committed in it."""
        self._directories = directories
        self._settings = settings
        self._loop = loop
        self._clock_ms = clock_ms
        self._run_in_executor = run_in_executor
        self._upkeep = upkeep
        self._is_on_all_replicas = is_on_all_replicas
        self.totals = CleanerTotals()
        self.uncleanable: dict[PartitionLog, str] = {}
        """Logs that cannot be cleaned -> the reason."""
        self.on_uncleanable: Callable[[PartitionLog], None] = lambda log: None
        """Called with each uncleanable log."""
        self.dirtiest_percent = 0
        """The dirty ratio of the dirtiest cleanable log at the last check."""
        self.delay_ms_max = 0
        """The longest delay of a log beyond max.compaction.lag.ms at the last check."""
        self._last_look_ms = 0
        self._running: dict[str, asyncio.Task[None]] = {}
        self._compactions: set[Compaction] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._round: Iterator[None] | None = None
        """The look at all logs that is under way."""
        self._due: list[_Due] = []
        """What is to be cleaned by the last look, the dirtiest last."""
        self._throttled_until = 0.0
        self._pauses: set[asyncio.Future[None]] = set()
        self._is_closing = False

    # ----------------------------------------------------------------------------------------------------- start, stop

    def start(self) -> None:
        """Start the periodic checks, unless log.cleaner.enable is false."""
        if self._settings.flag("log.cleaner.enable"):
            self._last_look_ms = self._clock_ms()
            self._settings.subscribe(_SETTINGS, self._settings_changed)
            self._look_later()

    async def close(self) -> None:
        """Give up the running cleanings, and wait until their threads are done."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        for compaction in list(self._compactions):
            try:
                compaction.give_up()
            except OSError as error:
                logger.error("cannot end the cleaning of %s: %s", compaction.log.directory, error)
                compaction.abandon()  # the next start ends it
        self._end_pauses()
        if self._running:
            await asyncio.wait(list(self._running.values()))

    @property
    def since_last_look_ms(self) -> int:
        return self._clock_ms() - self._last_look_ms if self._last_look_ms else 0

    @property
    def _threads(self) -> int:
        return max(1, self._settings.integer("log.cleaner.threads"))

    @property
    def running_count(self) -> int:
        return len(self._running)

    def _settings_changed(self) -> None:
        if not self._is_closing:
            self._throttled_until = 0.0
            self._end_pauses()
            self._look_later()

    # -------------------------------------------------------------------------------------------------------- choosing

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_ms = self._settings.integer("log.cleaner.backoff.ms")
        self._timer = self._loop.call_later(delay_ms / 1000, self._look)

    def _look(self) -> None:
        """Look at all logs, as many in one turn of the loop as TURN_S allows. Then clean the dirtiest first."""
        if self._is_closing:
            return
        self._last_look_ms = self._clock_ms()
        self._look_later()
        self._review_uncleanable()
        if self._round is None:
            self._round = self._look_at_all(self._last_look_ms)
            rounds.go_on(self._loop, self._round, TURN_S, lambda: self._is_closing, self._round_ended)

    def _round_ended(self, error: Exception | None) -> None:
        if error is not None:  # a bug here: the next look begins anew
            logger.error("the look for logs to clean failed", exc_info=error)
        self._round = None
        self._begin_due()

    def _look_at_all(self, now_ms: int) -> Iterator[None]:
        dirtiest = delay_ms = 0
        due: list[_Due] = []
        for directory in list(self._directories):
            for log in list(directory.logs.values()):
                chosen = self._cleanable(directory, log, now_ms)
                if chosen is not None:
                    dirtiest = max(dirtiest, int(100 * chosen.dirty_ratio))
                    delay_ms = max(delay_ms, chosen.delay_ms)
                    if chosen.is_due(log.config.min_cleanable_dirty_ratio):
                        due.append((chosen.dirty_ratio, directory, log))
                yield
        self.dirtiest_percent, self.delay_ms_max = dirtiest, delay_ms
        self._due = sorted(due, key=lambda each: each[0])

    def _begin_due(self) -> None:
        """Start cleanings on the free threads. The log may have changed since it was looked at."""
        threads, now_ms = self._threads, self._clock_ms()
        while self._due and len(self._running) < threads:
            _, directory, log = self._due.pop()
            chosen = self._cleanable(directory, log, now_ms)
            if chosen is None or not chosen.is_due(log.config.min_cleanable_dirty_ratio):
                continue
            try:
                self._begin(directory, log, chosen, now_ms, threads)
            except Exception as error:  # a bug here: the others are still cleaned
                logger.exception("cannot clean %s", log.directory)
                self._cannot_be_cleaned(log, repr(error))

    def _cleanable(self, directory: LogDirectory, log: PartitionLog, now_ms: int) -> CleanableRange | None:
        """What can be cleaned of the log now; None if it has nothing dirty, is not there any more, or has to wait."""
        if (
            not log.config.is_compacted
            or not log.may_be_cleaned
            or log.cleaned_offset >= log.segments.active.base_offset
            or log.failure is not None
            or log.is_under_cleaning
            or log.directory in self._running
            or log in self.uncleanable
            or directory.logs.get((log.topic, log.partition)) is not log
        ):
            return None
        try:
            return find_cleanable(log, now_ms)
        except (CorruptIndex, OSError) as error:
            logger.warning("cannot clean %s now: %s", log.directory, error)
        except Exception as error:  # a bug here: the others are still cleaned
            logger.exception("cannot clean %s", log.directory)
            self._cannot_be_cleaned(log, repr(error))
        return None

    def _review_uncleanable(self) -> None:
        """Forget the logs that are removed, and those whose damage is deleted: it will not be repaired."""
        if self.uncleanable:
            there = {log for directory in self._directories for log in directory.logs.values()}
            kept = {log for log in self.uncleanable if log in there and not has_deleted_damage(log)}
            self.uncleanable = {log: why for log, why in self.uncleanable.items() if log in kept}

    # -------------------------------------------------------------------------------------------------------- cleaning

    def _begin(
        self, directory: LogDirectory, log: PartitionLog, chosen: CleanableRange, now_ms: int, threads: int
    ) -> None:
        settings = self._settings
        make_keys = partial(
            key_table,
            settings.integer("log.cleaner.dedupe.buffer.size") // threads,
            settings.number("log.cleaner.io.buffer.load.factor"),
            chosen.cleanable_bytes,
            log.disk.random_bytes(16),
        )
        piece_bytes = max(_PIECE_BYTES_MIN, settings.integer("log.cleaner.io.buffer.size") // threads // 2)
        try:
            directory.enter_in_cleaner_checkpoint(log)
            compaction = Compaction(
                log, chosen, make_keys, now_ms, piece_bytes=piece_bytes,
                removes_until_ms=now_ms if self._is_on_all_replicas(log) else now_ms - ABSENCE_MS_MAX,
            )  # fmt: skip
        except CorruptTransactionIndex as error:
            self._cannot_be_cleaned(log, str(error))
            return
        except OSError as error:
            self._directories.failed(directory, error)
            return
        self._compactions.add(compaction)
        task = self._loop.create_task(self._clean(directory, compaction))
        where = log.directory  # it may be renamed meanwhile
        if not self._running:
            sys.setswitchinterval(min(_USUAL_SWITCH_INTERVAL_S, _SWITCH_INTERVAL_S))
        self._running[where] = task
        task.add_done_callback(lambda _: self._ended(compaction, where))

    async def _clean(self, directory: LogDirectory, compaction: Compaction) -> None:
        began, moved = self._loop.time(), 0
        try:
            while True:
                await self._run_in_executor(compaction.run)
                if not compaction.advance():
                    break
                if compaction.is_short:
                    await asyncio.sleep(_SHORTAGE_PAUSE_S)
                moved = await self._throttle(compaction.stats, moved)
        except CleaningFailed as error:
            self._cannot_be_cleaned(compaction.log, str(error))
        except OSError as error:
            self._directories.failed(directory, error)
        except Exception as error:  # a bug here: this log stays as it is, and the others are still cleaned
            logger.exception("the cleaning of %s failed", compaction.log.directory)
            self._cannot_be_cleaned(compaction.log, repr(error))
            try:
                compaction.take_back()
            except OSError as failure:
                self._directories.failed(directory, failure)
            except Exception:  # a start finishes it
                logger.exception("the cleaning of %s cannot be taken back", compaction.log.directory)
                compaction.abandon()
        else:
            if not compaction.is_given_up:
                self._finished(compaction, self._loop.time() - began)

    def _cannot_be_cleaned(self, log: PartitionLog, why: str) -> None:
        logger.warning("%s-%d will not be cleaned any more: %s", log.topic, log.partition, why)
        self.uncleanable[log] = why
        self.on_uncleanable(log)

    def try_again(self, log: PartitionLog) -> None:
        """Allow cleaning again: the obstacle may have been damage that is repaired now."""
        self.uncleanable.pop(log, None)

    async def _throttle(self, stats: CleaningStats, moved: int) -> int:
        """Wait until log.cleaner.io.max.bytes.per.second allows more. The bytes moved so far."""
        bytes_per_s = self._settings.number("log.cleaner.io.max.bytes.per.second")
        now = self._loop.time()
        if bytes_per_s > 0:
            self._throttled_until = max(now, self._throttled_until) + (stats.bytes_moved - moved) / bytes_per_s
        elif not bytes_per_s:  # a rate of 0 stops the cleaner; a negative rate is no limit, as in Kafka
            self._throttled_until = now + _PAUSE_S_MAX
        delay = min(self._throttled_until - now, _PAUSE_S_MAX)
        if delay > 0.001 and not self._is_closing:
            pause = self._loop.create_future()
            self._pauses.add(pause)
            timer = self._loop.call_later(delay, _end, pause)
            await pause
            timer.cancel()
            self._pauses.discard(pause)
        return stats.bytes_moved

    def _end_pauses(self) -> None:
        for pause in list(self._pauses):
            _end(pause)

    def _finished(self, compaction: Compaction, duration_s: float) -> None:
        stats, totals = compaction.stats, self.totals
        totals.cleanings += 1
        totals.bytes_read += stats.bytes_read
        totals.bytes_written += stats.bytes_written
        totals.messages_read += stats.messages_read
        totals.messages_written += stats.messages_written
        totals.last_duration_s = duration_s
        totals.last_recopy_percent = 100 * stats.bytes_written // max(1, stats.bytes_read)
        totals.last_buffer_utilization_percent = int(100 * stats.table_utilization)
        log = compaction.log
        logger.info(
            "cleaned %s-%d up to offset %d: kept %d of %d records and %d of %d bytes, in %.3f s",
            log.topic, log.partition, compaction.cleaned_offset, stats.messages_written, stats.messages_read,
            stats.bytes_written, stats.bytes_read, duration_s,
        )  # fmt: skip
        self._upkeep.cleaned(log)
        if not self._due:  # the periodic checkpoints have the others: each one goes over all logs
            self._upkeep.checkpoint()
        if stats.keyless:
            logger.warning("%s-%d had %d records without a key", log.topic, log.partition, stats.keyless)

    def _ended(self, compaction: Compaction, where: str) -> None:
        self._compactions.discard(compaction)
        del self._running[where]
        if not self._running:
            sys.setswitchinterval(_USUAL_SWITCH_INTERVAL_S)
        if compaction.retention_waits and not self._is_closing:
            self._loop.call_soon(self._upkeep.look_after)
        # As in Kafka, there is a pause only if there was nothing to clean. There is also one after a cleaning that was
        # given up: without it a shortage of file descriptors, for example, would end the next one at once.
        if not compaction.is_given_up:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        """After a cleaning: the next logs of those due at the last look. Where a thread is left, all are looked at."""
        if not self._is_closing:
            self._begin_due()
            if len(self._running) < self._threads:
                self._look()


def _end(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)
