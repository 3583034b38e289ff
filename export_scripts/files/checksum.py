"""Checksums of files: SHA-256, and CRC-32 about five times as fast as zlib's."""

from __future__ import annotations

import hashlib
from pathlib import Path

from isal.isal_zlib import crc32

__all__ = ["Checksum", "checksum_of", "crc32", "sha256_of"]

_PIECE_BYTES = 1 << 22


class Checksum:
    """A running CRC-32 of bytes added piece by piece."""

    def __init__(self) -> None:
        self._value = 0

    def add(self, piece: bytes | memoryview) -> None:
        """Add a piece."""
        self._value = crc32(piece, self._value)

    def text(self) -> str:
        """Return the checksum so far as 8 hexadecimal digits."""
        return f"{self._value:08x}"


def checksum_of(path: Path) -> str:
    """Return the CRC-32 of a file."""
    checksum = Checksum()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            checksum.add(piece)
    return checksum.text()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
