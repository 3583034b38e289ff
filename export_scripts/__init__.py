"""Conversion of trained checkpoints into FasterTransformer (FT) folders and Triton repositories.

The modules in this folder are commands; its subfolders are the library of these and of other
packages. Running a model belongs to `inference`.
"""
