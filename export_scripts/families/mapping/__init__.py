"""The parts of source mappings: tensors, operations on them, settings of sources."""
