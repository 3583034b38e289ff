"""The tritonserver process and its clients: find, configure, start, watch, ask.

Nothing that runs inside the server is here; that is `inference.backend`.
"""
