"""Turns text into tokens; what the server runs is inference.backend.text_models."""

from inference.backend.text_models import Preprocessing as TritonPythonModel  # noqa: F401
