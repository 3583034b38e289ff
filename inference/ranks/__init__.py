"""Rank processes: rendezvous, loading, and running the steps that rank 0 plans.

What a step computes is in `inference.model`; `inference.engine` decides what shares a step.
"""
