"""Takes back an append that has failed, so that the log ends where it did before.

A write may fail in part. Memory may run out at any step: before the write, or while the segment, its indexes and the
producers take note of the batches. If the log kept a part of it, the next batch would get the same offsets again.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from tidelog.storage.log.recovery import RepairedLog, reload_producers
from tidelog.storage.segments.lookup import refresh_max_timestamp

if TYPE_CHECKING:
    from tidelog.storage.segments.segment import Segment

NOT_TAKEN_BACK: Final = "an append ended halfway, and could not be taken back"
"""The log's failure until `take_back` has ended. Its callers set it, because no memory may be left for the call."""


class FailingLog(RepairedLog, Protocol):
    """The part of `PartitionLog` that `take_back` uses."""

    directory: str
    failure: str | None


def take_back(log: FailingLog, segment: Segment, position: int, error: OSError | MemoryError) -> NoReturn:
    """Cut the log at its end before the append, `position` in the active segment, and raise the error.

    A lack of memory is raised as the OSError of a shortage. A log that cannot be cut is unusable until a restart.
    """
    try:
        if isinstance(error, OSError):  # the write itself: nothing else has changed
            segment.take_back_write()
        else:
            _forget(log, segment, position)
    except OSError as second:
        log.failure = f"{log.directory}: {second} after {error}"
        raise error from None
    log.failure = None
    if isinstance(error, OSError):
        raise error
    raise OSError(errno.ENOMEM, "no memory for an append", segment.path) from None


def _forget(log: FailingLog, segment: Segment, position: int) -> None:
    end_offset = log.log_end_offset
    is_complete = not log.lacks_producers and not log.damaged_ranges()
    earlier = log.producers.earlier(end_offset) if is_complete else None
    segment.truncate(position, end_offset)
    refresh_max_timestamp(segment)
    if earlier is not None:
        log.producers.return_to(earlier)
    else:
        reload_producers(log)
