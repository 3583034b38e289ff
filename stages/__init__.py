"""The stages of the pipeline: picklable callables with plain data, each in the module of its name.

A job imports only its own stage.
"""

STAGES = ("convert", "certify", "export", "deploy", "evaluate")  # in their order
