"""The model families: the contents of an FT folder, and the mappings of sources to it.

A family is a module or a subfolder here; `table` lists them. Containers of source tensors are in
`checkpoints`, files of the result in `ft`.
"""
