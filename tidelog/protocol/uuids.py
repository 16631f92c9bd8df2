"""Topic, directory and incarnation ids: 16 raw bytes inside, url-safe base64 without padding outside.

The text form is that of Kafka's `org.apache.kafka.common.Uuid`: 22 characters. Random ids are made by whoever owns an
`rng`; this module only converts and says which ids are reserved.
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
    """16 bytes -> 22 characters."""
    assert len(value) == 16, value
    return urlsafe_b64encode(value)[:_TEXT_LENGTH].decode("ascii")


def uuid_from_text(text: str) -> bytes:
    """22 characters (padding allowed) -> 16 bytes; ValueError for anything else."""
    stripped = text.rstrip("=")
    if len(stripped) == _TEXT_LENGTH:
        try:
            return a2b_base64(stripped.translate(_STANDARD_ALPHABET) + "==", strict_mode=True)
        except (BinasciiError, ValueError):
            pass
    raise ValueError(f"not an id of 22 base64 characters: {text!r}")


_STANDARD_ALPHABET = str.maketrans({"-": "+", "_": "/", "+": "?", "/": "?"})
