"""Values, messages, files and commands that every other package uses; it imports none of them."""

__version__ = "0.2.0"
