"""The GPT-J layout from the "slim" release of mesh-transformer-jax.

The joining of its shards, and the rounding to fp16, are those of FasterTransformer 5.3,
examples/pytorch/gptj/utils/gptj_ckpt_convert.py.
"""

# Shapes: S shards, h hidden
from typing import Any

from export_scripts.families.gptj import GPTJ, GPTJConfig, checked_rotary
from export_scripts.families.layout.decoder import LAYER
from export_scripts.families.mapping.names import KNOWN_NAMES, named_sources, whole_names
from export_scripts.families.mapping.settings import Settings
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import (
    Adjusted,
    Compute,
    Sources,
    TensorSource,
    transposed,
)
from export_scripts.families.mapping.tensors import ShapeTensor, float32, rounded, stacked
from foundations.errors import CheckpointMismatchError

# Sizes of the only released model; its files do not state the first two.
_RELEASED = {"head_num": 16, "rotary_embedding": 64, "hidden": 4096}
_END_OF_TEXT = 50256


def _jax_config(facts: Facts) -> GPTJConfig:
    """Return the config of a release: sizes from its arrays, heads as stated or the 6B model's."""
    settings = Settings(facts.config, "the model's JSON configuration, or --set")
    if (kind := facts.config.get("pe", "rotary")) != "rotary":
        settings.note(f"pe = {kind!r} cannot be represented: FT's GPT-J has rotary positions")
    hidden = facts.size("wte.bias", 0)
    head_num = _jax_size(facts, settings, "head_num", "n_heads")
    if hidden % head_num:
        raise CheckpointMismatchError(
            f"hidden size {hidden} does not divide by {head_num} heads: state --set head_num=.."
        )
    size_per_head = hidden // head_num
    rotary = _jax_size(facts, settings, "rotary_embedding", "pe_rotary_dims")
    is_stated = "rotary_embedding" in facts.given or "pe_rotary_dims" in facts.config
    rotary = min(rotary, size_per_head if is_stated else size_per_head // 2 * 2)
    rotary = checked_rotary(settings, "rotary_embedding (pe_rotary_dims)", rotary, size_per_head)
    ids, keys = facts.special_ids(), facts.keys()
    return settings.build_config(
        GPTJConfig,
        facts,
        model_name="gptj-6B" if hidden == _RELEASED["hidden"] else "gptj",
        head_num=head_num,
        size_per_head=size_per_head,
        inter_size=facts.rows("h.0.c_fc.bias"),
        num_layer=sum(key.endswith(".q.weight") for key in keys),
        vocab_size=facts.rows("wte.weight"),
        rotary_embedding=rotary,
        start_id=facts.token("start_id", ids.bos, _END_OF_TEXT),
        end_id=facts.token("end_id", ids.eos, _END_OF_TEXT),
        layernorm_eps=1e-5,
    )


def _jax_size(facts: Facts, settings: Settings, name: str, theirs: str) -> int:
    """Return a size that the user or the JSON next to the weights states, or the release's."""
    given = facts.given_int(name)
    if given is not None:
        return Settings({name: given}, "stated", settings.problems).integer(name)
    return settings.integer(theirs, default=_RELEASED[name])


def _jax_warnings(facts: Facts, config: GPTJConfig) -> list[str]:
    """Return a warning if the 6B model's heads are assumed for a model of another size."""
    known = "head_num" in facts.given or "n_heads" in facts.config
    if known or config.hidden == _RELEASED["hidden"]:
        return []
    return [
        f"the checkpoint does not state its heads; head_num = {config.head_num} and "
        f"rotary_embedding = {config.rotary_embedding} are assumed from GPT-J-6B: state "
        "--set head_num=.. --set rotary_embedding=.., or put the model's JSON configuration "
        "next to the weights"
    ]


def _from_first(config: GPTJConfig, joined: Any, *, rest: float | None, what: str) -> Any:
    """Return shard 0's vector (h,) from S joined ones, after checking the others."""
    shards = float32(joined).reshape(-1, config.hidden)  # (S, h)
    first = shards[0]
    if not isinstance(shards, ShapeTensor):
        expected = first if rest is None else rest
        if not bool((shards[1:] == expected).all()):
            raise CheckpointMismatchError(
                f"the {what} differs between shards in a way the release never does: shards 1 "
                f"and up should all hold {'what shard 0 holds' if rest is None else rest}"
            )
    return first


def _replicated(config: GPTJConfig, joined: Any) -> Any:
    """Return a bias that every shard adds before the sum over shards: S times the stored one."""
    first = _from_first(config, joined, rest=None, what="replicated bias")
    return rounded(first * (joined.shape[0] // config.hidden), "fp16")


def _norm(name: str, kind: str, rest: float) -> TensorSource:
    def first(config: GPTJConfig, joined: Any) -> Any:
        return rounded(_from_first(config, joined, rest=rest, what=f"layernorm {kind}"), "fp16")

    return Compute(first, (f"{name}.{kind}",))


_H = "h.{layer}."
_NORMS = {LAYER + "input_layernorm": _H + "ln_1", "model.final_layernorm": "ln_f"}
# Tensors that are stored as in the layout, apart from their type.
_STORED: Sources = {
    **named_sources(whole_names(_H, KNOWN_NAMES["gptj_jax"]), GPTJ.layout, in_out=True),
    "model.lm_head.weight": transposed("lm_head.weight", cut=1),
}
_JAX_WEIGHTS: Sources = {
    # Rounded to fp16, as the released converter did.
    **{
        name: Adjusted(source, lambda values, _: rounded(values, "fp16"))
        for name, source in _STORED.items()
    },
    **{
        f"{ours}.{kind}": _norm(theirs, kind, rest)
        for ours, theirs in _NORMS.items()
        for kind, rest in (("weight", 1.0), ("bias", 0.0))
    },
    # The table plus a bias in every row; both, and the sum, are rounded to fp16.
    "model.wte": Compute(
        lambda config, table, bias: rounded(
            rounded(table, "fp16") + _replicated(config, bias), "fp16"
        ),
        ("wte.weight", "wte.bias"),
    ),
    LAYER + "attention.query_key_value.weight": Compute(
        lambda _, *parts: rounded(stacked(parts, 1), "fp16"),
        tuple(f"{_H}{part}.weight" for part in "qkv"),
        cut=1,
    ),
    LAYER + "mlp.dense_4h_to_h.bias": Compute(_replicated, (_H + "c_proj.bias",)),
}

GPTJ_JAX = SourceMapping(
    name="jax-gptj",
    title="GPT-J, mesh-transformer-jax slim release (step_*/shard_*/*.npz)",
    family=GPTJ,
    format="jax",
    matches=lambda facts: facts.has("wte.bias"),
    config=_jax_config,
    weights=lambda *_: _JAX_WEIGHTS,
    accepts=("prompt",),
    warnings=_jax_warnings,
)
