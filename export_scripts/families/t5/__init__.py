"""The layouts of T5 and of its encoder, and their sources."""
