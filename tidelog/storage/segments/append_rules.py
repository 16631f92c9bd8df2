"""The limits of one log's configuration, in the form that the append path needs. Pure."""

from __future__ import annotations

from typing import Final

from tidelog.storage.segments.log_config import INT64_MAX, LogConfig

AS_PRODUCED: Final = -1
_CODECS: Final = {"uncompressed": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
# The size bound of a batch's records for an inspection. Larger ones get MESSAGE_TOO_LARGE: Java's producer splits them.
INSPECTED_BYTES_MAX: Final = 16 * 1024 * 1024


class AppendRules:
    """Replaced as a whole when the configuration changes. Only `inspected_batch` changes with each inspected batch."""

    __slots__ = (
        "after_max_ms",
        "before_max_ms",
        "checks_keys",
        "codec",
        "inspected_batch",
        "inspected_bytes_max",
        "level",
        "looks_inside",
        "max_message_bytes",
        "stamps_append_time",
        "takes_as_sent",
    )

    def __init__(self, config: LogConfig) -> None:
        self.max_message_bytes = config.max_message_bytes
        self.inspected_batch: memoryview | None = None  # the inspected batch that is appended now
        self.inspected_bytes_max = max(INSPECTED_BYTES_MAX, config.max_message_bytes)
        self.after_max_ms = config.message_timestamp_after_max_ms
        self.before_max_ms = config.message_timestamp_before_max_ms
        self.stamps_append_time = config.stamps_append_time
        self.checks_keys = config.is_compacted
        self.codec = _CODECS.get(config.compression_type, AS_PRODUCED)
        gzip_level = None if config.compression_gzip_level == -1 else config.compression_gzip_level
        levels = {1: gzip_level, 3: config.compression_lz4_level, 4: config.compression_zstd_level}
        self.level = levels.get(self.codec)
        limits_age = self.before_max_ms != INT64_MAX and not self.stamps_append_time
        self.looks_inside = self.checks_keys or limits_age or self.codec != AS_PRODUCED
        self.takes_as_sent = not self.looks_inside and not self.stamps_append_time
