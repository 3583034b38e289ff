"""Turns text into tokens; what the server runs is inference.backend.text_models."""

from inference.backend.text_models import QueryTokenizer as TritonPythonModel  # noqa: F401
