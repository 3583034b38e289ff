"""A conversion: its request, the plan that finds every problem, and the writing of the files.

Facts about formats are in `checkpoints` and `ft`, facts about models in `families`.
"""
