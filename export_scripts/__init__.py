"""What an FT checkpoint is, what a family holds, and how a source checkpoint becomes one."""

__version__ = "0.1.0"
