"""How far a voter has acknowledged the metadata log: a small file beside the log, rewritten after each sync.

It tells a tail that a kill has torn, which nothing had acknowledged, from records that damage took. It is written
before the acknowledgement leaves and is not synced until the node stops: a start believes it where the machine ran on.
A voter that lost records still knows what a candidate must have.
"""

from __future__ import annotations

import struct
from typing import Final

from tidelog.protocol.batches.crc import crc32c
from tidelog.replication.quorum.raft.messages import OffsetAndEpoch
from tidelog.storage.files.disk import Disk, File

FILE_NAME: Final = "acknowledged-end"
_BODY: Final = struct.Struct(">hiq")  # version, epoch of the last record, offset after it
_CRC: Final = struct.Struct(">I")
_VERSION: Final = 0


class AcknowledgedEnd:
    """`end`: None while it is unknown."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._path = f"{directory}/{FILE_NAME}"
        self._file: File | None = None
        self.end: OffsetAndEpoch | None = None

    def read(self) -> OffsetAndEpoch | None:
        """What the file says; None where it is missing or damaged. Raises OSError."""
        if not self._disk.exists(self._path):
            return None
        data = self._disk.read_file(self._path)
        body, crc = data[: _BODY.size], data[_BODY.size :]
        if len(crc) != _CRC.size or _CRC.unpack(crc)[0] != crc32c(body):
            return None
        version, epoch, end_offset = _BODY.unpack(body)
        return OffsetAndEpoch(epoch, end_offset) if version == _VERSION else None

    def write(self, end: OffsetAndEpoch) -> None:
        """Where that fails, the file is removed: an old one would hide a loss. Raises OSError where that fails, too."""
        if end == self.end:
            return
        body = _BODY.pack(_VERSION, *end)
        try:
            if self._file is None:
                self._file = self._disk.open(self._path, create=True)
            data = body + _CRC.pack(crc32c(body))
            if self._file.write_at(data, 0) != len(data):
                raise OSError(f"{self._path}: not all of it could be written")
        except OSError:
            self.forget()
            return
        self.end = end

    def forget(self) -> None:
        """Raises OSError."""
        self.end = None
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._disk.exists(self._path):
            self._disk.remove(self._path)

    def close(self) -> None:
        """On the device: after a clean stop it is believed whatever happens to the machine. Raises OSError."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.sync()
            finally:
                file.close()
