#!/usr/bin/env bash
# megatron-core 0.19.2: window_size (4, -1) hides a token from itself in local attention.
#
# Expected: the documentation of TransformerConfig.window_size calls -1 "infinite". (4, -1) is then a window without
#   an end on the right, and at least four earlier tokens and the token itself.
# Seen: DotProductAttention ("local" in layer specs) adds the right side to a diagonal as it stands. A query sees its
#   four predecessors and not itself; (4, 0) gives the usual window of five tokens.
# Matters for: checkpoints trained with local attention, whose numbers differ from Transformer Engine's.
# The mask is made on a GPU there; here the one call that makes it is moved to the CPU. The wheel, for Python 3.12 and
# later, is unpacked next to this Python's torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import torch
from megatron.core.transformer import utils

ones = torch.ones
torch.ones = lambda *sizes, device=None, **options: ones(*sizes, **options)
for window in ((4, 0), (4, -1)):
    hidden = utils.get_sliding_window_causal_mask(8, 8, window)
    print(window, "token 6 sees", [position for position in range(8) if not hidden[6, position]])
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.2.6 packaging==25.0 triton==3.9.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  --ignore-requires-python --python-version 3.12 --target "$folder/megatron" megatron-core==0.19.2
seen=$(PYTHONPATH="$folder/megatron" "$folder/venv/bin/python" "$folder/show.py" 2>/dev/null)
printf 'megatron-core 0.19.2:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
(4, 0) token 6 sees [2, 3, 4, 5, 6]
(4, -1) token 6 sees [2, 3, 4, 5]
SEEN
