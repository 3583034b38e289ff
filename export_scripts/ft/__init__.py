"""The FT checkpoint folder: file names, config.ini, manifest, tokenizer files; write, check, read.

Which tensors a family has is in `families`, and where they come from in `conversion`.
"""
