"""How many bytes of a log or of a snapshot a node asks for at once: what its link brings in time. Pure.

An answer that takes longer than a request may is lost. A request for as many bytes again would be lost, too, without
end: the node would never learn the metadata, or repair a log.
"""

from __future__ import annotations

HALVINGS_MAX = 6
# So many more bytes of an answer within a timeout show that a slow link still brings it. A request for the same bytes
# on a new connection would arrive no sooner.
ARRIVING_BYTES = 16 * 1024
# An answer in this part of the request timeout leaves time for one of twice the size.
QUICK = 1 / 4


class AnswerSize:
    def __init__(self, timeout_ms: float) -> None:
        self._timeout_ms = timeout_ms
        self._quick_ms = timeout_ms * QUICK
        self._halvings = 0

    def limit(self, bytes_max: int) -> int:
        """The bytes to ask for, of the `bytes_max` that are asked for over a fast link."""
        return max(1, bytes_max >> self._halvings)

    def on_lost(self) -> None:
        """No answer came in time."""
        self._halvings = min(self._halvings + 1, HALVINGS_MAX)

    def on_answer(self, took_ms: float, is_large: bool) -> None:
        """`is_large`: it has at least half of the bytes that were asked for."""
        if took_ms > self._timeout_ms:  # it went on arriving
            self.on_lost()
        elif self._halvings and is_large and took_ms <= self._quick_ms:
            self._halvings -= 1
