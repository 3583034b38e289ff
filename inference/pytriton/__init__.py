"""Serving through PyTriton: one process for each rank, text in and text out."""
