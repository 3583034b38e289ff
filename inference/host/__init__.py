"""The process that clients reach: a repository behind KServe's protocols and OpenAI's.

The protocols are adaptors over one internal request, `inference.backend.requests.InferRequest`.
Models answer it: this project's own, or those of a tritonserver.
"""
