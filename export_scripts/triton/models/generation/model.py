"""Generates tokens; what the server runs is inference.serving.python_backend."""

from inference.serving.python_backend import GenerationModel as TritonPythonModel  # noqa: F401
