#!/bin/bash
# Repeats the job evaluate_gpt_books_5m (evaluate).
set -euo pipefail
export TRANSFORMERS_OFFLINE=1
export HF_HUB_OFFLINE=1
export HF_DATASETS_OFFLINE=1
export NOTE='it'"'"'s a $note'
cd <checkout>
exec <python> main.py --config-path=<results>/gpt_books_5m/export_tp2_pp1_fp16_fp32/evaluate --config-name=evaluate_gpt_books_5m_config.yaml 'stages=[evaluate]'
