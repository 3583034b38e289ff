"""Conversion of trained checkpoints into FasterTransformer (FT) folders and Triton repositories.

The modules next to this one are the commands; the folders hold what they and the other packages
use. Running a model belongs to `inference`.
"""
