"""The GPT-J layout: rotary positions, one layernorm that feeds both attention and MLP.

Layout: FasterTransformer, models/gptj/GptJWeight.cc and GptJDecoderLayerWeight.cc (5.3 line). How
shards of the mesh-transformer-jax release make whole tensors, and the rounding through fp16:
examples/pytorch/gptj/utils/gptj_ckpt_convert.py.
"""

# Shapes: S shards, h hidden
from dataclasses import dataclass
from typing import Any, ClassVar

from export_scripts.errors import CheckpointMismatchError
from export_scripts.families.gpt.huggingface import GPT2_SIZES
from export_scripts.families.layout.architecture import DecoderArchitecture, Rotary
from export_scripts.families.layout.decoder import LAYER, PROMPT_WEIGHTS, DecoderConfig, unrotatable
from export_scripts.families.layout.spec import Layout, ModelFamily, WeightSpec
from export_scripts.families.mapping.huggingface import HuggingFaceDecoder
from export_scripts.families.mapping.settings import HUGGINGFACE_ACTIVATIONS, Settings
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import (
    Adjusted,
    Compute,
    Copy,
    Sources,
    TensorSource,
    transposed,
)
from export_scripts.families.mapping.tensors import ShapeTensor, float32, rounded, stacked
from export_scripts.files.json_content import Fields, Table


@dataclass(frozen=True, kw_only=True)
class GPTJConfig(DecoderConfig):
    """config.ini [gptj]; absent keys have the loader's defaults."""

    SECTION: ClassVar[str] = "gptj"

    rotary_embedding: int  # dimensions of each head that are rotated
    # Not an FT key (NVIDIA's runtime always computes with 1e-6): the model's own value.
    layernorm_eps: float = 1e-6

    def architecture(self) -> DecoderArchitecture:
        """Return the decoder."""
        return self.built(
            DecoderArchitecture,
            kv_head_num=self.head_num,
            position="rotary_interleaved",
            rotary=Rotary(dims=self.rotary_embedding),
            residual="parallel_shared",
            head_bias=True,
        )


LAYOUT: Layout = (
    WeightSpec("model.wte", ("vocab_size", "hidden")),
    *WeightSpec.norm(LAYER + "input_layernorm"),
    WeightSpec(LAYER + "attention.query_key_value.weight", ("hidden", 3, "hidden"), split=2),
    WeightSpec(LAYER + "attention.dense.weight", ("hidden", "hidden"), split=0),
    *WeightSpec.column(LAYER + "mlp.dense_h_to_4h", "hidden", "inter_size"),
    *WeightSpec.row(LAYER + "mlp.dense_4h_to_h", "inter_size", "hidden"),
    *WeightSpec.norm("model.final_layernorm"),
    WeightSpec("model.lm_head.weight", ("vocab_size", "hidden")),
    WeightSpec("model.lm_head.bias", ("vocab_size",)),
    *PROMPT_WEIGHTS,
)

GPTJ = ModelFamily(name="gptj", model_type="GPT-J", config=GPTJConfig, layout=LAYOUT)


def checked_rotary(settings: Settings, name: str, dims: int, size_per_head: int) -> int:
    """Return the dimensions of a head that are rotated, or 0 after noting a problem."""
    problems = unrotatable(name, dims, size_per_head)
    for problem in problems:
        settings.note(problem)
    return 0 if problems else dims


def _read(settings: Settings, values: Table) -> Fields:
    # All that FT computes a GPT-J with.
    tanh = {name: each for name, each in HUGGINGFACE_ACTIVATIONS.items() if each == ("Gelu", False)}
    settings.activation("activation_function", default="gelu_new", known=tanh)
    # transformers rotates whole heads where the key is null, and 64 dimensions where it is absent.
    usual = values["size_per_head"] if "rotary_dim" in settings.source else 64
    dims = settings.integer("rotary_dim", default=usual, least=2)
    dims = checked_rotary(settings, "rotary_dim", dims, values["size_per_head"])
    return {"rotary_embedding": dims}


GPTJ_HUGGINGFACE = HuggingFaceDecoder(
    model_type="gptj",
    model="GPTJForCausalLM",
    title="GPT-J",
    family=GPTJ,
    keys=GPT2_SIZES,
    layer="transformer.h.{layer}.",
    names={
        "model.wte": "transformer.wte",
        "input_layernorm": "ln_1",
        "attention.query_key_value": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "attention.dense": "attn.out_proj",
        "mlp.dense_h_to_4h": "mlp.fc_in",
        "mlp.dense_4h_to_h": "mlp.fc_out",
        "model.final_layernorm": "transformer.ln_f",
        "model.lm_head": "lm_head",
    },
    read=_read,
    written=lambda config: {
        "activation_function": "gelu_new",
        "rotary_dim": config.rotary_embedding,
    },
    stores_head=True,
    bos=50256,
    eos=50256,
    positions="n_positions",
    ignored=("*.attn.bias", "*.attn.masked_bias", "*.attn.embed_positions"),
    prefix="transformer.",
).mapping()


