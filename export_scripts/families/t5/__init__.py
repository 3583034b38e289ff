"""The T5 layouts, whole and encoder alone, and the sources that become them."""
