"""Activations of a Hugging Face checkpoint, computed by transformers in fp32."""

# Shapes: B one row, N tokens, E hidden, V vocabulary

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from inference.certify.activations import ModelInputs, NoLibraryError, Place, Source, watch_layers

ANSWER_TOKENS = 6


# The stacks of the layouts: the name of one of several, the prefix of a layer's modules, within it
# the output projection of each part, and the norm after the last layer, which some models lack.
_DENSE = {"attention": "attention.dense", "mlp": "mlp.dense_4h_to_h"}
_BERT = {"attention": "attention.output.dense", "mlp": "output.dense"}
_ENCODER = {"attention": "0.SelfAttention.o", "mlp": "1.DenseReluDense.wo"}
_DECODER = {
    "attention": "0.SelfAttention.o",
    "cross attention": "1.EncDecAttention.o",
    "mlp": "2.DenseReluDense.wo",
}
_STACKS: Sequence[tuple[str, str, Mapping[str, str], str]] = (
    ("", "model.layers.{}.", _DENSE, "model.final_layernorm"),
    ("encoder ", "encoder.block.{}.layer.", _ENCODER, "encoder.final_layer_norm"),
    ("decoder ", "decoder.block.{}.layer.", _DECODER, "decoder.final_layer_norm"),
    ("", "model.encoder.layer.{}.", _BERT, ""),
)


@dataclass(frozen=True)
class HuggingFaceSource(Source):
    """A loaded checkpoint.

    Attributes:
        model: of transformers.
        architecture: what it is; None where its family is not known.
        modules: module of the layout -> the library's.
    """

    model: Any
    architecture: Architecture | None
    modules: Mapping[str, str]

    @classmethod
    def of(
        cls, plan: ConversionPlan | None, model: Any, modules: Mapping[str, str]
    ) -> HuggingFaceSource:
        """Return a loaded model as the source of a plan."""
        library, config = import_transformers(), model.config
        title = f"transformers {library.__version__}, {type(model).__name__}"
        positions = getattr(config, "max_position_embeddings", None)
        architecture = None if plan is None else plan.config.architecture()
        return cls(title, config.vocab_size, positions, model, architecture, modules)

    def default_inputs(self, ids: tuple[int, ...] = ()) -> ModelInputs:
        """Return `ids`, or ids from all over the vocabulary, with an answer for a decoder."""
        inputs = super().default_inputs(ids)
        if not getattr(self.architecture, "decoder_num_layer", 0):
            return inputs
        start = self.model.config.decoder_start_token_id or 0
        return ModelInputs(inputs.ids, (start, *self.spread_ids(ANSWER_TOKENS)))

    def compute(self, inputs: ModelInputs, noted: dict[Place, torch.Tensor]) -> None:
        """Note what every layer computes."""
        handles = self._watch(noted)
        ids = {"input_ids": torch.tensor([inputs.ids])}
        if inputs.decoder_ids:
            ids["decoder_input_ids"] = torch.tensor([inputs.decoder_ids])
        # The library itself has the states of models whose layers the layout does not name.
        options = {} if handles else {"output_hidden_states": True}
        try:
            with torch.no_grad():
                outputs = self.model(**ids, use_cache=False, **options)
        finally:
            for handle in handles:
                handle.remove()
        for number, states in enumerate(() if handles else outputs.hidden_states):
            noted[_state_place(number, len(outputs.hidden_states))] = states[0].float()
        if "logits" in outputs:
            noted[Place("logits")] = outputs.logits[0].float()
        self._move_biases(noted)

    def _watch(self, noted: dict[Place, torch.Tensor]) -> list[Any]:
        """Watch the layers of the stacks that the model has."""
        handles = []
        for stack, prefix, parts, final_norm in _STACKS:
            mlp = self.modules.get(prefix.format(0) + parts["mlp"])
            if mlp is None:
                continue
            first, _, _ = mlp.partition(".0.")
            layers = [
                (layer, {part: self._module(prefix.format(number) + name)
                         for part, name in parts.items()})
                for number, layer in enumerate(self.model.get_submodule(first))
            ]  # fmt: skip
            norm = self._module(final_norm) if final_norm in self.modules else None
            handles += watch_layers(layers, norm, noted, stack)
        return handles

    def _module(self, ours: str) -> Any:
        return self.model.get_submodule(self.modules[ours])

    def _move_biases(self, noted: dict[Place, torch.Tensor]) -> None:
        """Count attention's output bias with the MLP where both halves are summed as one.

        The folder of a model with a parallel residual may hold the two output biases as one.
        """
        choice = self.architecture
        if not isinstance(choice, DecoderArchitecture) or choice.residual == "sequential":
            return
        for number in range(choice.num_layer):
            bias = self._module(f"model.layers.{number}.attention.dense").bias
            if bias is not None:
                noted[Place(f"layer {number}", "attention")] -= bias.detach()
                noted[Place(f"layer {number}", "mlp")] += bias.detach()


def load_huggingface(path: Path, plan: ConversionPlan | None) -> HuggingFaceSource:
    """Load a checkpoint folder in fp32; `plan` is how its family reads it, None for a decoder.

    Raises:
        NoLibraryError: transformers is not installed.
        ValueError: It cannot load the folder, or would fill in weights that the folder lacks.
    """
    transformers = import_transformers()
    architecture = None if plan is None else plan.config.architecture()
    options: dict[str, Any] = {}
    kind = transformers.AutoModelForCausalLM
    if isinstance(architecture, EncoderArchitecture):
        kind, options = transformers.AutoModel, {"add_pooling_layer": False}
    elif isinstance(architecture, EncoderDecoderArchitecture):
        kind = transformers.AutoModelForTextEncoding
        if architecture.decoder_num_layer:
            kind = transformers.AutoModelForSeq2SeqLM
    model = load_transformers_model(kind, path, attn_implementation="eager", **options)
    return HuggingFaceSource.of(plan, model, {} if plan is None else _modules(plan, model))


def _state_place(number: int, count: int) -> Place:
    """Return the place of one of a library's hidden states: the last is normalised."""
    if number == 0:
        return Place("embedding")
    return Place("final norm") if number == count - 1 else Place(f"layer {number - 1}")


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


def import_transformers() -> Any:
    """Return the library, silenced. Raises NoLibraryError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise NoLibraryError(
            "a Hugging Face checkpoint is computed by transformers, which is not installed (pip "
            "install transformers)"
        ) from error
    # Its report of keys is checked.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def load_transformers_model(kind: Any, path: Path, **options: Any) -> Any:
    """Load a checkpoint folder by a class of transformers, in fp32.

    Raises:
        ValueError: It cannot load the folder, or would fill in weights that the folder lacks.
    """
    try:
        model, info = kind.from_pretrained(
            path,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ValueError(f"transformers cannot load {path}: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{path} lacks {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}, which "
            "transformers fills with random values; there is nothing to compare with"
        )
    return model.eval()
