"""Activations of a Hugging Face checkpoint, computed by transformers in fp32."""

# Shapes: B one row, N tokens, E hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from export_scripts.families.layout.architecture import (
    Architecture,
    DecoderArchitecture,
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from inference.parity.activations import (
    PROMPT_TOKENS,
    Activations,
    ModelInputs,
    NoLibraryError,
    Place,
    input_problems,
    spread_ids,
)

_ANSWER_TOKENS = 6


@dataclass(frozen=True)
class _Stack:
    """The modules of a stack in transformers: its layers, and the last module of each part.

    Attributes:
        layers: the list of layers.
        parts: part -> output projection, within a layer.
        final_norm: norm after the last layer; None or absent in models without.
        name: which stack it is, of several.
    """

    layers: str
    parts: Mapping[str, str]
    final_norm: str | None = None
    name: str = ""


def _parts(attention: str, mlp: str) -> dict[str, str]:
    return {"attention": attention, "mlp": mlp}


_LLAMA = (_Stack("model.layers", _parts("self_attn.o_proj", "mlp.down_proj"), "model.norm"),)
_T5_ENCODER = _Stack(
    "encoder.block",
    _parts("layer.0.SelfAttention.o", "layer.1.DenseReluDense.wo"),
    "encoder.final_layer_norm",
    "encoder",
)
_T5_DECODER = _Stack(
    "decoder.block",
    {
        "attention": "layer.0.SelfAttention.o",
        "cross attention": "layer.1.EncDecAttention.o",
        "mlp": "layer.2.DenseReluDense.wo",
    },
    "decoder.final_layer_norm",
    "decoder",
)
_T5 = (_T5_ENCODER, _T5_DECODER)

