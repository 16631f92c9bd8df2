"""CRC-32C (Castagnoli), the checksum of record batches.

`crc32c` is the hardware-assisted function of the `crc32c` package when that can be imported (it
releases the GIL only from 32 KiB upwards), else `crc32c_portable` on crcmod, which is 40 to 60
times slower. Both accept the checksum of the preceding bytes as `value`, to continue it. Both
return the same number for the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import crcmod.predefined

__all__ = ["IS_HARDWARE_BACKED", "Checksum", "crc32c", "crc32c_portable"]

Checksum = Callable[..., int]
"""(data: bytes-like, value: int = 0) -> int, an unsigned 32-bit checksum."""

crc32c_portable: Final[Checksum] = cast(Checksum, crcmod.predefined.mkPredefinedCrcFun("crc-32c"))

crc32c: Checksum
try:
    from crc32c import crc32c as _from_package
except ImportError:  # no wheel and no compiler on this machine
    crc32c = crc32c_portable
    IS_HARDWARE_BACKED = False
else:
    crc32c = _from_package
    IS_HARDWARE_BACKED = True
