"""Starting, supervising and querying servers.

`inference.host` is the process that answers; `inference.backend` has the models.
"""
