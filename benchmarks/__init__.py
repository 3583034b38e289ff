"""Benchmarks: every quoted figure comes from one of these, rerunnable by anyone."""
