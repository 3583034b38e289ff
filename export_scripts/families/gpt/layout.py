"""The GPT layout of NeMo, Megatron, GPT-2, OPT and BLOOM checkpoints.

Layout: FasterTransformer, models/multi_gpu_gpt/ParallelGptWeight.cc and
ParallelGptDecoderLayerWeight.cc (5.3 line).
"""

from dataclasses import dataclass
from typing import ClassVar

from export_scripts.families.layout.architecture import DecoderArchitecture, activation_choice
from export_scripts.families.layout.config import ini_field
from export_scripts.families.layout.decoder import HEAD, DecoderConfig
from export_scripts.families.layout.spec import ModelFamily, layout_table


@dataclass(frozen=True, kw_only=True)
class GPTConfig(DecoderConfig):
    """config.ini [gpt]; absent keys have the loader's defaults."""

    SECTION: ClassVar[str] = "gpt"

    max_pos_seq_len: int | None = None  # None with ALiBi, which has no table
    layernorm_eps: float = 1e-6
    layernorm_type: str = "pre_layernorm"
    activation_type: str = "Gelu"
    has_positional_encoding: bool = True
    has_pre_decoder_layernorm: bool = False
    has_post_decoder_layernorm: bool = True
    use_attention_linear_bias: bool = False
    has_adapters: bool = False
    adapter_inter_size: int = 0
    model_variant: str | None = None
    int8: bool | None = None  # static int8 files are next to the weights
    exact_gelu: bool = False  # not an FT key (FT computes the tanh form): gelu by erf
    # Not an FT key: distinguishes a missing model.lm_head.weight.bin from a tied head. Without the
    # file, FT assumes a tied head.
    tie_word_embeddings: bool = ini_field(True, absent=lambda _, files: f"{HEAD}.bin" not in files)

    @property
    def local_hidden(self) -> int:
        """The attention width of a tensor-parallel rank."""
        return self.hidden // self.tensor_para_size

    def architecture(self) -> DecoderArchitecture:
        """Return the decoder; a gated activation is refused, too."""
        if self.layernorm_type not in ("pre_layernorm", "post_layernorm"):
            raise ValueError(
                f"layernorm_type = {self.layernorm_type}; known: pre_layernorm, post_layernorm"
            )
        activation, gated = activation_choice(self.activation_type)
        if gated:
            raise ValueError(f"activation_type = {self.activation_type}: GPT folders hold no gate")
        learned = self.has_positional_encoding
        alibi = self.use_attention_linear_bias
        # BLOOM's post variant normalises first, and the residual adds the normalised input.
        bloom_post = self.model_variant == "bloom-post"
        return self.build_architecture(
            DecoderArchitecture,
            kv_head_num=self.head_num,
            position="learned" if learned else "alibi" if alibi else "none",
            max_pos_seq_len=self.max_pos_seq_len if learned else None,
            norm_before=self.layernorm_type == "pre_layernorm" or bloom_post,
            residual_from_norm=bloom_post,
            activation=activation,
            adapter_inter_size=self.adapter_inter_size if self.has_adapters else 0,
        )

    def ft_limits(self) -> list[str]:
        """Return a reason if the model is BLOOM's post variant."""
        if self.model_variant == "bloom-post":
            return [
                "model_variant = bloom-post adds the residual of the normalised input, which "
                "FasterTransformer's post_layernorm does not"
            ]
        return []


LAYOUT = layout_table("gpt")

GPT = ModelFamily(
    name="gpt",
    model_type="GPT",
    config=GPTConfig,
    layout=LAYOUT,
    divisible=("head_num", "inter_size", "adapter_inter_size"),
)
