#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: a config.json that states no rope_theta has another base in each, in six classes.
#
# Expected: what a configuration leaves out keeps its default; a class whose models state no base computes alike.
# Seen: Cohere 10,000 and 500,000, Falcon-H1 100,000 and 10,000, Persimmon 25,000 and 10,000, Qwen3-VL's text model and
#   its mixture 5,000,000 and 500,000, Kyutai's speech model 100,000 and 10,000. Attention's frequencies follow; nothing
#   is logged. Some 90 other classes with a base have the same one in both.
# Matters for: folders that were saved with defaults left out, as writers of "differences only" do: every position is
#   turned by other angles after an upgrade. A converter has to state the base.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import transformers
from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding

seen = []
for name in ("Cohere", "FalconH1", "KyutaiSpeechToText", "Persimmon", "Qwen3VLText", "Qwen3VLMoeText"):
    config = getattr(transformers, f"{name}Config")()
    base = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    seen.append(f"{name} {base:.0f}")
config = transformers.CohereConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
second = float(CohereRotaryEmbedding(config).inv_freq[1])
print(", ".join(seen) + f"; Cohere's second frequency {second:.4f}")
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" 2>/dev/null
}

before=$(show 4.57.6)
after=$(show 5.24.0)
printf 'Bases where none is stated\ntransformers 4.57.6: %s\ntransformers 5.24.0: %s\n' "$before" "$after"
[ "$before" = "Cohere 10000, FalconH1 100000, KyutaiSpeechToText 100000, Persimmon 25000, Qwen3VLText 5000000, \
Qwen3VLMoeText 5000000; Cohere's second frequency 0.3162" ] &&
  [ "$after" = "Cohere 500000, FalconH1 10000, KyutaiSpeechToText 10000, Persimmon 10000, Qwen3VLText 500000, \
Qwen3VLMoeText 500000; Cohere's second frequency 0.1939" ]
