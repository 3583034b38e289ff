"""The served models: from a request's tensors to an engine or a tokenizer, and back.

They run in this project's own server and in Triton's Python backend.
"""
