"""Turns tokens into hidden states; what the server runs is inference.serving.encoder_backend."""

from inference.serving.encoder_backend import EncoderModel as TritonPythonModel  # noqa: F401
