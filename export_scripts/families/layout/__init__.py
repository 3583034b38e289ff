"""The vocabulary of a family: config.ini fields, tensors with their splits, the architecture.

What a particular family contains is in a module of its own, and where a source keeps its
tensors is described with `families.mapping`.
"""
