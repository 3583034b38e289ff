"""Dense decoders beyond FasterTransformer's own: one layout, and a record for each."""
