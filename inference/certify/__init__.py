"""Prove that a folder is what its source says: tensors, settings, texts, layers, served answers.

The command: python -m inference.certify --help
"""
