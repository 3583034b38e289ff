"""The parts of a family: config.ini fields, tensors and their splits, architectures."""
