"""The engine: requests in, tokens out; it schedules sequences into steps within its budgets.

It does not depend on Triton, and runs models only through `inference.ranks`.
"""
