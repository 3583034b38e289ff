"""Triton, processes and text around the runtime."""
