"""The run: checks before it, requests to the server and to the source, timing, the gate's verdict.

What a task asks and how an answer is scored is in `inference.evaluation.tasks`; pages and files are
in `inference.evaluation.report`.
"""
