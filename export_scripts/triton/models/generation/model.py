"""Generates tokens; what the server runs is inference.backend.python_backend."""

from inference.backend.python_backend import GenerationModel as TritonPythonModel  # noqa: F401
