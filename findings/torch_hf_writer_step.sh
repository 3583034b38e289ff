#!/usr/bin/env bash
# torch 2.13.0: HuggingFaceStorageWriter writes a number of the state into the file of weights, which nothing then reads.
#
# Expected: torch.distributed.checkpoint.save keeps numbers and settings next to tensors, as it does with its own writer; the
#   writer of Hugging Face's format, which has tensors alone, refuses them or stores them elsewhere.
# Seen: it accepts {"weight": ..., "step": 7} and writes model-00001-of-00001.safetensors with the pickled number where the
#   header belongs, and an index that lists both. safetensors and torch's own HuggingFaceStorageReader end with an error
#   for the whole file; without "step" both read it.
# Matters for: trainers that keep a step or a configuration in the state and write folders that way. Saving succeeds each
#   time, and all weights of the file are out of reach once they are needed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import json
import sys

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

for label, extra in {"weight alone": {}, "weight and step": {"step": 7}}.items():
    path = f"{sys.argv[1]}/{label}"
    dcp.save({"weight": torch.ones(2, 2), **extra}, storage_writer=dcp.HuggingFaceStorageWriter(path=path), no_dist=True)
    with open(f"{path}/model.safetensors.index.json") as file:
        print(f"{label}: saved, index:", sorted(json.load(file)["weight_map"]))
    try:
        print(f"{label}: safetensors reads", list(safetensors.torch.load_file(f"{path}/model-00001-of-00001.safetensors")))
    except safetensors.SafetensorError as error:
        print(f"{label}: safetensors:", error)
    state = {"weight": torch.zeros(2, 2)}
    try:
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path=path), no_dist=True)
        print(f"{label}: torch reads", state["weight"].tolist())
    except dcp.CheckpointException as error:
        print(f"{label}: torch: {type(error).__name__}")
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 safetensors==0.8.0 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder" 2>/dev/null)
printf 'torch 2.13.0, safetensors 0.8.0:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
weight alone: saved, index: ['weight']
weight alone: safetensors reads ['weight']
weight alone: torch reads [[1.0, 1.0], [1.0, 1.0]]
weight and step: saved, index: ['step', 'weight']
weight and step: safetensors: Error while deserializing header: header too large
weight and step: torch: CheckpointException
SEEN
