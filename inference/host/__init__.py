"""This project's own server: the front and the engine of a repository in one process.

KServe's protocol over HTTP and gRPC, and OpenAI's, are three adaptors over one internal request,
`calls.InferRequest`.
"""
