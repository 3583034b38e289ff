"""Files on a disk: written fast and completely, locked, checksummed.

Nothing here knows what the bytes mean; formats are in `checkpoints` and `ft`.
"""
