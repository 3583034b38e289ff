"""The edge of a server: authentication, request validation, size limits and connections.

The adapters of the protocols are in `inference.host`.
"""
