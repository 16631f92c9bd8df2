"""Truncates the log of a follower, or of a copy in another log directory, to where it differs from its leader's.

Invariant: no copy of a compacted log lacks a record because of one that is cut from it. The cleaner may have removed
records that the cut ones had superseded, and which are the newest of their keys in the leader's log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.storage.segments.log_config import INT64_MAX

if TYPE_CHECKING:
    from tidelog.storage.log.partition_log import PartitionLog


def truncate_copy(log: PartitionLog, offset: int) -> None:
    """Truncate the log to `offset`. Below what may have been cleaned (an unclean election) it begins again instead.

    Raises the errors of the log's `truncate_to`.
    """
    if offset < min(max(log.high_watermark, log.cleaned_offset), compacted_below(log)):
        log.truncate_fully_and_start_at(min(offset, log.log_start_offset))
    else:
        log.truncate_to(offset)


def compacted_below(log: PartitionLog) -> int:
    """The offset below which the topic is compacted, or was once: there the cleaner may have removed records."""
    return INT64_MAX if log.config.is_compacted else max(log.cleaned_offset, log.gaps_explained_below)
