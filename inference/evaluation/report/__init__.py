"""The report: pages, charts, files, the run store, and comparisons of two runs.

Everything here reads finished records; nothing here asks a model.
"""
