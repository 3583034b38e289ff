"""Files on a disk: written fast and completely, locked, checksummed.

The meaning of the bytes does not matter here; formats are in `checkpoints` and `ft`.
"""
