"""The FT checkpoint folder: file names, config.ini, manifest, tokenizer files; write, check, read.

`families` has the tensors of each family; `conversion` knows where they come from.
"""
