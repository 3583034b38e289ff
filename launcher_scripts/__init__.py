"""The command: read the configuration, check every stage, run them as jobs on a cluster.

What a user types, what is refused and where a job runs belong here; what a job does belongs in
`stages` and below, and nothing here may import torch, numpy or transformers, since the command
answers on login nodes. The folder is called as in the NeMo launcher, whose users point
`launcher_scripts_path` at a folder of this name and call `launcher_scripts/main.py`.
"""
