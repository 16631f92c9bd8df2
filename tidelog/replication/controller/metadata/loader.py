"""The load of an image from committed values: decodes records and applies metadata transactions.
Pure.

Kafka writes large changes as BEGIN_TRANSACTION ... END_TRANSACTION (KIP-868).
Invariant: the records of a transaction take effect at its end, or never: after an
abort, or if a new leader finds it open.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tidelog.protocol.messages.metadata_records import (
    AbortTransactionRecord,
    BeginTransactionRecord,
    EndTransactionRecord,
)
from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage
from tidelog.replication.controller.metadata.record_codec import UnknownRecord, decode_record
from tidelog.replication.controller.metadata.records import ImageBuilder, MetadataError


class MetadataLoader:
    """`feed` takes batches in order; `finish` returns the image and the changes since the last
    `finish`.
    """

    def __init__(self, image: MetadataImage | None = None) -> None:
        image = MetadataImage() if image is None else image
        self._builder = ImageBuilder(image)
        self._transaction: list[Any] | None = None
        self._offset = image.offset
        self._epoch = image.epoch
        self._timestamp_ms = image.timestamp_ms
        self.is_empty = True
        self.unknown_kinds: dict[int, int] = {}

    @property
    def in_transaction(self) -> bool:
        return self._transaction is not None

    def feed(self, values: Iterable[bytes], last_offset: int, epoch: int, timestamp_ms: int) -> None:
        """Raises `MetadataError`, `MalformedMessage`."""
        for value in values:
            self.is_empty = False
            self._record(decode_record(value))
        self._offset, self._epoch, self._timestamp_ms = last_offset, epoch, timestamp_ms

    def _record(self, record: Any) -> None:
        if isinstance(record, BeginTransactionRecord):
            if self._transaction is not None:
                raise MetadataError("a metadata transaction begins inside another")
            self._transaction = []
        elif isinstance(record, (EndTransactionRecord, AbortTransactionRecord)):
            if self._transaction is None:
                raise MetadataError("a metadata transaction ends that has not begun")
            if isinstance(record, EndTransactionRecord):
                self._builder.replay_all(self._transaction)
            self._transaction = None
        elif self._transaction is not None:
            self._transaction.append(record)
        else:
            self._builder.replay(record)
        if isinstance(record, UnknownRecord):
            kind = record.value[1] if len(record.value) > 1 else -1
            self.unknown_kinds[kind] = self.unknown_kinds.get(kind, 0) + 1

    def finish(self, controller_id: int = -1) -> tuple[MetadataImage, MetadataDelta]:
        """The image of all batches so far, without an open transaction, and its
        difference from the last image.
        """
        image, delta = self._builder.build(self._offset, self._epoch, self._timestamp_ms, controller_id)
        self._builder = ImageBuilder(image)
        self.is_empty = True
        return image, delta
