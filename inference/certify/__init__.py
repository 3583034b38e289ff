"""Prove that a converted folder equals its source: tensors, settings, texts, layers, answers.

The command: python -m inference.certify --help
"""
