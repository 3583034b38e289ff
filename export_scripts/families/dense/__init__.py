"""Dense decoders that FasterTransformer lacks: one layout for all, and a record for each."""
