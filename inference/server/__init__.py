"""Servers and their clients: find, configure, start, watch, ask.

The process that answers is `inference.host`; the models are in `inference.backend`.
"""
