"""Triton model repositories: signatures, configurations, assembly."""
