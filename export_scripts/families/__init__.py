"""The model families: what a folder of shards holds, and how each source becomes one.

A family of one file is here, one of several in a folder of its own; `table` lists them. Containers
of source tensors are in `checkpoints`, files of the result in `ft`.
"""
