"""Topic, directory and incarnation ids: 16 raw bytes, with url-safe base64 without padding as text.

The text form is that of Kafka's `org.apache.kafka.common.Uuid`: 22 characters. This module converts
ids and defines the reserved ones. Modules with an `rng` create random ids.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from binascii import Error as BinasciiError
from binascii import a2b_base64
from typing import Final

ZERO_UUID: Final = bytes(16)
ONE_UUID: Final = bytes(15) + b"\x01"
METADATA_TOPIC_ID: Final = ONE_UUID

# Ids below 100 are reserved by Kafka for directories (migrating 0, unassigned 1, lost 2).
MIGRATING_DIRECTORY: Final = ZERO_UUID
UNASSIGNED_DIRECTORY: Final = ONE_UUID
LOST_DIRECTORY: Final = bytes(15) + b"\x02"

_TEXT_LENGTH = 22


def uuid_to_text(value: bytes) -> str:
    """Convert 16 bytes to 22 characters."""
    assert len(value) == 16, value
    return urlsafe_b64encode(value)[:_TEXT_LENGTH].decode("ascii")


def uuid_from_text(text: str) -> bytes:
    """Convert 22 characters (padding allowed) to 16 bytes. Raises ValueError for other text."""
    stripped = text.rstrip("=")
    if len(stripped) == _TEXT_LENGTH:
        try:
            return a2b_base64(stripped.translate(_STANDARD_ALPHABET) + "==", strict_mode=True)
        except (BinasciiError, ValueError):
            pass
    raise ValueError(f"not an id of 22 base64 characters: {text!r}")


_STANDARD_ALPHABET = str.maketrans({"-": "+", "_": "/", "+": "?", "/": "?"})
