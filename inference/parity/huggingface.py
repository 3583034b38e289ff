"""Activations of a Hugging Face checkpoint, computed by transformers in fp32."""

# Shapes: B one row, N tokens, E hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from export_scripts.conversion.plan import ConversionPlan
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
    check_inputs,
    spread_ids,
)

_ANSWER_TOKENS = 6


@dataclass(frozen=True)
class _Stack:
    """The modules of a stack, as the layout names them.

    Attributes:
        layer: prefix of a layer's modules.
        parts: part -> output projection, within a layer.
        final_norm: norm after the last layer; absent in some models.
        name: which stack it is, of several.
    """

    layer: str
    parts: Mapping[str, str]
    final_norm: str = ""
    name: str = ""


_DECODER = _Stack(
    "model.layers.{}.",
    {"attention": "attention.dense", "mlp": "mlp.dense_4h_to_h"},
    "model.final_layernorm",
)
_T5_ENCODER = _Stack(
    "encoder.block.{}.layer.",
    {"attention": "0.SelfAttention.o", "mlp": "1.DenseReluDense.wo"},
    "encoder.final_layer_norm",
    "encoder",
)
_T5_DECODER = _Stack(
    "decoder.block.{}.layer.",
    {
        "attention": "0.SelfAttention.o",
        "cross attention": "1.EncDecAttention.o",
        "mlp": "2.DenseReluDense.wo",
    },
    "decoder.final_layer_norm",
    "decoder",
)
_BERT = _Stack(
    "model.encoder.layer.{}.", {"attention": "attention.output.dense", "mlp": "output.dense"}
)


@dataclass(frozen=True)
class HuggingFaceSource:
    """A loaded checkpoint.

    Attributes:
        model: of transformers.
        architecture: what it is.
        modules: module of the layout -> the library's.
        title: library, version and class, for people.
    """

    model: Any
    architecture: Architecture
    modules: Mapping[str, str]
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
        positions = getattr(config, "max_position_embeddings", None)
        check_inputs(inputs, vocab_size=config.vocab_size, positions=positions)
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
        architecture = self.architecture
        if isinstance(architecture, DecoderArchitecture):
            return (_DECODER,)
        if isinstance(architecture, EncoderArchitecture):
            return (_BERT,)
        return (_T5_ENCODER,) if architecture.decoder is None else (_T5_ENCODER, _T5_DECODER)

    def _watch(self, stack: _Stack, noted: dict[Place, torch.Tensor]) -> list[Any]:
        """Begin to note a stack's embedding, layers with their parts, and final norm."""
        prefix = f"{stack.name} " if stack.name else ""
        first, _, _ = self.modules[stack.layer.format(0) + stack.parts["mlp"]].partition(".0.")
        layers = self.model.get_submodule(first)
        embedding = _noting_input(noted, Place(f"{prefix}embedding"))
        handles = [layers[0].register_forward_pre_hook(embedding, with_kwargs=True)]
        for number, layer in enumerate(layers):
            where = f"{prefix}layer {number}"
            for part, name in stack.parts.items():
                note = _noting_output(noted, Place(where, part))
                module = self._module(stack.layer.format(number) + name)
                handles.append(module.register_forward_hook(note))
            handles.append(layer.register_forward_hook(_noting_output(noted, Place(where))))
        if stack.final_norm in self.modules:
            note = _noting_output(noted, Place(f"{prefix}final norm"))
            handles.append(self._module(stack.final_norm).register_forward_hook(note))
        return handles

    def _module(self, ours: str) -> Any:
        return self.model.get_submodule(self.modules[ours])

    def _move_biases(
        self, architecture: DecoderArchitecture, noted: dict[Place, torch.Tensor]
    ) -> None:
        """Count attention's output bias with the MLP where both halves are summed as one.

        The folder of a model with a parallel residual may hold the two output biases as one.
        """
        if architecture.residual == "sequential":
            return
        for number in range(architecture.num_layer):
            bias = self._module(f"model.layers.{number}.attention.dense").bias
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


def load_huggingface(plan: ConversionPlan) -> HuggingFaceSource:
    """Load a checkpoint folder in fp32; `plan` is how it becomes that of FT.

    Raises:
        NoLibraryError: transformers is not installed.
        ValueError: It cannot load the folder, or would fill in weights that the folder lacks.
    """
    transformers = import_transformers()
    architecture = plan.mapping.family.architecture(plan.config)
    options: dict[str, Any] = {}
    kind = transformers.AutoModelForCausalLM
    if isinstance(architecture, EncoderArchitecture):
        kind, options = transformers.AutoModel, {"add_pooling_layer": False}
    elif isinstance(architecture, EncoderDecoderArchitecture):
        whole = architecture.decoder is not None
        kind = (
            transformers.AutoModelForSeq2SeqLM if whole else transformers.AutoModelForTextEncoding
        )
    path = plan.request.checkpoint_path
    model = load_transformers_model(kind, path, attn_implementation="eager", **options)
    title = f"transformers {transformers.__version__}, {type(model).__name__}"
    return HuggingFaceSource(model, architecture, _modules(plan, model), title)


def _modules(plan: ConversionPlan, model: Any) -> dict[str, str]:
    """Return the library's module of each of the layout's, by the tensors that the plan reads."""
    known = {name for name, _ in model.named_modules()}
    out = {}
    for item in plan.tensors:
        for key, _ in item.source.reads[:1]:
            module = key.format(**item.index).rpartition(".")[0]
            bare = module.removeprefix(plan.mapping.prefix)
            out[item.tensor.name.rpartition(".")[0]] = module if module in known else bare
    return out


def import_transformers(source: str = "a Hugging Face checkpoint") -> Any:
    """Return the library, silenced. Raises NoLibraryError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise NoLibraryError(
            f"{source} is computed by transformers, which is not installed (pip install "
            "transformers)"
        ) from error
    # What it reports of keys is checked.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def load_transformers_model(
    kind: Any, path: Path, *, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """Load a checkpoint folder by a class of transformers.

    Raises:
        ValueError: It cannot load the folder, or would fill in weights that the folder lacks.
    """
    try:
        model, info = kind.from_pretrained(
            path, dtype=dtype, local_files_only=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ValueError(f"transformers cannot load {path}: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{path} lacks {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}, which "
            "transformers fills with random values; there is nothing to compare with"
        )
    return model.eval()
