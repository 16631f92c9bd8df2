"""What a coordinator wants done: the vocabulary between a pure coordinator and the runtime that serves it.

Here live `Outcome` (answers to send now, writes to make, lines to log), `Write` (records that become state together,
and the answers that wait for them) and `Coordinator` (what the runtime asks of a coordinator). Nothing here does
anything. The invariant: whoever asked is known here only as a number, its token, so that a coordinator never holds a
socket, future or task.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tidelog.protocol.errors import ErrorCode, KafkaError


class Now(NamedTuple):
    """The time, twice: `steady_ms` never jumps and is for deadlines, `wall_ms` is since 1970 and goes into records."""

    steady_ms: int
    wall_ms: int


class Caller(NamedTuple):
    """Who sent a request: the token its answer goes to, and what the request header said."""

    token: int
    api_version: int
    client_id: str = ""
    client_host: str = ""


@dataclass(slots=True)
class Write:
    """Records that are appended as one batch and replayed once committed.

    `replies` go out after the replay; if the append fails they are refused with its error. `context` comes back to the
    coordinator through `on_committed` or `on_failed`.
    """

    records: list[Any]
    replies: list[tuple[int, Any]] = field(default_factory=list)
    context: Any = None


class Outcome:
    """What one message, or one deadline, leads to. Replies leave before writes are made."""

    __slots__ = ("notes", "now_ms", "replies", "wall_ms", "warnings", "writes")

    def __init__(self, now: Now) -> None:
        self.now_ms, self.wall_ms = now
        self.replies: list[tuple[int, Any]] = []
        self.writes: list[Write] = []
        self.notes: list[str] = []  # for the log: events of a group's life, never one per request
        self.warnings: list[tuple[str, str]] = []  # for the log: (kind, text), of each kind one now and then

    def reply(self, token: int, response: Any) -> None:
        self.replies.append((token, response))

    def refuse(self, token: int, error: ErrorCode) -> None:
        """The whole request is refused; how that looks in its API and version is not known here."""
        self.replies.append((token, KafkaError(error)))

    def write(self, records: list[Any], context: Any = None) -> None:
        self.writes.append(Write(records, context=context))

    def reply_when_stored(self, records: list[Any], token: int, response: Any, context: Any = None) -> None:
        self.writes.append(Write(records, replies=[(token, response)], context=context))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, kind: str, text: str) -> None:
        """For what strangers can cause as often as they like."""
        self.warnings.append((kind, text))


class RandomBits(Protocol):
    """The part of `random.Random` that a coordinator needs."""

    def getrandbits(self, k: int, /) -> int: ...


class Coordinator(Protocol):
    """One partition's worth of state. The runtime calls it from one thread; every call is short and does no I/O."""

    def encode(self, record: Any) -> tuple[bytes, bytes | None]:
        """Key and value bytes of a record as the internal topic keeps them; None is a tombstone."""

    def decode(self, key: bytes, value: bytes | None) -> Any | None:
        """The inverse of `encode`; None for a record of a kind this coordinator does not know."""

    def replay(self, offset: int, record: Any, producer_id: int) -> None:
        """Make the state what the committed record at this log offset says (producer id -1: no transaction)."""

    def replay_end_transaction(self, producer_id: int, committed: bool) -> None:
        """A transaction marker in the log."""

    def on_loaded(self, now: Now) -> Outcome:
        """The whole log was replayed; this node serves the partition from now on."""

    def close(self) -> None:
        """This node serves the partition no longer."""

    def on_committed(self, context: Any, now: Now) -> Outcome:
        """The write that carried this context is committed and replayed."""

    def on_failed(self, context: Any, error: ErrorCode, in_log: bool, now: Now) -> Outcome:
        """The write that carried this context failed; `in_log`.

        It is not committed in time, but may yet be replayed.
        """

    def next_deadline_ms(self) -> int | None:
        """When `on_deadline` wants to be called, in steady time; earlier than needed does no harm."""

    def on_deadline(self, now: Now) -> Outcome:
        """Do what is due."""
