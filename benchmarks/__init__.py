"""Benchmarks: the programs that measured all quoted figures."""
