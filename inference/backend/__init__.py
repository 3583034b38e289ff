"""Models of Triton's Python backend: tensors of a request to an engine or a tokenizer, and back.

The server process around them is started in `inference.server`.
"""
