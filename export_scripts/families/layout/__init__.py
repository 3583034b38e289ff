"""The vocabulary of families: config.ini fields, tensors with their splits, architectures."""
