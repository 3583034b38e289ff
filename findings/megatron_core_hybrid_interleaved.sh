#!/usr/bin/env bash
# megatron-core 0.19.2: HybridModel takes rotary_interleaved for the rotation, and not for the angles.
#
# Expected: rotary_interleaved=true, as GPT-J and GLM have it, rotates neighbouring channels (0 and 1, 2 and 3) by one
#   angle. The score of a query and a key then depends on their distance alone, in GPTModel and in its successor.
# Seen: HybridModel makes angles in the order of halves, and the rotation pairs neighbours: each pair has two angles. The
#   same query and key score differently at each position, and no warning is given.
# Matters for: a model with interleaved positions that moves from GPTModel to HybridModel as NVIDIA's guide asks: its
#   weights load, its answers are others, and no other library computes what one trained so has learned.
# Norms of torch stand in for Transformer Engine's, and the CPU for the GPU on which angles are made. The wheel, for
# Python 3.12 and later, is unpacked next to this Python's torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

torch.cuda.current_device = lambda: "cpu"  # where angles are made
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True, rotary_interleaved=True
)
sizes = {"vocab_size": 32, "max_sequence_length": 16, "position_embedding_type": "rope"}
layer = get_gpt_layer_local_spec()
hybrid_block.TENorm = WrappedTorchNorm  # in place of Transformer Engine's, which needs a GPU
parts = hybrid_block.HybridStackSubmodules(attention_layer=layer)
stack = ModuleSpec(hybrid_block.HybridStack, submodules=parts)
models = {
    "GPTModel": GPTModel(config, layer, **sizes),
    "HybridModel": HybridModel(config, stack, hybrid_layer_pattern="**", **sizes),
}
torch.manual_seed(0)
query, key = torch.randn(2, 1, 1, 1, 8)
for name, model in models.items():
    angles = model.rotary_pos_emb(16)
    queries = apply_rotary_pos_emb(query.expand(16, 1, 1, 8), angles, config)
    keys = apply_rotary_pos_emb(key.expand(16, 1, 1, 8), angles, config)
    scores = [(queries[at] * keys[at - 3]).sum().item() for at in (3, 8, 15)]
    print(name, *(f"{score:.3f}" for score in scores))
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.2.6 packaging==25.0 triton==3.9.0 einops==0.8.1
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  --ignore-requires-python --python-version 3.12 --target "$folder/megatron" megatron-core==0.19.2
seen=$(PYTHONPATH="$folder/megatron" "$folder/venv/bin/python" "$folder/show.py" 2>/dev/null)
printf 'megatron-core 0.19.2, scores of a query and a key at distance 3:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
GPTModel 0.146 0.146 0.146
HybridModel 3.263 0.478 -0.491
SEEN
