"""Rank processes: rendezvous, loading, and running the steps that rank 0 plans.

`inference.model` computes a step; `inference.engine` decides which sequences share it.
"""
