"""The settings of one log, with Kafka's names and defaults (org.apache.kafka.storage.internals.log.LogConfig).

It has only the settings that storage uses. The broker has the table of all topic configurations, with validators and
documentation. The caller passes validated values: text that does not parse is its bug and raises ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tidelog.protocol.java_text import parse_double, parse_integer, split_list, trim

INT64_MAX: Final = 2**63 - 1
MAX_RELATIVE_OFFSET: Final = 2**31 - 1
MAX_POSITION: Final = 2**31 - 1
"""A row of the offset index has 32 bits for an offset, relative to the segment's, and 32 for a position."""
DAY_MS: Final = 24 * 60 * 60 * 1000
# A look-up reads all batch headers since the last index row, and blocks the loop meanwhile. A row costs almost nothing.
INDEX_INTERVAL_BYTES_MAX: Final = 256 * 1024
# A broker setting in Kafka, passed along.
VERIFICATION: Final = "transaction.partition.verification.enable"

_INTEGERS: Final = {
    "segment.bytes": "segment_bytes",
    "segment.ms": "segment_ms",
    "segment.jitter.ms": "segment_jitter_ms",
    "segment.index.bytes": "segment_index_bytes",
    "index.interval.bytes": "index_interval_bytes",
    "retention.ms": "retention_ms",
    "retention.bytes": "retention_bytes",
    "file.delete.delay.ms": "file_delete_delay_ms",
    "flush.messages": "flush_messages",
    "flush.ms": "flush_ms",
    "max.message.bytes": "max_message_bytes",
    "message.timestamp.before.max.ms": "message_timestamp_before_max_ms",
    "message.timestamp.after.max.ms": "message_timestamp_after_max_ms",
    "compression.gzip.level": "compression_gzip_level",
    "compression.lz4.level": "compression_lz4_level",
    "compression.zstd.level": "compression_zstd_level",
    "delete.retention.ms": "delete_retention_ms",
    "min.compaction.lag.ms": "min_compaction_lag_ms",
    "max.compaction.lag.ms": "max_compaction_lag_ms",
    "producer.id.expiration.ms": "producer_id_expiration_ms",  # a broker setting in Kafka, passed along
}


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Sizes in bytes, times in ms. A retention of -1 has no limit."""

    segment_bytes: int = 1024 * 1024 * 1024
    segment_ms: int = 7 * DAY_MS
    segment_jitter_ms: int = 0
    segment_index_bytes: int = 10 * 1024 * 1024
    index_interval_bytes: int = 4096
    retention_ms: int = 7 * DAY_MS
    retention_bytes: int = -1
    file_delete_delay_ms: int = 60_000
    flush_messages: int = INT64_MAX
    flush_ms: int = INT64_MAX
    max_message_bytes: int = 1024 * 1024 + 12
    message_timestamp_type: str = "CreateTime"
    message_timestamp_before_max_ms: int = INT64_MAX
    message_timestamp_after_max_ms: int = 60 * 60 * 1000
    cleanup_policy: frozenset[str] = frozenset({"delete"})
    delete_retention_ms: int = DAY_MS
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = INT64_MAX
    min_cleanable_dirty_ratio: float = 0.5
    preallocate: bool = False
    compression_type: str = "producer"
    compression_gzip_level: int = -1
    compression_lz4_level: int = 9
    compression_zstd_level: int = 3
    producer_id_expiration_ms: int = DAY_MS
    verifies_transactions: bool = False

    @property
    def is_compacted(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def is_deleted_by_age_or_size(self) -> bool:
        return "delete" in self.cleanup_policy

    @property
    def stamps_append_time(self) -> bool:
        return self.message_timestamp_type == "LogAppendTime"

    @classmethod
    def from_topic_config(cls, values: Mapping[str, str]) -> LogConfig:
        """Kafka's topic configuration keys ("segment.bytes": "1024", ...) over the defaults; other keys are ignored."""
        settings: dict[str, object] = {
            field: parse_integer(trim(values[key]), 64) for key, field in _INTEGERS.items() if key in values
        }
        if "message.timestamp.type" in values:
            settings["message_timestamp_type"] = values["message.timestamp.type"]
        if "compression.type" in values:
            settings["compression_type"] = values["compression.type"]
        if "cleanup.policy" in values:
            settings["cleanup_policy"] = frozenset(filter(None, split_list(values["cleanup.policy"])))
        if "preallocate" in values:
            settings["preallocate"] = trim(values["preallocate"]).lower() == "true"
        if VERIFICATION in values:
            settings["verifies_transactions"] = trim(values[VERIFICATION]).lower() == "true"
        if "min.cleanable.dirty.ratio" in values:
            settings["min_cleanable_dirty_ratio"] = parse_double(values["min.cleanable.dirty.ratio"])
        if "internal.segment.bytes" in values:  # for tests: without the lower bound of segment.bytes
            settings["segment_bytes"] = parse_integer(trim(values["internal.segment.bytes"]))
        config = cls(**settings)  # type: ignore[arg-type]
        if config.index_interval_bytes > INDEX_INTERVAL_BYTES_MAX:
            config = replace(config, index_interval_bytes=INDEX_INTERVAL_BYTES_MAX)
        if config.is_compacted and config.max_compaction_lag_ms < config.segment_ms:
            # Only a closed segment can be cleaned, so it must be rolled in time (LogConfig.maxSegmentMs).
            return replace(config, segment_ms=config.max_compaction_lag_ms)
        return config
