"""Turns tokens into text; what the server runs is inference.backend.text_models."""

from inference.backend.text_models import Postprocessing as TritonPythonModel  # noqa: F401
