"""NVIDIA's own backend: its build, and comparisons with our engine."""
