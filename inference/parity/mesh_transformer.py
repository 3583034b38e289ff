"""GPT-J of mesh-transformer-jax, computed by transformers' GPT-J in fp32.

How shards make whole arrays: mesh-transformer-jax, to_hf_weights.py. Matrices are stored with
inputs as rows; a bias that every shard adds before the sum over shards counts once for each.
"""

# Shapes: S shards, h hidden, I inner, V vocabulary

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from export_scripts.checkpoints.base import FileMaps
from export_scripts.conversion.plan import ConversionPlan
from export_scripts.families.gptj import GPTJConfig
from export_scripts.numeric.arrays import Array, round_to
from inference.parity.huggingface import HuggingFaceSource, import_transformers

# Part of a layer in the release -> its name in transformers, and the axis that shards cut.
_MATRICES = {
    "q": ("attn.q_proj", 1),
    "k": ("attn.k_proj", 1),
    "v": ("attn.v_proj", 1),
    "out_proj": ("attn.out_proj", 0),
    "c_fc": ("mlp.fc_in", 1),
    "c_proj": ("mlp.fc_out", 0),
}


class _Release:
    """The arrays of a release, whole; rounded to fp16, as the converter rounds them."""

    def __init__(self, plan: ConversionPlan) -> None:
        self._reader = plan.facts.reader
        self._maps = FileMaps()

    def pieces(self, key: str) -> list[Array]:
        return [round_to(each.load(self._maps), "fp16") for each in self._reader.tensors[key]]

    def joined(self, key: str, axis: int) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(self.pieces(key), axis))

    def first(self, key: str) -> torch.Tensor:
        return torch.from_numpy(self.pieces(key)[0])

    def summed(self, key: str) -> torch.Tensor:
        """Return a bias (h,) that each of S shards adds."""
        pieces = self.pieces(key)
        return torch.from_numpy(round_to(pieces[0] * len(pieces), "fp16"))


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
    state = dict(_weights(_Release(plan), config.num_layer))
    model, info = transformers.GPTJForCausalLM.from_pretrained(
        None,
        config=settings,
        state_dict=state,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not info["missing_keys"], info["missing_keys"]
    modules = {
        f"model.layers.{layer}.{ours}": f"transformer.h.{layer}.{theirs}"
        for layer in range(config.num_layer)
        for ours, theirs in (
            ("attention.dense", "attn.out_proj"),
            ("mlp.dense_4h_to_h", "mlp.fc_out"),
        )
    }
    modules["model.final_layernorm"] = "transformer.ln_f"
    return HuggingFaceSource.of(plan, model.eval(), modules, " of the JAX release")


def _weights(release: _Release, layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of transformers' GPT-J by name."""
    table = release.joined("wte.weight", 0) + release.summed("wte.bias")  # (V, h)
    yield "transformer.wte.weight", table.half().float()
    for layer in range(layers):
        ours, theirs = f"h.{layer}.", f"transformer.h.{layer}."
        for name, (module, axis) in _MATRICES.items():
            yield f"{theirs}{module}.weight", release.joined(f"{ours}{name}.weight", axis).T
        yield f"{theirs}mlp.fc_in.bias", release.joined(f"{ours}c_fc.bias", 0)
        yield f"{theirs}mlp.fc_out.bias", release.summed(f"{ours}c_proj.bias")
        for part in ("weight", "bias"):
            yield f"{theirs}ln_1.{part}", release.first(f"{ours}ln_1.{part}")
    for part in ("weight", "bias"):
        yield f"transformer.ln_f.{part}", release.first(f"ln_f.{part}")
    yield "lm_head.weight", release.joined("lm_head.weight", 1).T
    yield "lm_head.bias", release.joined("lm_head.bias", 0)
