#!/usr/bin/env bash
# transformers 5.24.0, gguf 0.19.0: a model that is loaded from a GGUF file computes without the file's rotary scaling.
#
# Expected: from_pretrained(gguf_file=...) gives the model that was written: its logits, or an error for what it cannot read.
# Seen: of most models it reads rope.freq_base alone. rope.scaling.* (linear, YaRN) and the tensor rope_freqs.weight, in
#   which llama.cpp keeps the scaling of a Llama 3.1 and later, are passed over; of a StarCoder2 the base is, too, and
#   10,000 is used. This is logged at level INFO, which is not shown. Without scaling the logits are the same.
# Matters for: evaluation, fine-tuning and conversion that begin with a GGUF file. Short prompts of a Llama 3.1 change little
#   and long ones a lot, and save_pretrained writes a folder whose config.json has lost the scaling for good.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat >"$folder/show.py" <<'PY'
import sys

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM

ids = torch.arange(1, 33)[None]
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}


def llama_order(name, values):
    """Return a Llama's queries and keys with neighbouring channels in pairs, as GGUF has them."""
    heads = 4 if "q_proj" in name else 2
    if "q_proj" not in name and "k_proj" not in name:
        return values
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def show(kind, label, rotary):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        kind, initializer_range=0.3, rope_parameters={"rope_theta": 10000.0, **rotary}, **sizes)).eval()
    path = f"{kind}-{label.replace(' ', '-')}.gguf"
    writer = gguf.GGUFWriter(f"{sys.argv[1]}/{path}", kind)
    writer.add_name("model")
    writer.add_context_length(64)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(getattr(model.config, "rms_norm_eps", 1e-5))
    writer.add_layer_norm_eps(1e-5)
    writer.add_token_list([f"token{number}" for number in range(64)])
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    scaling = rotary["rope_type"]
    if scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(rotary["factor"])
    if scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])
    if scaling == "llama3":
        plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    names = gguf.get_tensor_name_map(architecture, 2)
    for name, values in model.state_dict().items():
        base, suffix = name.rsplit(".", 1)
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            values = values.numpy().copy()
            writer.add_tensor(f"{names.get_name(base)}.{suffix}", llama_order(name, values) if kind == "llama" else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1], gguf_file=path).eval()
    with torch.no_grad():
        before, after = model(ids).logits, loaded(ids).logits
    rotary_after = loaded.config.rope_parameters
    print(f"{kind}, {label}: {'same' if torch.allclose(before, after, rtol=1e-3, atol=1e-3) else 'other'} logits,",
          rotary_after["rope_type"], rotary_after["rope_theta"])


plain = {"rope_type": "default"}
show("llama", "no scaling", plain)
show("llama", "as in Llama 3.1", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                  "original_max_position_embeddings": 16})
show("qwen2", "no scaling", plain)
show("qwen2", "linear", {"rope_type": "linear", "factor": 4.0})
show("qwen2", "YaRN", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16})
show("starcoder2", "base 10000", plain)
show("starcoder2", "base 1000000", {"rope_type": "default", "rope_theta": 1000000.0})
PY

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0 numpy==2.2.6
seen=$("$folder/venv/bin/python" "$folder/show.py" "$folder" 2>/dev/null)
printf 'transformers 5.24.0, gguf 0.19.0:\n%s\n' "$seen"
diff - <(printf '%s\n' "$seen") <<'SEEN'
llama, no scaling: same logits, default 10000.0
llama, as in Llama 3.1: other logits, default 10000.0
qwen2, no scaling: same logits, default 10000.0
qwen2, linear: other logits, default 10000.0
qwen2, YaRN: other logits, default 10000.0
starcoder2, base 10000: same logits, default 10000.0
starcoder2, base 1000000: other logits, default 10000.0
SEEN
