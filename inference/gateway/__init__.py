"""The gateway: the only process of a server that listens to other people.

tritonserver itself listens on Unix sockets in a folder that its owner alone can enter. The gateway
passes on the requests of the table in `rules.py`, within the limits of `access.py`.
"""
