"""The engine: requests in, tokens out; which sequences share a step, and what it may cost.

Nothing here knows Triton, and models run only through `inference.ranks`.
"""
