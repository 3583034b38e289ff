"""The configuration: from arguments and files to a checked `Config` and the stages' settings.

A key, its default, its check and the message that refuses it belong here. Code that acts on a
whole configuration belongs in `launcher_scripts`, and code for one cluster in `launchers`.
"""
