#!/usr/bin/env bash
# submitit 1.5.4: a job of the local executor takes GPU 0, whichever the process that submits it was given.
#
# Expected: with CUDA_VISIBLE_DEVICES=4,5 in the environment, as Slurm or a user sets it, jobs of the local executor use these
#   two; a job for which no number of GPUs is stated leaves the variable alone, as it does with cluster="debug".
# Seen: the variable is replaced by the numbers from 0 on: a job with gpus_per_node=1 has "0", one with 2 has "0,1", and one
#   without a number has "" and sees none. Jobs that run at the same time all have the same ones. Nothing is
#   logged; visible_gpus of LocalExecutor, which names others, is refused by AutoExecutor.
# Matters for: sweeps and tests on a shared machine: the jobs run on the GPUs of another user, all on one, or on the CPU.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import os
import sys

import submitit


def visible():
    return os.environ.get("CUDA_VISIBLE_DEVICES")


for cluster, settings in (
    ("debug", {}),
    ("local", {}),
    ("local", {"gpus_per_node": 1}),
    ("local", {"gpus_per_node": 2}),
):
    executor = submitit.AutoExecutor(sys.argv[1], cluster=cluster)
    executor.update_parameters(timeout_min=5, **settings)
    jobs = [executor.submit(visible) for _ in range(2)]
    print(f"{cluster} {settings}: {' and '.join(repr(job.result()) for job in jobs)}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check submitit==1.5.4 cloudpickle==3.1.3
cd "$folder"
seen=$(CUDA_VISIBLE_DEVICES=4,5 "$folder/venv/bin/python" show.py "$folder/jobs")
printf 'CUDA_VISIBLE_DEVICES of two jobs, submitted where it is 4,5, with submitit 1.5.4\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
debug {}: '4,5' and '4,5'
local {}: '' and ''
local {'gpus_per_node': 1}: '0' and '0'
local {'gpus_per_node': 2}: '0,1' and '0,1'
SEEN
