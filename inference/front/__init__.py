"""The edge of a server: who may ask, in which form, how much, and over which connections.

The protocols' adaptors are in `inference.host`.
"""
