#!/bin/bash

# setup
set -euo pipefail
export TRANSFORMERS_OFFLINE=1
export HF_HUB_OFFLINE=1
export HF_DATASETS_OFFLINE=1
export NOTE='it'"'"'s a $note'
export SLIPWAY_JOB_ID=JOB_ID
export SLIPWAY_JOB_MARK=JOB_ID
export SUBMITIT_BCP_JOB_ID=JOB_ID
export SUBMITIT_EXECUTOR=bcp
export PYTHONPATH=<checkout>${PYTHONPATH:+:$PYTHONPATH}

# Tasks inherit nothing: what they need is handed on.
hand_on=()
for name in PATH LD_LIBRARY_PATH PYTHONPATH CUDA_VISIBLE_DEVICES SUBMITIT_EXECUTOR SUBMITIT_BCP_JOB_ID HF_TOKEN NGC_API_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_REGION AWS_DEFAULT_REGION TRANSFORMERS_OFFLINE HF_HUB_OFFLINE HF_DATASETS_OFFLINE NOTE SLIPWAY_JOB_ID SLIPWAY_JOB_MARK; do
  if [ -n "${!name:-}" ]; then hand_on+=(--env "$name=${!name}"); fi
done

# command
exec timeout --foreground --kill-after=90 30m bcprun --nnodes 1 --npernode 1 -no_redirect --workdir <checkout> "${hand_on[@]}" --cmd '<python> -u -m launcher_scripts.launchers.bcp_executor <results>/gpt_books_5m/export_tp2_pp1_fp16_fp32/convert/submitit/JOB_ID'
