"""GPT-J of mesh-transformer-jax, computed by transformers' GPT-J in fp32.

How shards make whole arrays: mesh-transformer-jax, to_hf_weights.py. Matrices are stored with
inputs as rows; a bias that every shard adds before the sum over shards counts once for each.
"""

# Shapes: V vocabulary, h hidden

import numpy as np
import torch

from export_scripts.checkpoints.base import FileMaps
from export_scripts.conversion.plan import ConversionPlan
from export_scripts.families.gptj import GPTJConfig
from export_scripts.numeric.arrays import round_to
from inference.certify.huggingface import HuggingFaceSource, import_transformers

# Modules of the release, within a layer "h.<layer>." or without, and those of transformers.
_MODULES = {
    "wte": "transformer.wte",
    "ln_1": "transformer.{}ln_1",
    "q": "transformer.{}attn.q_proj",
    "k": "transformer.{}attn.k_proj",
    "v": "transformer.{}attn.v_proj",
    "out_proj": "transformer.{}attn.out_proj",
    "c_fc": "transformer.{}mlp.fc_in",
    "c_proj": "transformer.{}mlp.fc_out",
    "ln_f": "transformer.ln_f",
    "lm_head": "lm_head",
}
# Arrays that shards cut, with the axis, and those that they add up; the others are alike.
_CUT = {
    **dict.fromkeys(("wte.weight", "out_proj.weight", "c_proj.weight"), 0),
    **dict.fromkeys(("q.weight", "k.weight", "v.weight", "c_fc.weight", "lm_head.weight"), 1),
    **dict.fromkeys(("c_fc.bias", "lm_head.bias"), 0),
}
_SUMMED = ("wte.bias", "c_proj.bias")


def load_mesh_transformer(plan: ConversionPlan) -> HuggingFaceSource:
    """Load a release in fp32, of the sizes that its plan has. Raises NoLibraryError."""
    transformers = import_transformers("a release of mesh-transformer-jax")
    config = plan.config
    assert isinstance(config, GPTJConfig)
    settings = transformers.GPTJConfig(
        vocab_size=config.vocab_size,
        n_embd=config.hidden,
        n_layer=config.num_layer,
        n_head=config.head_num,
        n_inner=config.inter_size,
        rotary_dim=config.rotary_embedding,
        layer_norm_epsilon=config.layernorm_eps,
        tie_word_embeddings=False,
    )
    model, info = transformers.GPTJForCausalLM.from_pretrained(
        None,
        config=settings,
        state_dict=_parameters(plan),
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not info["missing_keys"], info["missing_keys"]
    modules = {
        f"model.layers.{layer}.{ours}": _MODULES[theirs].format(f"h.{layer}.")
        for layer in range(config.num_layer)
        for ours, theirs in (("attention.dense", "out_proj"), ("mlp.dense_4h_to_h", "c_proj"))
    }
    modules["model.final_layernorm"] = _MODULES["ln_f"]
    return HuggingFaceSource.of(plan, model.eval(), modules, " of the JAX release")


def _parameters(plan: ConversionPlan) -> dict[str, torch.Tensor]:
    """Return the parameters of transformers' GPT-J by name, rounded to fp16 as the converter's."""
    maps, out = FileMaps(), {}
    for key, pieces in plan.facts.reader.tensors.items():
        *place, module, kind = key.split(".")
        name = f"{module}.{kind}"
        shards = [round_to(each.load(maps), "fp16") for each in pieces]
        whole = np.concatenate(shards, _CUT[name]) if name in _CUT else shards[0]
        if name in _SUMMED:
            whole = round_to(whole * len(shards), "fp16")
        if whole.ndim == 2 and module != "wte":
            whole = whole.T
        layer = "".join(f"{each}." for each in place)
        out[f"{_MODULES[module].format(layer)}.{kind}"] = torch.from_numpy(whole)
    table = out["transformer.wte.weight"] + out.pop("transformer.wte.bias")  # (V, h)
    return {**out, "transformer.wte.weight": table.half().float()}
