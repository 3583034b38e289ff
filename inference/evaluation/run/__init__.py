"""Run an evaluation: check options, send requests, time them and apply the gate.

`inference.evaluation.tasks` defines the requests and the scores, `inference.evaluation.report`
writes pages and files.
"""
