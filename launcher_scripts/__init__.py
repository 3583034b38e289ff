"""The command: read the configuration, check every stage, run them as jobs on a cluster."""
