"""The command: read the configuration, check every stage, run them as jobs on a cluster.

The plan of a run, its submission and its output belong here; the work of a job belongs in `stages`
and below. Nothing here may import torch, numpy or transformers, since the command answers on login
nodes. The folder is called as in the NeMo launcher, whose users point
`launcher_scripts_path` at a folder of this name and call `launcher_scripts/main.py`.
"""
