"""Triton model repositories: signatures, config.pbtxt, model folders, assembly and publishing.

The code that the server runs is in `inference.backend`; model folders hold references to it, and
so does `backends`.
"""
