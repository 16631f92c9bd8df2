"""The end of the log that a voter has acknowledged: a small file beside the metadata log, rewritten after each sync.

With it a start distinguishes an unacknowledged batch that a kill has torn from acknowledged records lost to damage. It
is written before the acknowledgement is sent. It is synced only when the node stops, so a start trusts it only if the
machine has not stopped in between, or after a clean stop. With it a voter that lost records still knows which records a
candidate must have.
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
        """The content of the file; None if it is missing or damaged. Raises OSError."""
        if not self._disk.exists(self._path):
            return None
        data = self._disk.read_file(self._path)
        body, crc = data[: _BODY.size], data[_BODY.size :]
        if len(crc) != _CRC.size or _CRC.unpack(crc)[0] != crc32c(body):
            return None
        version, epoch, end_offset = _BODY.unpack(body)
        return OffsetAndEpoch(epoch, end_offset) if version == _VERSION else None

    def write(self, end: OffsetAndEpoch) -> None:
        """Write the file. If that fails, remove it, because an outdated one would hide a loss. Raises OSError if the
        removal fails too.
        """
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
        """Remove the file. Raises OSError."""
        self.end = None
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._disk.exists(self._path):
            self._disk.remove(self._path)

    def close(self) -> None:
        """Sync the file, so that it can be trusted after a clean stop and a stop of the machine. Raises OSError."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.sync()
            finally:
                file.close()
