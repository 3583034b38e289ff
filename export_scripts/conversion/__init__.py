"""One conversion: the request, the plan that finds every problem, and the writing of the shards.

Facts about formats belong to `checkpoints` and `ft`, facts about models to `families`.
"""
