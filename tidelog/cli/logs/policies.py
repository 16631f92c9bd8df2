"""The compacted topics, as far as the files of a stopped node show them."""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.protocol.batches.record_batch import check_crc, iter_headers
from tidelog.protocol.batches.records import decode_batch
from tidelog.protocol.errors import KafkaError, MalformedMessage
from tidelog.protocol.internal_topics import INTERNAL_TOPICS
from tidelog.protocol.messages.metadata_records import ConfigRecord, unframe
from tidelog.storage.files.disk import Disk

_TOPIC = 2
_CONFIG_RECORD = 4


def compacted_topics(disk: Disk, directory: str) -> set[str]:
    """The internal topics, and the topics whose cleanup.policy in the metadata log has ever included compaction.

    A log that was compacted once keeps its gaps. Unreadable records are skipped here; `verify.py` reports them.
    """
    topics = set(INTERNAL_TOPICS)
    for record in _config_records(disk, directory):
        if record.resource_type == _TOPIC and record.name == "cleanup.policy" and "compact" in (record.value or ""):
            topics.add(record.resource_name)
    return topics


def _config_records(disk: Disk, directory: str) -> Iterator[ConfigRecord]:
    if not disk.exists(directory):
        return
    for entry in sorted(disk.list_directory(directory)):
        if not entry.name.endswith((".checkpoint", ".log")):
            continue
        data = disk.read_file(f"{directory}/{entry.name}")
        try:
            for position, header in iter_headers(data):
                if header.is_control or not check_crc(data, position, header):
                    continue
                for record in decode_batch(data, position, header):
                    value = record.value or b""
                    if value[1:2] == bytes((_CONFIG_RECORD,)):
                        message = unframe(value)
                        if isinstance(message, ConfigRecord):
                            yield message
        except (KafkaError, MalformedMessage):
            continue
