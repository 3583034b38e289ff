#!/usr/bin/env bash
# megatron-core 0.19.2 and transformers 5.24.0: a group of experts has another score.
#
# Expected: group-limited routing as DeepSeek-V3 has it scores a group by the sum of its two best experts; the
#   docstring of megatron-core's group_limited_topk says so, too.
# Seen: megatron-core sums the best topk // group_topk experts of a group. With 4 experts of a token in 2 groups both
#   agree; with 2 experts in 2 groups it takes the best one alone, and chooses other experts than DeepseekV3TopkRouter.
# Matters for: a mixture trained with moe_router_group_topk and another moe_router_topk than twice as many. All tensors
#   and settings have a place in DeepSeek-V3's folder, which loads without a word and routes tokens otherwise.
# The wheel of megatron-core, for Python 3.12 and later, is unpacked next to this Python's torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from megatron.core.transformer.moe.moe_utils import group_limited_topk
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

# 8 experts in 4 groups, 2 of which may be used.
scores = torch.tensor([[0.9, 0.15, 0.6, 0.5, 0.8, 0.2, 0.7, 0.05]])
for chosen in (2, 4):
    config = DeepseekV3Config(
        hidden_size=8, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=chosen, norm_topk_prob=False
    )
    router = DeepseekV3TopkRouter(config)
    router.weight.data = torch.eye(8)
    router.e_score_correction_bias.zero_()
    theirs = router(torch.logit(scores))[2]
    _, ours = group_limited_topk(scores, chosen, 1, 8, 4, 2)
    print(chosen, "experts: megatron-core", sorted(ours[0].tolist()), "transformers", sorted(theirs[0].tolist()))
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 numpy==2.2.6 packaging==25.0 \
  triton==3.9.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  --ignore-requires-python --python-version 3.12 --target "$folder/megatron" megatron-core==0.19.2
seen=$(PYTHONPATH="$folder/megatron" "$folder/venv/bin/python" "$folder/show.py" 2>/dev/null)
printf 'megatron-core 0.19.2, transformers 5.24.0:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
2 experts: megatron-core [0, 4] transformers [0, 2]
4 experts: megatron-core [0, 1, 2, 3] transformers [0, 1, 2, 3]
SEEN
