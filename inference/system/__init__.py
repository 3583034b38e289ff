"""The environment of a process: limits, memory, ports, private folders, launchers and parents."""
