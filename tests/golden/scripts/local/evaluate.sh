#!/bin/bash

# setup
set -euo pipefail
export TRANSFORMERS_OFFLINE=1
export HF_HUB_OFFLINE=1
export HF_DATASETS_OFFLINE=1
export NOTE='it'"'"'s a $note'
export PYTHONPATH=<checkout>${PYTHONPATH:+:$PYTHONPATH}

# command
exec <python> -u -m submitit.core._submit <results>/gpt_books_5m/export_tp2_pp1_fp16_fp32/evaluate/submitit/JOB_ID
