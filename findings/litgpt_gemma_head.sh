#!/usr/bin/env bash
# LitGPT 0.5.13: exporting a Gemma leaves out its trained head.
#
# Expected: `litgpt convert_from_litgpt` writes all tensors that were trained.
# Seen: LitGPT loads a tied embedding twice, as transformer.wte and lm_head, and trains them separately. For a Gemma 1 to
#   3 the export leaves out lm_head, and transformers uses the embedding in its place; for others, such as Llama 3.2, it
#   writes both.
# Matters for: every fully fine-tuned Gemma, which answers otherwise than in LitGPT.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import sys
from pathlib import Path

import torch
from litgpt import GPT, Config
from litgpt.scripts.convert_lit_checkpoint import convert_lit_checkpoint
from litgpt.utils import save_config

sizes = {"n_layer": 1, "n_head": 2, "n_query_groups": 1, "n_embd": 16, "head_size": 8, "intermediate_size": 24}
for name in ("Llama-3.2-1B", "Gemma-2-2b"):
    folder = Path(sys.argv[1]) / name
    folder.mkdir()
    config = Config.from_name(name, **sizes, padded_vocab_size=40, block_size=32)
    model = GPT(config)
    model.lm_head.weight.data.copy_(model.transformer.wte.weight.data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(8)[None]).logsumexp(-1).mean().backward()
    optimizer.step()
    save_config(config, folder)
    torch.save({"model": model.state_dict()}, folder / "lit_model.pth")
    convert_lit_checkpoint(folder, folder / "exported")
    exported = torch.load(folder / "exported/model.pth")
    is_tied = torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    print(f"{name}: head equals embedding: {is_tied}, head exported: {'lm_head.weight' in exported}", file=sys.stderr)
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 litgpt==0.5.13
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder" 2>&1 >"$folder/log" | grep 'head exported')
printf 'LitGPT 0.5.13:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
Llama-3.2-1B: head equals embedding: False, head exported: True
Gemma-2-2b: head equals embedding: False, head exported: False
SEEN
