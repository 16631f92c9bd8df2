"""The interface between a pure coordinator and the runtime: outcomes, writes and the coordinator's
methods.

An `Outcome` holds the answers to send now, the writes to make and the lines to log. A `Write` holds
records that become state together, and the answers that wait for them. `Coordinator` lists the
methods that the runtime calls. Invariant: a coordinator knows a request only by a number, its
token, and so never holds a socket, future or task.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tidelog.protocol.batches.batch_builder import BatchBuilder
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.producers.verification import TransactionAppend


class Now(NamedTuple):
    """The time: `steady_ms` is monotonic, for deadlines; `wall_ms` is since 1970, for records."""

    steady_ms: int
    wall_ms: int


class Caller(NamedTuple):
    """The sender of a request: the token for the answer, and fields of the request header."""

    token: int
    api_version: int
    client_id: str = ""
    client_host: str = ""


class WriteTransaction(NamedTuple):
    """The transaction of a producer to which a write belongs."""

    producer_id: int
    producer_epoch: int
    append: TransactionAppend = TransactionAppend()


class TransactionEnd(NamedTuple):
    """The end of a transaction, which a write may be in place of records: a marker in the log."""

    is_commit: bool
    coordinator_epoch: int


@dataclass(slots=True)
class Write:
    """Records that are appended as one batch and replayed after their commit.

    `replies` are sent after the replay; a failed append replaces them with its error. The runtime
    hands `context` to the coordinator's `on_committed` or `on_failed`. With `transaction` the
    records are transactional; `end` ends the transaction, and there are no records. `batch` has
    the records of a large write, encoded before.
    """

    records: list[Any]
    replies: list[tuple[int, Any]] = field(default_factory=list)
    context: Any = None
    transaction: WriteTransaction | None = None
    end: TransactionEnd | None = None
    batch: BatchBuilder | None = None


class Outcome:
    """The result of one request or deadline. The runtime sends the replies, makes the writes, and
    hands on the messages, in this order.
    """

    __slots__ = ("messages", "notes", "now_ms", "replies", "wall_ms", "warnings", "writes")

    def __init__(self, now: Now) -> None:
        self.now_ms, self.wall_ms = now
        self.replies: list[tuple[int, Any]] = []
        self.writes: list[Write] = []
        self.messages: list[Any] = []  # for other nodes; the coordinator's service sends them
        self.notes: list[str] = []  # lines for the log, never one per request
        self.warnings: list[tuple[str, str]] = []  # (kind, text) for the log, limited in rate by kind

    def reply(self, token: int, response: Any) -> None:
        self.replies.append((token, response))

    def refuse(self, token: int, error: ErrorCode) -> None:
        """Refuse the whole request; its API's handler turns the KafkaError into a response."""
        self.replies.append((token, KafkaError(error)))

    def write(self, records: list[Any], context: Any = None) -> None:
        self.writes.append(Write(records, context=context))

    def reply_when_stored(self, records: list[Any], token: int, response: Any, context: Any = None) -> None:
        self.writes.append(Write(records, replies=[(token, response)], context=context))

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, kind: str, text: str) -> None:
        """Log a warning that any client can cause, at a limited rate for each kind."""
        self.warnings.append((kind, text))


class RandomBits(Protocol):
    """The part of `random.Random` that a coordinator needs."""

    def getrandbits(self, k: int, /) -> int: ...


class Coordinator(Protocol):
    """The state of one partition. The runtime calls it from one thread; calls are short and do no
    I/O.
    """

    def encode(self, record: Any) -> tuple[bytes, bytes | None]:
        """Key and value bytes of a record in the internal topic; the value None is a tombstone."""

    def decode(self, key: bytes, value: bytes | None) -> Any | None:
        """The inverse of `encode`; None for a record of an unknown kind."""

    def replay(self, offset: int, record: Any, producer_id: int) -> None:
        """Apply the committed record at this log offset to the state (producer id -1: no
        transaction).
        """

    def replay_end_transaction(self, producer_id: int, committed: bool, count_max: int) -> int:
        """Apply a transaction marker to the next `count_max` records of its transaction, and return to
        how many. After fewer the transaction has ended; until then nothing else is replayed.
        """

    def restore_some(self, now: Now) -> bool:
        """The log is replayed: restore a part of the state, short enough for a turn of the loop. Whether
        there is more to restore before `on_loaded`.
        """

    def on_loaded(self, now: Now) -> Outcome:
        """The log is replayed; this node serves the partition from now on."""

    def close(self) -> None:
        """This node no longer serves the partition."""

    def on_committed(self, context: Any, now: Now) -> Outcome | None:
        """The write with this context is committed and replayed. None: there is nothing to do."""

    def on_failed(self, context: Any, error: ErrorCode, in_log: bool, now: Now) -> Outcome:
        """The write with this context has failed.

        `in_log`: it is in the log but was not committed in time; `on_committed` follows if it is after all.
        """

    def next_deadline_ms(self) -> int | None:
        """The steady time of the next `on_deadline`; an earlier call is harmless."""

    def on_deadline(self, now: Now) -> Outcome:
        """Handle deadlines that are due, as many as a turn of the loop has time for."""
