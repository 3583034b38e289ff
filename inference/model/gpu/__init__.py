"""The parts of models that need a GPU and Triton: kernels, and steps recorded as graphs."""
