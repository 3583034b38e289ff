"""The process that clients reach: it serves a repository over KServe's protocols and OpenAI's.

The protocols are adapters over one internal request, `inference.backend.requests.InferRequest`,
which this project's own models or those of a tritonserver answer.
"""
