#!/bin/bash

# Parameters
#SBATCH --dependency=afterok:10002,after:10003
#SBATCH --error=<results>/gpt_books_5m/export_tp2_pp1_fp16_fp32/evaluate/log-nemo-megatron-evaluate_gpt_books_5m_%j.err
#SBATCH --exclusive
#SBATCH --job-name=nemo-megatron-evaluate_gpt_books_5m
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --mem=0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=<results>/gpt_books_5m/export_tp2_pp1_fp16_fp32/evaluate/log-nemo-megatron-evaluate_gpt_books_5m_%j.out
#SBATCH --partition=batch
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=04:00:00

# setup
set -euo pipefail
export TRANSFORMERS_OFFLINE=1
export HF_HUB_OFFLINE=1
export HF_DATASETS_OFFLINE=1
export NOTE='it'"'"'s a $note'
export SLIPWAY_JOB_ID=$SLURM_JOB_ID
export SLIPWAY_JOB_MARK=slurm-$SLURM_JOB_ID:<results>/gpt_books_5m/export_tp2_pp1_fp16_fp32/evaluate/submitit
export SUBMITIT_EXECUTOR=slurm
export PYTHONPATH=<checkout>${PYTHONPATH:+:$PYTHONPATH}

# The job's Python process starts this step:
#   srun --nodes=1 --ntasks=1 --wait=60 --kill-on-bad-exit=1 '--container-image=nvcr.io#nvidia/pytorch:24.01' '--container-mounts=<checkout>:<checkout>,<results>:<results>,/scratch:/scratch,/my data:/data:ro' --no-container-mount-home --container-workdir=/w python3 -u -m stages.step STAGE RESULT 1

# command
exec <python> -u -m submitit.core._submit <results>/gpt_books_5m/export_tp2_pp1_fp16_fp32/evaluate/submitit
