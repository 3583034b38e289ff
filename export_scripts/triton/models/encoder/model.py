"""Turns tokens into hidden states; what the server runs is inference.backend.encoder_backend."""

from inference.backend.encoder_backend import EncoderModel as TritonPythonModel  # noqa: F401
