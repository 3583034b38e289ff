"""Serving for PyTriton's clients, from text to text, with one process for each rank."""
