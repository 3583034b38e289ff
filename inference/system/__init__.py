"""The machine around a process: limits, memory, ports, private folders, launchers and parents."""
