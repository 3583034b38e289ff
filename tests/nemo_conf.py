"""A folder of configuration files like the NeMo launcher's, of releases 23.04 to 24.05."""

from __future__ import annotations

from pathlib import Path

_ROOT = """
defaults:
  - _self_
  - cluster: bcm
  - data_preparation: gpt3/some_data
  - training: gpt3/5b
  - conversion: gpt3/some_conversion
  - peft: null
  - evaluation: gpt3/some_tasks
  - export: gpt3/export_gpt3
  - override hydra/job_logging: stdout
hydra:
  run: {dir: .}
  output_subdir: null
debug: False
stages: [training, export]
cluster_type: bcm
launcher_scripts_path: ???
data_dir: ${launcher_scripts_path}/data
base_results_dir: ${launcher_scripts_path}/results
container_mounts: [null]
container: registry/image:1
wandb_api_key_file: null
wandb_api_bcp_secret_key: null
env_vars: {NCCL_DEBUG: null, TRANSFORMERS_OFFLINE: 0}
numa_mapping: {enable: True, mode: unique_contiguous, max_cores: 8}
training_config: ${hydra:runtime.choices.training}
export_config: ${hydra:runtime.choices.export}
"""
_CLUSTER = """
partition: null
account: team
exclusive: True
gpus_per_task: null
gpus_per_node: 4
mem: 0
job_name_prefix: "nemo-megatron-"
srun_args: ["--no-container-mount-home"]
"""


def write_nemo_conf(folder: Path) -> Path:
    """Write the root and a cluster; return the folder."""
    (folder / "cluster").mkdir(parents=True)
    (folder / "config.yaml").write_text(_ROOT)
    (folder / "cluster" / "bcm.yaml").write_text(_CLUSTER)
    return folder
