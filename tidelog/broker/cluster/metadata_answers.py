"""Encoded answers to Metadata requests for all topics, which a node keeps for the clients that ask next.
Pure.

When the metadata change, very many clients that consume by a pattern ask for all topics at once. Their answers are
equal where their requests have the same version and options and came to the same listener. An answer depends on the
image, on the brokers that were fenced recently, and on the known leader of the quorum. The key of an answer has all of
these, so that an answer that is out of date does not match.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final, NamedTuple

# Answers that a node keeps.
KEPT_MAX: Final = 4
# Larger answers are made anew for each request, which paces them: a socket does not take more at once, and the rest
# waits in memory for each client.
KEPT_BYTES_MAX: Final = 256 * 1024


class AnswerKey(NamedTuple):
    """What an answer depends on. An offset of the metadata log with its epoch names one image."""

    offset: int
    epoch: int
    controller_id: int
    recently_fenced: frozenset[int]
    listener_name: str
    version: int
    has_topic_operations: bool
    has_cluster_operations: bool


class EncodedAnswer:
    """A response whose bytes are there already. It encodes as a message does, in the version of its key."""

    __slots__ = ("body", "errors")

    FIELDS: ClassVar[tuple[object, ...]] = ()
    """Its error codes are not counted again as those of a message: `errors` has them."""

    def __init__(self, body: bytes, errors: dict[int, int]) -> None:
        self.body = body
        self.errors = errors

    def write(self, out: bytearray, version: int) -> None:
        out += self.body

    def write_in_steps(self, out: bytearray, version: int) -> Iterator[None]:
        out += self.body
        yield


class MetadataAnswers:
    """The answers that this node keeps, the oldest first."""

    def __init__(self) -> None:
        self._answers: dict[AnswerKey, EncodedAnswer] = {}

    def find(self, key: AnswerKey) -> EncodedAnswer | None:
        return self._answers.get(key)

    def keep(self, key: AnswerKey, answer: EncodedAnswer) -> None:
        if len(answer.body) > KEPT_BYTES_MAX:
            return
        if key not in self._answers and len(self._answers) >= KEPT_MAX:
            del self._answers[next(iter(self._answers))]
        self._answers[key] = answer
