"""The tritonserver process and its clients: find, configure, start, watch, ask.

The models that run inside the server are in `inference.backend`.
"""
