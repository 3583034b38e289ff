"""Values, messages, files and commands: what every other package stands on, and imports none."""

__version__ = "0.2.0"
