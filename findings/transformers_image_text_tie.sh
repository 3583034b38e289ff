#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0: the head of a Mistral 3 or InternVL is untied in one and tied in the other.
#
# Expected: tie_word_embeddings=false of the text model leaves its head a matrix of its own in both releases.
# Seen: 4.57.6 goes by text_config and ignores the key of the whole. 5.24.0 goes by the key of the whole, which is true
#   where a folder does not state it, and 4.57.6 does not write it. from_pretrained notices two matrices in the file and
#   warns. A model built from the configuration has one, and a strict load_state_dict leaves the head in the embedding.
# Matters for: whatever builds the model from config.json and loads the weights itself, such as a trainer or converter.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import sys

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

kinds = {"mistral3": ("mistral", "pixtral"), "internvl": ("qwen2", "internvl_vision")}
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
for kind, (text, vision) in kinds.items():
    sides = {"image_size": 16, "patch_size": 8} if kind != "internvl" else {"image_size": [16, 16], "patch_size": [8, 8]}
    folder = f"{sys.argv[1]}/{kind}"
    if sys.argv[2] == "save":
        config = AutoConfig.for_model(
            kind,
            text_config={"model_type": text, "vocab_size": 32, "num_key_value_heads": 2, "tie_word_embeddings": False, **sizes},
            vision_config={"model_type": vision, **sides, **sizes},
            **{"image_token_id" if kind == "internvl" else "image_token_index": 3},
        )
        model = AutoModelForImageTextToText.from_config(config)
        config.save_pretrained(folder)
        torch.save(model.state_dict(), f"{folder}/weights.pt")
    else:
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
        weights = torch.load(f"{folder}/weights.pt")
        model.load_state_dict(weights)
        assert torch.equal(model.get_input_embeddings().weight, weights["lm_head.weight"])
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    print(kind, "tied" if head is table else "untied")
PY

show() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" numpy==2.2.6
  "$folder/$1/bin/python" "$folder/show.py" "$folder" "$2" 2>/dev/null
}

saved=$(show 4.57.6 save)
loaded=$(show 5.24.0 load)
printf 'made by transformers 4.57.6:\n%s\nbuilt by 5.24.0:\n%s\n' "$saved" "$loaded"
[ "$saved" = $'mistral3 untied\ninternvl untied' ]
[ "$loaded" = $'mistral3 tied\ninternvl tied' ]