# The only released model; its files state neither of the first two.
_RELEASED = {"head_num": 16, "rotary_embedding": 64, "hidden": 4096}
_END_OF_TEXT = 50256


def _jax_config(facts: Facts) -> GPTJConfig:
    """Return the config of a release: sizes from its arrays, heads stated or the 6B model's."""
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
    return settings.built(
        GPTJConfig,
        facts,
        model_name="gptj-6B" if hidden == _RELEASED["hidden"] else "gptj",
        head_num=head_num,
        size_per_head=size_per_head,
        inter_size=facts.rows("h.0.c_fc.bias"),
        num_layer=sum(key.endswith(".q.weight") for key in keys),
        vocab_size=facts.rows("wte.weight"),
        rotary_embedding=rotary,
        start_id=_END_OF_TEXT if ids.bos is None else ids.bos,
        end_id=_END_OF_TEXT if ids.eos is None else ids.eos,
        layernorm_eps=1e-5,
    )


def _jax_size(facts: Facts, settings: Settings, name: str, theirs: str) -> int:
    """Return a size: the user's, that in the JSON next to the weights, or the released model's."""
    given = facts.given_int(name)
    if given is not None:
        return Settings({name: given}, "stated", settings.problems).integer(name)
    return settings.integer(theirs, default=_RELEASED[name])


def _jax_warnings(facts: Facts, config: GPTJConfig) -> list[str]:
    """Return a warning if a model of another size is assumed to have the 6B model's heads."""
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
    """Return shard 0's vector (h,) of S joined ones, after checking the others."""
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
    """Return a bias that every shard added once before the sum over shards: S times one."""
    first = _from_first(config, joined, rest=None, what="replicated bias")
    return rounded(first * (joined.shape[0] // config.hidden), "fp16")


def _norm(name: str, kind: str, rest: float) -> TensorSource:
    def first(config: GPTJConfig, joined: Any) -> Any:
        return rounded(_from_first(config, joined, rest=rest, what=f"layernorm {kind}"), "fp16")

    return Compute(first, (f"{name}.{kind}",))


_H = "h.{layer}."


def _copied(source: TensorSource) -> TensorSource:
    """Return a source rounded to fp16, as the released converter did."""
    return Adjusted(source, lambda values, _: rounded(values, "fp16"))


_JAX_WEIGHTS: Sources = {
    # The table plus the bias of every row; both, and their sum, are rounded to fp16.
    "model.wte": Compute(
        lambda config, table, bias: rounded(
            rounded(table, "fp16") + _replicated(config, bias), "fp16"
        ),
        ("wte.weight", "wte.bias"),
    ),
    LAYER + "input_layernorm.weight": _norm(_H + "ln_1", "weight", 1.0),
    LAYER + "input_layernorm.bias": _norm(_H + "ln_1", "bias", 0.0),
    LAYER + "attention.query_key_value.weight": Compute(
        lambda _, *parts: rounded(stacked(parts, 1), "fp16"),
        tuple(f"{_H}{part}.weight" for part in "qkv"),
        cut=1,
    ),
    LAYER + "attention.dense.weight": _copied(Copy(_H + "out_proj.weight", cut=0)),
    LAYER + "mlp.dense_h_to_4h.weight": _copied(Copy(_H + "c_fc.weight", cut=1)),
    LAYER + "mlp.dense_h_to_4h.bias": _copied(Copy(_H + "c_fc.bias", cut=0)),
    LAYER + "mlp.dense_4h_to_h.weight": _copied(Copy(_H + "c_proj.weight", cut=0)),
    LAYER + "mlp.dense_4h_to_h.bias": Compute(_replicated, (_H + "c_proj.bias",)),
    "model.final_layernorm.weight": _norm("ln_f", "weight", 1.0),
    "model.final_layernorm.bias": _norm("ln_f", "bias", 0.0),
    "model.lm_head.weight": _copied(transposed("lm_head.weight", cut=1)),
    "model.lm_head.bias": _copied(Copy("lm_head.bias", cut=0)),
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