# model_type of config.json -> stacks. Names of modules: transformers, models/*/modeling_*.py (5.0).
_STACKS: Mapping[str, tuple[_Stack, ...]] = {
    "gpt2": (_Stack("transformer.h", _parts("attn.c_proj", "mlp.c_proj"), "transformer.ln_f"),),
    "opt": (
        _Stack(
            "model.decoder.layers",
            _parts("self_attn.out_proj", "fc2"),
            "model.decoder.final_layer_norm",
        ),
    ),
    "bloom": (
        _Stack(
            "transformer.h",
            _parts("self_attention.dense", "mlp.dense_4h_to_h"),
            "transformer.ln_f",
        ),
    ),
    "gptj": (_Stack("transformer.h", _parts("attn.out_proj", "mlp.fc_out"), "transformer.ln_f"),),
    "gpt_neox": (
        _Stack(
            "gpt_neox.layers",
            _parts("attention.dense", "mlp.dense_4h_to_h"),
            "gpt_neox.final_layer_norm",
        ),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "t5": _T5,
    "mt5": _T5,
    "bert": (_Stack("encoder.layer", _parts("attention.output.dense", "output.dense")),),
}


@dataclass(frozen=True)
class HuggingFaceSource:
    """A loaded checkpoint.

    Attributes:
        model: of transformers.
        architecture: what the folder's model is.
        title: library, version and class, for people.
    """

    model: Any
    architecture: Architecture
    title: str

    def default_inputs(self, ids: tuple[int, ...] = ()) -> ModelInputs:
        """Return `ids`, or ids from all over the vocabulary, with an answer for a decoder."""
        config = self.model.config
        count = min(PROMPT_TOKENS, getattr(config, "max_position_embeddings", PROMPT_TOKENS))
        ids = ids or spread_ids(config.vocab_size, count)
        architecture = self.architecture
        if not isinstance(architecture, EncoderDecoderArchitecture) or architecture.decoder is None:
            return ModelInputs(ids)
        start = config.decoder_start_token_id or 0
        return ModelInputs(ids, (start, *spread_ids(config.vocab_size, _ANSWER_TOKENS)))

    def run(self, inputs: ModelInputs) -> Activations:
        """Return what every layer computes, each place (N, E) or (N, V) fp32.

        Raises:
            ValueError: a token id lies outside the vocabulary, or there are too many of them.
        """
        config = self.model.config
        problems = input_problems(
            inputs,
            vocab_size=config.vocab_size,
            positions=getattr(config, "max_position_embeddings", None),
        )
        if problems:
            raise ValueError("\n".join(problems))
        noted: dict[Place, torch.Tensor] = {}
        handles = [handle for stack in self._stacks() for handle in self._watch(stack, noted)]
        ids = {"input_ids": torch.tensor([inputs.ids])}
        if inputs.decoder_ids:
            ids["decoder_input_ids"] = torch.tensor([inputs.decoder_ids])
        try:
            with torch.no_grad():
                outputs = self.model(**ids, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        if "logits" in outputs:
            noted[Place("logits")] = outputs.logits[0].float()
        if isinstance(self.architecture, DecoderArchitecture):
            self._move_biases(self.architecture, noted)
        return noted

    def _stacks(self) -> tuple[_Stack, ...]:
        stacks = _STACKS[self.model.config.model_type]
        architecture = self.architecture
        if isinstance(architecture, EncoderDecoderArchitecture) and architecture.decoder is None:
            return stacks[:1]
        return stacks

    def _watch(self, stack: _Stack, noted: dict[Place, torch.Tensor]) -> list[Any]:
        """Begin to note a stack's embedding, layers with their parts, and final norm."""
        prefix = f"{stack.name} " if stack.name else ""
        layers = self.model.get_submodule(stack.layers)
        embedding = _noting_input(noted, Place(f"{prefix}embedding"))
        handles = [layers[0].register_forward_pre_hook(embedding, with_kwargs=True)]
        for number, layer in enumerate(layers):
            where = f"{prefix}layer {number}"
            for part, name in stack.parts.items():
                note = _noting_output(noted, Place(where, part))
                handles.append(layer.get_submodule(name).register_forward_hook(note))
            handles.append(layer.register_forward_hook(_noting_output(noted, Place(where))))
        norm = self._final_norm(stack)
        if norm is not None:
            note = _noting_output(noted, Place(f"{prefix}final norm"))
            handles.append(norm.register_forward_hook(note))
        return handles

    def _final_norm(self, stack: _Stack) -> Any:
        if stack.final_norm is None:
            return None
        parent, _, name = stack.final_norm.rpartition(".")
        return getattr(self.model.get_submodule(parent), name, None)

    def _move_biases(
        self, architecture: DecoderArchitecture, noted: dict[Place, torch.Tensor]
    ) -> None:
        """Count attention's output bias with the MLP where both halves are summed as one.

        The folder of a model with a parallel residual may hold the two output biases as one.
        """
        if architecture.residual == "sequential":
            return
        (stack,) = self._stacks()
        for number, layer in enumerate(self.model.get_submodule(stack.layers)):
            bias = layer.get_submodule(stack.parts["attention"]).bias
            if bias is not None:
                noted[Place(f"layer {number}", "attention")] -= bias.detach()
                noted[Place(f"layer {number}", "mlp")] += bias.detach()


_Hook = Callable[..., None]


def _noting_input(noted: dict[Place, torch.Tensor], place: Place) -> _Hook:
    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        noted[place] = states[0].to(torch.float32, copy=True)

    return hook


def _noting_output(noted: dict[Place, torch.Tensor], place: Place) -> _Hook:
    def hook(_module: Any, _args: tuple[Any, ...], output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        # Some layers fold the row into the tokens before their last linear.
        noted[place] = states.reshape(-1, states.shape[-1]).to(torch.float32, copy=True)

    return hook


def load_huggingface(path: Path, architecture: Architecture) -> HuggingFaceSource:
    """Load a checkpoint folder in fp32.

    Args:
        path: Folder with config.json.
        architecture: What the FT folder's model is.

    Raises:
        NoLibraryError: transformers is not installed.
        ValueError: It cannot load the folder, or would fill in weights that the folder lacks.
    """
    try:
        import transformers
    except ImportError as error:
        raise NoLibraryError(
            "a Hugging Face checkpoint is computed by transformers, which is not installed (pip "
            "install transformers); its tensors were compared"
        ) from error
    options: dict[str, Any] = {}
    kind = transformers.AutoModelForCausalLM
    if isinstance(architecture, EncoderArchitecture):
        kind, options = transformers.AutoModel, {"add_pooling_layer": False}
    elif isinstance(architecture, EncoderDecoderArchitecture):
        whole = architecture.decoder is not None
        kind = (
            transformers.AutoModelForSeq2SeqLM if whole else transformers.AutoModelForTextEncoding
        )
    # Its report of keys is checked below.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, info = kind.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ValueError(f"transformers cannot load {path}: {error}") from error
    if model.config.model_type not in _STACKS:
        raise ValueError(
            f"{path}: model_type {model.config.model_type!r} is not one whose layers can be "
            f"compared; known: {', '.join(_STACKS)}"
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{path} lacks {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}, which "
            "transformers fills with random values; there is nothing to compare with"
        )
    title = f"transformers {transformers.__version__}, {type(model).__name__}"
    return HuggingFaceSource(model.eval(), architecture, title)
