"""The link to one leading broker: the fetch session for all partitions followed from it, and the handling of responses.

In the steady state a response becomes log appends and the next request without a message object, a future or a timer.
A request contains the partitions that have changed since the last request. A partition that joins while a fetch waits
at the leader is requested at once by a second request; at most two are open. Invariant: a response counts for a
partition only if its request, or an earlier one, mentioned the partition and the partition has not changed here since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, Final, Protocol

from tidelog.protocol.errors import ErrorCode, KafkaError, MalformedMessage
from tidelog.protocol.hot_replication import (
    UNLIMITED_WAIT_MS,
    VERSION,
    decode_fetched,
    decode_one_fetched,
    partition_answered,
)
from tidelog.replication.answer_size import ARRIVING_BYTES
from tidelog.replication.backoff import Backoff, pause_ms
from tidelog.replication.followed_partition import NOT_REQUESTED, FollowedPartition, Key
from tidelog.replication.follower import (
    REACTIONS,
    SESSION_ERRORS,
    Reaction,
    out_of_range,
    truncation_offset,
)
from tidelog.replication.leader_bounds import LeaderBounds
from tidelog.replication.throttle import UNLIMITED
from tidelog.storage.log.partition_log import CorruptLog
from tidelog.storage.log.usual_append import append_usual_as_follower
from tidelog.storage.segments.append import UnexplainedGap, check_first_holds
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.reader import ColdRead

if TYPE_CHECKING:
    import random

    from tidelog.protocol.hot_replication import RequestTemplate
    from tidelog.replication.fetcher_settings import FetcherSettings
    from tidelog.replication.partition import Partition
    from tidelog.replication.ports import Connect, Endpoint, Link
    from tidelog.replication.throttle import Throttle
    from tidelog.replication.truncations import Truncations

logger = logging.getLogger("tidelog.replication")

FETCH: Final = 1
OPEN_MAX: Final = 2
# How long the fetch for the other partitions waits for the records of one to be on the device: most syncs take less,
# and then one request has them all.
HELD_S: Final = 0.005
# How long a fetch may wait for records meanwhile: a leader of Kafka's reads the next request of a connection after it.
WAIT_MS_MAX_WHILE_HELD: Final = 10
# Throttled partitions that continue together when the rate allows more: their records fill an answer. And how long they
# have for it before the next ones continue.
RESUMED_AT_ONCE: Final = 2
RESUME_MS: Final = 10.0
# How often those that wait are looked at for the ones that need not any more, as by another list of replicas, and all
# others for the ones that must wait now.
FREED_MS: Final = 400.0
# A leader may learn of its election later than its follower, so only lasting failures are logged at INFO.
FAILURES_BEFORE_INFO: Final = 5
# A leader that does not know many new partitions learns of them over the link that the requests for them take. So the
# pause is this many times as long as the refused request took, up to a bound. Fewer partitions do not fill a slow link.
EXCHANGES_PER_PAUSE: Final = 4
EXCHANGES_MS_MAX: Final = 5_000.0
UNKNOWN_MIN: Final = 100
_UNKNOWN: Final = (ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
EPOCH_MAX: Final = 2**31 - 1
_OFFSET = Struct(">q")


class LinkOwner(Protocol):
    """The interface of `fetcher.ReplicaFetchers` for its links."""

    node_id: int
    loop: asyncio.AbstractEventLoop
    rng: random.Random
    clock_ms: Callable[[], int]
    settings: FetcherSettings
    throttle: Throttle
    truncations: Truncations
    bytes_in: int
    broker_epoch: Callable[[], int]
    connect: Connect
    endpoint_of: Callable[[int], Endpoint | None]
    on_appended: Callable[[Partition], None]
    on_link: Callable[[int, bool], None]
    on_gap: Callable[[Partition, UnexplainedGap], None]
    on_shortage: Callable[[], None]
    on_cold: Callable[[ColdRead], None]

    def template(self) -> RequestTemplate: ...
    def failed(self, partition: Partition, error: Exception) -> None: ...


class Delays:
    """The partitions that a link omits for a while after a failure. `on_over` gets all of them together."""

    def __init__(self, fetchers: LinkOwner, on_over: Callable[[Collection[FollowedPartition]], None]) -> None:
        self._fetchers = fetchers
        self._on_over = on_over
        self._delayed: dict[FollowedPartition, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, followed: object) -> bool:
        return followed in self._delayed

    def add(self, followed: FollowedPartition, exchange_ms: float = 0.0) -> None:
        """Delay the partition. The pause grows with its failures in a row, and with `exchange_ms`, the time of the
        request that the leader has refused. It is shorter if a pause is under way.
        """
        followed.failures += 1
        self._delayed[followed] = None
        if self._timer is None:
            fetchers, settings = self._fetchers, self._fetchers.settings
            delay_ms = pause_ms(followed.failures, settings.backoff_ms_initial, settings.backoff_ms_max, fetchers.rng)
            delay_ms = max(delay_ms, min(EXCHANGES_PER_PAUSE * exchange_ms, EXCHANGES_MS_MAX))
            self._timer = fetchers.loop.call_later(delay_ms / 1000, self._over)

    def discard(self, followed: FollowedPartition) -> None:
        self._delayed.pop(followed, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _over(self) -> None:
        self._timer = None
        delayed, self._delayed = self._delayed, {}
        self._on_over(delayed)


class ReplicaFetcher:
    def __init__(self, fetchers: LinkOwner, leader_id: int) -> None:
        settings = fetchers.settings
        self.leader_id = leader_id
        self.followed: dict[Key, FollowedPartition] = {}
        self._fetchers = fetchers
        self._loop = fetchers.loop
        self._clock_ms = fetchers.clock_ms
        self._template = self._fetchers.template()
        self._changed: dict[FollowedPartition, None] = {}  # the next request mentions these
        self._forgotten: dict[Key, None] = {}  # the next request removes these from the session
        self._held: dict[FollowedPartition, None] = {}  # their records wait for the device
        self._throttled: dict[FollowedPartition, None] = {}  # they wait for the rate, in the order of their turns
        self._throttle_timer: asyncio.TimerHandle | None = None
        self._unpaused: dict[FollowedPartition, None] = {}  # throttled ones mentioned or fetched since `_keep_rate`
        self._freed_due_ms = self._all_due_ms = 0.0
        self._is_rate_due = False  # records of throttled replicas came: look at the rate before the next request
        self._delays = Delays(fetchers, self._end_delays)  # after a failure
        self._bounds = LeaderBounds(fetchers.node_id, self._on_bounds, self._broken)
        # By the beginning of its answers in this session. Cleared with the session, and when a partition goes.
        self._answering: dict[bytes, FollowedPartition] = {}
        self._link: Link | None = None
        self._endpoint: Endpoint | None = None
        self._on_answer = partial(self._answered_on, None)
        self._session_id = 0
        self._session_epoch = 0
        self._requests_sent = self._requests_answered = 0
        self._many_sent_s: dict[int, float] = {}  # when the open requests for UNKNOWN_MIN partitions or more were sent
        self._answered_at_check = -1
        self._arrived_bytes_at_check = 0
        self._backoff = Backoff(settings.backoff_ms_initial, settings.backoff_ms_max)
        self._failure = ""  # of the last attempt, until the leader answers
        self._failed_at_check = False
        self._pumping = False
        self._retry_timer: asyncio.TimerHandle | None = None
        self._held_timer: asyncio.TimerHandle | None = None
        self._closed = False

    # ------------------------------------------------------------------------------------------ followed partitions

    def add(self, followed: FollowedPartition) -> None:
        self.followed[followed.key] = followed
        if followed.log.durability.blocked_from < 0:
            self._mention_in_turn(followed)
            self._pump_soon()
        else:  # its last records, from an earlier role or leader, are not on the device yet
            self._held[followed] = None
            self._fetchers.on_appended(followed.partition)

    def remove(self, followed: FollowedPartition) -> None:
        if self.followed.get(followed.key) is followed:
            del self.followed[followed.key]
            self._answering.clear()
        followed.request_number = NOT_REQUESTED
        self._set_aside(followed)
        if followed in self._held:
            # The other partitions waited for it, and no `resume` for it will follow.
            del self._held[followed]
            self._pump_soon()
        self._delays.discard(followed)
        self._fetchers.truncations.discard(followed)
        self._throttled.pop(followed, None)
        self._unpaused.pop(followed, None)

    def resume(self, followed: FollowedPartition) -> None:
        if followed in self._held:
            del self._held[followed]
            self._mention_in_turn(followed)
            self._pump_soon()

    def retry_now(self) -> None:
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
            self._backoff.reset()
            self._pump_soon()

    def close(self) -> None:
        self._closed = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        if self._throttle_timer is not None:
            self._throttle_timer.cancel()
        if self._held_timer is not None:
            self._held_timer.cancel()
        self._delays.close()
        self._bounds.forget()
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def check_progress(self) -> None:
        answered = self._requests_answered + self._bounds.answered_count
        arrived_bytes = 0 if self._link is None else self._link.arrived_bytes
        is_arriving = arrived_bytes - self._arrived_bytes_at_check >= ARRIVING_BYTES
        is_silent = answered == self._answered_at_check and not is_arriving
        if self._owes_answer and is_silent and self._link is not None:
            logger.warning("broker %d does not answer: closing the connection to it", self.leader_id)
            self._broken("it does not answer")
        self._answered_at_check = answered if self._owes_answer else -1
        self._arrived_bytes_at_check = arrived_bytes
        if self._failure and self._failed_at_check:
            logger.warning(
                "no records come from broker %d for the replicas here that follow it (%d): %s",
                self.leader_id, len(self.followed), self._failure,
            )  # fmt: skip
        self._failed_at_check = bool(self._failure)

    @property
    def _owes_answer(self) -> bool:
        return self._requests_sent > self._requests_answered or self._bounds.is_open

    def _set_aside(self, followed: FollowedPartition) -> None:
        """Remove the partition from the requests and from the session, until `_mention`."""
        self._changed.pop(followed, None)
        followed.request_number = NOT_REQUESTED
        if followed.in_session:
            followed.in_session = False
            self._forgotten[followed.key] = None

    def _mention(self, followed: FollowedPartition) -> None:
        """Mention the partition in the next request. If that request was to remove it, the session still has it."""
        followed.request_number = NOT_REQUESTED
        self._changed[followed] = None
        if followed.partition.throttled_as_follower:
            self._unpaused[followed] = None
        if followed.key in self._forgotten:
            del self._forgotten[followed.key]
            followed.in_session = True

    # ------------------------------------------------------------------------------------------------------ requests

    def _pump_soon(self) -> None:
        if not self._pumping and not self._closed:
            self._pumping = True
            self._loop.call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._pumping = False
        self._pump()

    def _pump(self) -> None:
        """Send the next request if one is due."""
        if self._closed or self._retry_timer is not None:
            return
        if self._is_rate_due:
            self._keep_rate()
        is_open = self._requests_sent - self._requests_answered
        if is_open and (is_open >= OPEN_MAX or not self._session_epoch or not self._changed):
            return
        if not self._changed:
            if not self._session_epoch:
                return
            if any(each.in_session for each in self._held):
                if self._held_timer is None:
                    self._held_timer = self._loop.call_later(HELD_S, self._set_held_aside)
                return
            if not any(each.in_session for each in self.followed.values()):
                return
        link = self._link or self._connect()
        if link is None:
            return
        if self._template.broker_epoch != self._fetchers.broker_epoch():
            self._template = self._fetchers.template()
        for followed in self._held:
            self._set_aside(followed)
        changed = self._changed
        self._requests_sent += 1
        if len(changed) == 1 and not self._forgotten and not self._held and self._session_epoch:
            (followed,) = changed
            log = followed.log
            offset = log.log_end_offset
            body: bytes | bytearray = self._template.one(
                self._session_id, self._session_epoch, *followed.key, followed.leader_epoch, offset,
                log.leader_epochs.latest, log.log_start_offset,
            )  # fmt: skip
            followed.request_number, followed.requested_offset, followed.in_session = self._requests_sent, offset, True
        else:
            body = self._request_for_many()
        changed.clear()
        if self._session_epoch:
            self._session_epoch = self._session_epoch + 1 if self._session_epoch < EPOCH_MAX else 1
        link.request(FETCH, VERSION, body, self._on_answer)

    def _set_held_aside(self) -> None:
        """A sync takes its time: fetch the other partitions meanwhile."""
        self._held_timer = None
        for followed in self._held:
            self._set_aside(followed)
        self._pump()

    def _ask_on(self, followed: FollowedPartition) -> None:
        """A fast `_pump`, for when only the partition of the last response has changed."""
        if self._changed.pop(followed, self) is self:
            self._pump()
            return
        link, log = self._link, followed.log
        assert link is not None
        if self._template.broker_epoch != self._fetchers.broker_epoch():
            self._template = self._fetchers.template()
        self._requests_sent = followed.request_number = self._requests_sent + 1
        offset = followed.requested_offset = log.log_end_offset
        epoch = self._session_epoch
        self._session_epoch = epoch + 1 if epoch < EPOCH_MAX else 1
        topic_id, index = followed.key
        body = self._template.one(
            self._session_id, epoch, topic_id, index, followed.leader_epoch, offset,
            log.leader_epochs.latest, log.log_start_offset,
        )  # fmt: skip
        link.request(FETCH, VERSION, body, self._on_answer)

    def _request_for_many(self) -> bytearray:
        entries = []
        for followed in self._changed:
            log = followed.log
            offset = log.log_end_offset
            latest = log.leader_epochs.latest
            entries.append((*followed.key, followed.leader_epoch, offset, latest, log.log_start_offset))
            followed.request_number, followed.requested_offset, followed.in_session = self._requests_sent, offset, True
        if len(entries) >= UNKNOWN_MIN:
            sent_s = self._many_sent_s
            if len(sent_s) == OPEN_MAX:  # an answer with one partition leaves its entry
                del sent_s[next(iter(sent_s))]
            sent_s[self._requests_sent] = self._loop.time()
        forgotten = list(self._forgotten) if self._session_epoch else []
        self._forgotten.clear()
        wait_ms_max = WAIT_MS_MAX_WHILE_HELD if self._held else UNLIMITED_WAIT_MS
        return self._template.many(self._session_id, self._session_epoch, entries, forgotten, wait_ms_max=wait_ms_max)

    def _connect(self) -> Link | None:
        endpoint = self._fetchers.endpoint_of(self.leader_id)
        if endpoint is None:
            self._failure = "it is registered without the listener that inter.broker.listener.name names here"
            self._retry_later()
            return None
        link = self._link = self._fetchers.connect(endpoint)
        self._endpoint = endpoint
        self._on_answer = partial(self._answered_on, link)
        return link

    def _retry_later(self) -> None:
        retry_ms = self._backoff.next_ms(self._fetchers.rng)
        self._retry_timer = self._loop.call_later(retry_ms / 1000, self._retry)

    def _retry(self) -> None:
        self._retry_timer = None
        self._pump()

    def _broken(self, reason: str = "") -> None:
        """The link is closed, and its session lost: start a new session after a pause."""
        self._bounds.forget()
        self._many_sent_s.clear()
        link, self._link = self._link, None
        if link is not None:
            link.close()
            self._failure = f"{self._endpoint}: {reason or link.reason}"
        self._requests_answered, self._answered_at_check = self._requests_sent, -1
        self._begin_anew(0)
        if not self._closed:
            self._fetchers.on_link(self.leader_id, False)
            if self._retry_timer is None:
                self._retry_later()

    def _begin_anew(self, session_id: int) -> None:
        """Make the next request a full one. `session_id`: the session that the leader may drop."""
        self._session_id, self._session_epoch = session_id, 0
        self._answering.clear()
        self._forgotten.clear()
        self._changed.clear()
        for followed in self.followed.values():
            followed.in_session = False
            followed.request_number = NOT_REQUESTED
            waiting = (self._delays, self._held, self._throttled, self._fetchers.truncations)
            if not any(followed in each for each in waiting):
                self._changed[followed] = None

    # ------------------------------------------------------------------------------------------------------- answers

    def _answered_on(self, link: Link | None, body: memoryview | None) -> None:
        if link is not self._link or self._closed:
            return
        if body is None:
            self._broken()
            return
        self._requests_answered += 1
        try:
            one = decode_one_fetched(body)
            followed = None if one is None else self._answering.get(one[0]) or self._recognize(one[0])
            if one is None or followed is None:
                self._take_all(body)
            elif self._requests_answered >= followed.request_number:
                self._take(followed, one[1], one[2], one[3])
                if (
                    len(self._changed) == 1
                    and self._requests_answered == self._requests_sent
                    and not (self._forgotten or self._held or self._retry_timer or self._is_rate_due or self._closed)
                ):
                    self._ask_on(followed)
                    return
        except MalformedMessage as error:
            logger.error("the answer of broker %d is not a Fetch response: %s", self.leader_id, error)
            self._broken()
            return
        self._pump()

    def _recognize(self, begin: bytes) -> FollowedPartition | None:
        """The partition whose answers in this session begin so; None if it is not followed, or for any other answer."""
        key = partition_answered(begin, self._session_id) if self._session_epoch else None
        followed = None if key is None else self.followed.get(key)
        if followed is not None:
            self._answering[begin] = followed
        return followed

    def _take_all(self, body: memoryview) -> None:
        now_s = self._loop.time()
        exchange_ms = (now_s - self._many_sent_s.pop(self._requests_answered, now_s)) * 1000
        answer = decode_fetched(body)
        if answer is None:
            raise MalformedMessage(f"{len(body)} bytes")
        code, session_id, partitions = answer
        if code:
            logger.info("broker %d refuses the fetch session: %s", self.leader_id, ErrorCode.of(code).name)
            self._begin_anew(0 if code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND else self._session_id)
            if code not in SESSION_ERRORS and self._retry_timer is None:
                self._retry_later()
            return
        self._backoff.reset()
        if not self._session_epoch:
            self._session_id, self._session_epoch = session_id, 1
            self._failure = ""
            self._fetchers.on_link(self.leader_id, True)
        for topic_id, index, error, high_watermark, log_start_offset, records, diverging in partitions:
            followed = self.followed.get((topic_id, index))
            if followed is None or self._requests_answered < followed.request_number:
                continue
            if error:
                self._refused(followed, error, exchange_ms)
            elif diverging is not None:
                self._in_turn(followed, partial(self._diverged, followed, *diverging))
            else:
                self._take(followed, high_watermark, log_start_offset, records)
        if not session_id:  # the leader has no room for a session: every request is a full one
            self._begin_anew(0)

    def _take(
        self, followed: FollowedPartition, high_watermark: int, log_start_offset: int, records: memoryview | None
    ) -> None:
        partition, log = followed.partition, followed.log
        followed.leader_high_watermark = high_watermark
        try:
            if records:
                self._fetchers.bytes_in += len(records)
                now_ms = self._clock_ms()
                assert not partition.leads
                # `Partition.append_as_follower` would come to it; nearly every answer saves the way.
                if append_usual_as_follower(log, records, now_ms, partition.leader_epoch) is None:
                    if _OFFSET.unpack_from(records)[0] < log.log_end_offset != log.log_start_offset:
                        self._overlapped(followed, records, log_start_offset)
                        return
                    partition.append_as_follower(records, now_ms)
                followed.request_number = NOT_REQUESTED
                durability = log.durability
                if durability.blocked_from < 0:
                    self._changed[followed] = None
                else:
                    self._held[followed] = None
                if durability.is_wanted or durability.blocked_from >= 0:
                    self._fetchers.on_appended(partition)
            if partition.adopt(high_watermark, log_start_offset) and followed not in self._held:
                self._mention(followed)  # DeleteRecords at the leader waits for the new log start
            if partition.throttled_as_follower and records:
                self._throttle(followed, len(records))
            if followed.failures:
                followed.failures = 0
        except Exception as error:
            self._cannot_write(followed, error)

    def _cannot_write(self, followed: FollowedPartition, error: Exception) -> None:
        """Delay or give up this partition only; the leader's other partitions continue."""
        partition = followed.partition
        if isinstance(error, UnexplainedGap):
            self._fetchers.on_gap(partition, error)
        if isinstance(error, KafkaError | DamagedRecords) or followed.log.can_retry(error):
            logger.error("%s-%d: %s", partition.topic, partition.index, error)
            if isinstance(error, OSError):
                self._fetchers.on_shortage()
            self._delay(followed)
        elif isinstance(error, OSError | CorruptLog):
            self._fetchers.failed(partition, error)
        else:
            logger.error("%s-%d: a bug", partition.topic, partition.index, exc_info=error)
            self._delay(followed)

    def _throttle(self, followed: FollowedPartition, size_bytes: int) -> None:
        """Count the records.

        A replica that had all committed records does not count: it is not throttled, so it may be faster than the rate,
        and those that lag would wait for it.
        """
        if followed.requested_offset < followed.leader_high_watermark:
            self._fetchers.throttle.record(size_bytes, self._loop.time() * 1000)
            self._is_rate_due = True
            self._unpaused[followed] = None

    @staticmethod
    def _is_limited(followed: FollowedPartition) -> bool:
        """Whether the rate holds for the partition: not for a replica in the ISR, or with all committed records."""
        partition = followed.partition
        return (
            partition.throttled_as_follower
            and not partition.is_in_isr
            and not 0 <= followed.leader_high_watermark <= followed.log.log_end_offset
        )

    def _pause_ms(self) -> float:
        """The wait for the rate. One below RESUME_MS is none: its bytes stay counted, and later ones wait longer."""
        wait_ms = self._fetchers.throttle.pause_ms(self._loop.time() * 1000)
        return wait_ms if wait_ms >= RESUME_MS else 0.0

    def _keep_rate(self) -> None:
        """Once the rate is used up, pause the partitions for which it holds: each would bring an answer above it.
        Until then the next ones that wait continue.
        """
        self._is_rate_due = False
        if not self._pause_ms():
            self._end_throttle_of(RESUMED_AT_ONCE)
            return
        unpaused: Collection[FollowedPartition]
        unpaused, self._unpaused = self._unpaused, {}
        now_ms = self._loop.time() * 1000
        if now_ms >= self._all_due_ms:  # thousands may be followed
            self._all_due_ms = now_ms + FREED_MS
            unpaused = self.followed.values()
        for followed in unpaused:
            is_asked_for = followed.in_session or followed in self._changed
            if is_asked_for and followed not in self._held and self._is_limited(followed):
                self._pause(followed)

    def _mention_in_turn(self, followed: FollowedPartition) -> None:
        if self._is_limited(followed) and self._pause_ms():
            self._pause(followed)
        else:
            self._mention(followed)

    def _pause(self, followed: FollowedPartition) -> None:
        self._set_aside(followed)
        self._throttled[followed] = None
        if self._throttle_timer is None:
            self._arm_throttle(self._pause_ms())

    def _arm_throttle(self, wait_ms: float) -> None:
        self._throttle_timer = self._loop.call_later((wait_ms or RESUME_MS) / 1000, self._look_at_rate)

    def _look_at_rate(self) -> None:
        """Continue with partitions that wait for the rate, or wait longer if it is used up."""
        self._throttle_timer = None
        if self._closed or not self._throttled:
            return
        now_ms = self._loop.time() * 1000
        is_unlimited = self._fetchers.throttle.bytes_per_s == UNLIMITED
        if is_unlimited or now_ms >= self._freed_due_ms:  # thousands may wait
            self._freed_due_ms = now_ms + FREED_MS
            for followed in list(self._throttled):
                if is_unlimited or not self._is_limited(followed):
                    del self._throttled[followed]
                    self._mention(followed)
        wait_ms = self._pause_ms()
        if not wait_ms:
            self._end_throttle_of(RESUMED_AT_ONCE)
        if self._throttled:
            self._arm_throttle(min(wait_ms, max(self._freed_due_ms - now_ms, RESUME_MS)))
        self._pump()

    def _end_throttle_of(self, count: int) -> None:
        for followed in list(islice(self._throttled, count)):
            del self._throttled[followed]
            self._mention(followed)

    def _in_turn(self, followed: FollowedPartition, truncate: Callable[[], None]) -> None:
        """Truncate the partition's log when its turn comes. Until then no request mentions it."""

        def truncate_if_followed() -> None:
            if self.followed.get(followed.key) is followed and not self._closed:
                truncate()
                self._pump_soon()

        self._set_aside(followed)
        self._fetchers.truncations.do(followed, truncate_if_followed)

    def _overlapped(self, followed: FollowedPartition, records: memoryview, leader_start: int) -> None:
        """Handle records that this log already has: a repeated response, or a batch that spans this log's end.

        Raises CORRUPT_MESSAGE for a batch that overlaps committed records, because no leader sends one. Committed
        records are not truncated for it, except where the leader has deleted all of them, up to inside of the batch.
        """
        log = followed.log
        if followed.requested_offset != log.log_end_offset:
            followed.request_number = NOT_REQUESTED
            self._changed[followed] = None
            return
        base_offset = check_first_holds(records, log.log_end_offset)
        if leader_start >= log.log_end_offset:
            self._truncate(followed, leader_start, empties=True)
            return
        if base_offset < max(log.high_watermark, log.log_start_offset):
            raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"a batch of offset {base_offset}, which is committed here")
        self._truncate(followed, base_offset)

    def _diverged(self, followed: FollowedPartition, leader_epoch: int, leader_end: int) -> None:
        log = followed.log
        try:
            own_epoch, own_end = log.confirmed_end_of_epoch(leader_epoch)
        except ColdRead as cold:
            self._fetchers.on_cold(cold)
            self._delay(followed)
            return
        except Exception as error:
            self._cannot_write(followed, error)
            return
        self._truncate(followed, truncation_offset(leader_epoch, leader_end, own_epoch, own_end, log.log_end_offset))

    def _truncate(self, followed: FollowedPartition, offset: int, *, empties: bool = False) -> None:
        """Truncate the log to `offset`, or empty it to start at `offset`."""
        try:
            if empties:
                followed.log.truncate_fully_and_start_at(offset)
            else:
                followed.partition.truncate_to(offset, self._clock_ms())
        except Exception as error:
            self._cannot_write(followed, error)
            return
        self._mention(followed)

    # ------------------------------------------------------------------------------------------------------ refusals

    def _refused(self, followed: FollowedPartition, code: int, exchange_ms: float) -> None:
        partition = followed.partition
        logger.log(
            logging.INFO if followed.failures >= FAILURES_BEFORE_INFO else logging.DEBUG,
            "%s-%d at %d: broker %d answers %s", partition.topic, partition.index, followed.log.log_end_offset,
            self.leader_id, ErrorCode.of(code).name,
        )  # fmt: skip
        self._delay(followed, exchange_ms if code in _UNKNOWN else 0.0)
        if REACTIONS.get(ErrorCode.of(code)) is Reaction.RESET:
            self._delays.discard(followed)
            if self._link is not None:
                self._bounds.ask(self._link, followed)

    def _delay(self, followed: FollowedPartition, exchange_ms: float = 0.0) -> None:
        """Omit the partition from requests for a while."""
        self._set_aside(followed)
        self._delays.add(followed, exchange_ms)

    def _end_delays(self, delayed: Collection[FollowedPartition]) -> None:
        for followed in delayed:
            self._mention(followed)
        self._pump()

    def _on_bounds(self, followed: FollowedPartition, bounds: tuple[int, int] | None) -> None:
        """Truncate the log by the leader's (log start, log end) and `follower.out_of_range`; None: ask again later."""
        if self.followed.get(followed.key) is not followed:
            return
        if bounds is None:
            self._delay(followed)
        else:
            self._in_turn(followed, partial(self._reset, followed, *bounds))

    def _reset(self, followed: FollowedPartition, leader_start: int, leader_end: int) -> None:
        log = followed.log
        reset = out_of_range(leader_start, leader_end, log.log_end_offset)
        if reset is None:
            self._delay(followed)
            return
        self._truncate(followed, reset.offset, empties=reset.empties)
