"""Files on disk: fast and atomic writes, locks, checksums.

Formats, which give the bytes a meaning, are in `checkpoints` and `ft`.
"""
