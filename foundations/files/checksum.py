"""Checksums of files: SHA-256, and CRC-32 about five times as fast as zlib's."""

import hashlib
from pathlib import Path

from isal.isal_zlib import crc32

__all__ = ["checksum_of", "crc32", "sha256_of"]

_PIECE_BYTES = 1 << 22


def checksum_of(path: Path) -> str:
    """Return the CRC-32 of a file as 8 hexadecimal digits."""
    found = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            found = crc32(piece, found)
    return f"{found:08x}"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
