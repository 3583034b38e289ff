"""The FasterTransformer checkpoint folder: names, types, config.ini, reading and writing."""
