"""Models of Triton's Python backend: tensors of a request to an engine or a tokenizer, and back.

`inference.server` starts the server process that hosts them.
"""
