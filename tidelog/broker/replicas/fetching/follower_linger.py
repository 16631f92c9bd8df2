"""Decides when an answer to a follower waits briefly, so that it carries more records. Pure.

On an idle processor a follower fetches again before the next request of a busy producer arrives, so every few records
cost a round trip of their own on three nodes. A busy session therefore answers a little later. Producers that wait for
acknowledgements send nothing meanwhile, so after a wait without new records the session does not wait for some time.
"""

from __future__ import annotations

LINGER_MS = 2.0
BUSY_BYTES_PER_MS = 3_000
_WINDOW_MS = 20.0
_REST_MS_MIN = 100.0
_REST_MS_MAX = 3_200.0


class FollowerLinger:
    """The lingering of one session. `news` counts the appends for it; times are in ms of the loop's clock.

    `holds_records`: the answer that waits has records. Otherwise it has a high watermark only.
    """

    __slots__ = (
        "_rest_ms", "_resting_until_ms", "_window_began_ms", "_window_bytes", "busy", "holds_records", "news",
        "news_at_start",
    )  # fmt: skip

    def __init__(self) -> None:
        self.busy = False
        self.holds_records = True
        self.news = self.news_at_start = 0
        self._window_bytes = 0
        self._window_began_ms = self._resting_until_ms = 0.0
        self._rest_ms = _REST_MS_MIN

    def sent(self, size_bytes: int, now_ms: float) -> None:
        """An answer has carried `size_bytes` of records."""
        self._window_bytes += size_bytes
        elapsed_ms = now_ms - self._window_began_ms
        if elapsed_ms >= _WINDOW_MS:
            self.busy = self._window_bytes >= BUSY_BYTES_PER_MS * elapsed_ms
            self._window_began_ms, self._window_bytes = now_ms, 0

    def may_wait(self, now_ms: float) -> bool:
        """Whether the answer that could be sent now waits. The caller calls `waited` when it sends the answer."""
        if not self.busy or now_ms < self._resting_until_ms:
            return False
        self.news_at_start = self.news
        return True

    def waited(self, now_ms: float) -> None:
        if not self.holds_records:
            return
        if self.news > self.news_at_start:
            self._rest_ms = _REST_MS_MIN
        else:
            self._resting_until_ms = now_ms + self._rest_ms
            self._rest_ms = min(2 * self._rest_ms, _REST_MS_MAX)
