"""Compare a source checkpoint with its FT folder, tensor by tensor and layer by layer.

No server is needed. The command: python -m inference.parity --help
"""
