"""NVIDIA's own backend: how it is built, and how it compares."""
