#!/bin/bash

# Parameters
#SBATCH --account=llm
#SBATCH --cpus-per-task=2
#SBATCH --dependency=singleton
#SBATCH --error=/r/gpt_books_5m/export_tp2_pp1_fp16_fp32/convert/log-nemo-megatron-export_gpt_books_5m_%j.err
#SBATCH --exclusive
#SBATCH --job-name=nemo-megatron-export_gpt_books_5m
#SBATCH --mem=0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/r/gpt_books_5m/export_tp2_pp1_fp16_fp32/convert/log-nemo-megatron-export_gpt_books_5m_%j.out
#SBATCH --partition=batch
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=00:30:00

# setup
set -euo pipefail
export TRANSFORMERS_OFFLINE=1
export HF_HUB_OFFLINE=1
export HF_DATASETS_OFFLINE=1
export SLIPWAY_JOB_ID=$SLURM_JOB_ID
export SLIPWAY_JOB_MARK=slurm-$SLURM_JOB_ID
export SUBMITIT_EXECUTOR=slurm
export PYTHONPATH=<checkout>${PYTHONPATH:+:$PYTHONPATH}

# command
exec <python> -u -m submitit.core._submit /r/gpt_books_5m/export_tp2_pp1_fp16_fp32/convert/submitit
