"""Turns text into tokens; what the server runs is inference.serving.text_models."""

from inference.serving.text_models import QueryTokenizer as TritonPythonModel  # noqa: F401
