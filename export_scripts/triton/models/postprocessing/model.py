"""Turns tokens into text; what the server runs is inference.serving.text_models."""

from inference.serving.text_models import Postprocessing as TritonPythonModel  # noqa: F401
