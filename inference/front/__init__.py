"""The front: the only process of a server that other users can reach.

tritonserver itself listens on Unix sockets in a folder that only its owner can enter. The front
speaks KServe's protocol over HTTP and gRPC, and OpenAI's. It passes on the requests of the table in
`rules.py`, within the limits of `access.py` and `guard.py`.
"""
