"""Accuracy and latency of a served model: the records that tasks, runs and reports share.

Options, the protocol of a task, the report's record and the gate are here, and import none of the
folders below. `tasks` defines the questions, `run` asks them, and `report` writes the answers.
"""
