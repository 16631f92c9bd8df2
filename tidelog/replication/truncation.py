"""Truncates the log of a follower, or of a copy in another log directory, to where it differs from its leader's.

Invariant: no copy of a compacted log lacks a record because of one that is cut from it. The cleaner may have removed
records that the cut ones had superseded, and which are the newest of their keys in the leader's log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidelog.storage.log.partition_log import PartitionLog


def truncate_copy(log: PartitionLog, offset: int) -> None:
    """Truncate the log to `offset`. Below what may have been cleaned (an unclean election) it begins again instead.

    Raises the errors of the log's `truncate_to`.
    """
    if log.config.is_compacted and offset < max(log.high_watermark, log.cleaned_offset):
        log.truncate_fully_and_start_at(min(offset, log.log_start_offset))
    else:
        log.truncate_to(offset)
