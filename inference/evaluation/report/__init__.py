"""Reports: pages, files, and comparisons of runs.

This folder only reads finished records; it never sends requests to a model.
"""
