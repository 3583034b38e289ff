"""Triton model repositories: signatures, config.pbtxt, model folders, assembly and publishing.

The code that the server runs is in `inference.backend`; `models` and `backends`
hold references to it.
"""
