"""The vocabulary of a source mapping: tensors, operations on them, and settings that sources share.

The table of one source is in the module of its family.
"""
