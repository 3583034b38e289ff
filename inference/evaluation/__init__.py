"""Accuracy and latency of a served model: the records that tasks, runs and reports share.

This folder has the options, the protocol of a task, the report's record and the gate, and imports
no subfolder. `tasks` defines the questions, `run` asks them, and `report` writes the answers.
"""
