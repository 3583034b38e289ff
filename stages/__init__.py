"""The stages of the pipeline: picklable callables with plain data, each in a module of its name.

A job imports its own alone.
"""

STAGES = ("convert", "certify", "export", "deploy", "evaluate")  # in their order
