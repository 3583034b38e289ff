"""The gateway: the only process of a server that other users can reach.

tritonserver itself listens on Unix sockets in a folder that only its owner can enter. The gateway
passes on the requests of the table in `rules.py`, within the limits of `access.py`.
"""
