"""Liveness of brokers: sessions that heartbeats renew, and the states that heartbeats request.
Pure.

Sessions are in the memory of the active controller, not in the log: a new controller starts a new
session for every broker. All times are `now_ms` of one monotonic clock. Follows Kafka's
`BrokerHeartbeatManager`, except that one decision fences all brokers that die together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class BrokerState(Enum):
    FENCED = "fenced"
    UNFENCED = "unfenced"
    CONTROLLED_SHUTDOWN = "controlled shutdown"
    SHUTDOWN_NOW = "shutdown now"


@dataclass(slots=True)
class Session:
    """`epoch`: the epoch of its registration. Offsets are -1 while unknown.

    `was_heard`: whether the broker has sent anything to this controller in this epoch, over a
    connection that still stands.
    """

    epoch: int
    fenced: bool
    last_contact_ms: float
    metadata_offset: int = -1
    controlled_shutdown_offset: int = -1
    was_heard: bool = False

    @property
    def state(self) -> BrokerState:
        if self.controlled_shutdown_offset >= 0:
            return BrokerState.CONTROLLED_SHUTDOWN
        return BrokerState.FENCED if self.fenced else BrokerState.UNFENCED


class BrokerSessions:
    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._sessions: dict[int, Session] = {}

    def register(self, broker_id: int, epoch: int, *, fenced: bool, now_ms: float, was_heard: bool = False) -> None:
        """Start a session: a broker has registered, or a new controller reads it from the log."""
        self._sessions[broker_id] = Session(epoch, fenced, now_ms, was_heard=was_heard)

    def remove(self, broker_id: int) -> None:
        self._sessions.pop(broker_id, None)

    def fence(self, broker_ids: Iterable[int]) -> None:
        for broker_id in broker_ids:
            session = self._sessions.get(broker_id)
            if session is not None:
                session.fenced, session.controlled_shutdown_offset = True, -1

    def epoch_of(self, broker_id: int) -> int:
        session = self._sessions.get(broker_id)
        return -1 if session is None else session.epoch

    def last_contact_ms(self, broker_id: int) -> float:
        session = self._sessions.get(broker_id)
        return -1.0 if session is None else session.last_contact_ms

    def has_valid_session(self, broker_id: int, now_ms: float) -> bool:
        session = self._sessions.get(broker_id)
        return session is not None and not session.fenced and not self._is_stale(session, now_ms)

    def was_heard(self, broker_id: int) -> bool:
        """Whether the process of this session has sent anything to this controller, over a
        connection that still stands.
        """
        session = self._sessions.get(broker_id)
        return session is not None and session.was_heard

    def fell_silent(self, broker_id: int) -> None:
        """The connection of the broker's heartbeats has closed."""
        session = self._sessions.get(broker_id)
        if session is not None:
            session.was_heard = False

    def unfenced(self) -> list[int]:
        return [broker_id for broker_id, session in self._sessions.items() if not session.fenced]

    def stale(self, now_ms: float) -> list[int]:
        """All unfenced brokers without a heartbeat for the session timeout, to be fenced together."""
        return [
            broker_id
            for broker_id, session in self._sessions.items()
            if not session.fenced and self._is_stale(session, now_ms)
        ]

    def forgive(self, pause_ms: float) -> None:
        """Extend all sessions by a pause of this node, which could not receive heartbeats
        meanwhile.
        """
        for session in self._sessions.values():
            session.last_contact_ms += pause_ms

    def _is_stale(self, session: Session, now_ms: float) -> bool:
        return now_ms - session.last_contact_ms > self.timeout_ms

    # -- heartbeats --------------------------------------------------------------------------------------------------

    def next_state(
        self,
        broker_id: int,
        *,
        want_fence: bool,
        want_shut_down: bool,
        is_caught_up: bool,
        leads_any: bool,
    ) -> tuple[BrokerState, BrokerState]:
        """(the present state, the state after the heartbeat)."""
        session = self._sessions[broker_id]
        state = session.state
        if state is BrokerState.FENCED:
            if want_shut_down:
                return state, BrokerState.SHUTDOWN_NOW
            return state, BrokerState.UNFENCED if is_caught_up and not want_fence else state
        if state is BrokerState.UNFENCED:
            if want_fence:
                return state, BrokerState.SHUTDOWN_NOW if want_shut_down else BrokerState.FENCED
            if want_shut_down:
                return state, BrokerState.CONTROLLED_SHUTDOWN if leads_any else BrokerState.SHUTDOWN_NOW
            return state, state
        # The broker stops after all others know the new leaders.
        is_known_to_all = session.controlled_shutdown_offset <= self._lowest_active_offset()
        return state, BrokerState.SHUTDOWN_NOW if is_known_to_all and not leads_any else state

    def touch(self, broker_id: int, next_state: BrokerState, metadata_offset: int, now_ms: float) -> None:
        session = self._sessions[broker_id]
        session.last_contact_ms = now_ms
        session.was_heard = True
        session.metadata_offset = metadata_offset
        session.fenced = next_state in (BrokerState.FENCED, BrokerState.SHUTDOWN_NOW)
        if session.fenced:
            session.controlled_shutdown_offset = -1

    def enter_controlled_shutdown(self, broker_id: int, offset: int) -> None:
        """`offset`: the offset of the last record that moves the broker's leaderships away."""
        session = self._sessions[broker_id]
        if session.controlled_shutdown_offset < 0:
            session.controlled_shutdown_offset = offset

    def _lowest_active_offset(self) -> int:
        offsets = [
            session.metadata_offset
            for session in self._sessions.values()
            if not session.fenced and session.controlled_shutdown_offset < 0
        ]
        return min(offsets, default=2**63 - 1)
