"""CRC-32, by the fastest means that is there.

Owns:      which library computes it.
Takes:     bytes, and the CRC-32 of what came before them.
Gives:     the same number from either library; zlib-ng takes a quarter of the time.
Invariant: the numbers are those of the zip format, which needs them for each entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zlib import crc32
else:
    try:
        from zlib_ng.zlib_ng import crc32
    except ImportError:  # no wheel for this machine
        from zlib import crc32

__all__ = ["crc32"]
