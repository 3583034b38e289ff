"""The configuration: arguments and files to a checked `Config`, and that to the stages' settings.

A key, its default, its check and the message that refuses it belong here; what is done with a
whole configuration belongs in `launcher_scripts`, and how a cluster reads it in `launchers`.
"""
