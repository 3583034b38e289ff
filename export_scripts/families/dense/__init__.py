"""Dense decoders beyond FasterTransformer's own: one layout, and one file for each family.

A row of `mappings` for each source.
"""
