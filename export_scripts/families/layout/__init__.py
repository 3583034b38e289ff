"""What families consist of: config.ini fields, tensors and their splits, architectures."""
