"""Triton model repositories: signatures, config.pbtxt, model folders, assembly and publishing.

The server runs code in `inference.backend`, which model folders and `backends` import.
"""
