"""The runtime: models, decoding, serving and measurement."""
