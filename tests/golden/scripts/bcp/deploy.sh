#!/bin/bash

# setup
set -euo pipefail
export TRANSFORMERS_OFFLINE=1
export HF_HUB_OFFLINE=1
export HF_DATASETS_OFFLINE=1
export NOTE='it'"'"'s a $note'
export PYTHONPATH=<checkout>${PYTHONPATH:+:$PYTHONPATH}

# The job's Python process starts this step:
#   bcprun --nnodes 1 --npernode 1 -no_redirect --workdir <checkout> --env PATH=... --env LD_LIBRARY_PATH=... --env PYTHONPATH=... --env CUDA_VISIBLE_DEVICES=... --env NEMO_LAUNCHER_LOG_LEVEL=... --env SLIPWAY_JOB_ID=... --env SLIPWAY_JOB_MARK=... --env HF_TOKEN=... --env NGC_API_KEY=... --env AWS_ACCESS_KEY_ID=... --env AWS_SECRET_ACCESS_KEY=... --env AWS_SESSION_TOKEN=... --env AWS_REGION=... --env AWS_DEFAULT_REGION=... --env TRANSFORMERS_OFFLINE=... --env HF_HUB_OFFLINE=... --env HF_DATASETS_OFFLINE=... --env NOTE=... --cmd '<python> -u -m stages.step STAGE RESULT 1'

# command
exec <python> -u -m submitit.core._submit <results>/gpt_books_5m/export_tp2_pp1_fp16_fp32/deploy/submitit/JOB_ID
