"""Benchmarks: each quoted figure comes from one of these programs, which anyone can rerun."""
