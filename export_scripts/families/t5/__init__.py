"""The T5 layouts (whole and encoder alone) and the sources that become them.

What T5 shares with decoders is in `families.layout` and `families.mapping`.
"""
