"""Activations of a Hugging Face checkpoint, computed by transformers in fp32."""

# Shapes: B one row, N tokens, E hidden, V vocabulary

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from export_scripts.families.layout.architecture import (
    Architecture,
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from inference.certify.activations import (
    EMBEDDING,
    LOGITS,
    OUTPUT,
    Activations,
    ModelInputs,
    spread_ids,
)

_TOKENS, _ANSWER_TOKENS = 16, 6  # that are computed unless some are given


class NoLibraryError(ValueError):
    """transformers is not installed: layers cannot be computed, weights can be compared."""


@dataclass(frozen=True)
class Source:
    """A checkpoint in its library, one row at a time; threads may share it.

    Attributes:
        title: library, version and class, for people.
        positions: most tokens of a row; None without a limit.
        start: the first token of an encoder-decoder's answer; None for another model.
    """

    title: str
    model: Any
    vocab_size: int
    positions: int | None
    has_encoder: bool
    start: int | None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def default_inputs(self) -> ModelInputs:
        """Return ids from all over the vocabulary; behind an encoder, with an answer."""
        ids = spread_ids(min(_TOKENS, self.positions or _TOKENS), self.vocab_size)
        if self.start is None:
            return ModelInputs(ids)
        return ModelInputs(ids, (self.start, *spread_ids(_ANSWER_TOKENS, self.vocab_size)))

    def run(self, inputs: ModelInputs) -> Activations:
        """Return the first layer's input, the output of every layer, and the logits or the output.

        Raises:
            ValueError: token ids lie outside the vocabulary.
        """
        every = (*inputs.ids, *inputs.decoder_ids)
        if strange := [each for each in every if not 0 <= each < self.vocab_size]:
            raise ValueError(f"token ids {strange} are not below vocab_size={self.vocab_size}")
        ids = {"input_ids": torch.tensor([inputs.ids])}
        if inputs.decoder_ids:
            ids["decoder_input_ids"] = torch.tensor([inputs.decoder_ids])
        noted: Activations = {}
        with self.lock, torch.no_grad(), contextlib.ExitStack() as hooks:
            for name, layers in self._stacks():
                stack = f"{name.split('.')[0]} " if self.has_encoder else ""
                for hook in _watched(layers, noted, stack):
                    hooks.callback(hook.remove)
            outputs = self.model(**ids, use_cache=False)
        if "logits" in outputs:
            noted[LOGITS] = outputs["logits"][0].float()
        else:
            noted[OUTPUT] = outputs["last_hidden_state"][0].float()
        return noted

    def _stacks(self) -> Iterator[tuple[str, Any]]:
        """Yield the stacks of layers by name: lists of modules that lie in no other one."""
        outer = ""
        for name, module in self.model.named_modules():
            is_inner = outer and name.startswith(f"{outer}.")
            if isinstance(module, torch.nn.ModuleList) and len(module) and not is_inner:
                outer = name
                yield name, module


def _watched(layers: Sequence[Any], noted: Activations, stack: str) -> list[Any]:
    """Begin to note the first layer's input and every layer's output; return the hooks."""

    def note(place: str, states: torch.Tensor) -> None:
        noted[stack + place] = states.reshape(-1, states.shape[-1]).to(torch.float32, copy=True)

    def embedded(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        note(EMBEDDING, args[0] if args else named["hidden_states"])

    def watch(number: int, layer: Any) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            note(f"layer {number}", output[0] if isinstance(output, tuple) else output)

        return layer.register_forward_hook(hook)

    first = layers[0].register_forward_pre_hook(embedded, with_kwargs=True)
    return [first, *(watch(number, layer) for number, layer in enumerate(layers))]


def load_huggingface(path: Path, architecture: Architecture | None) -> Source:
    """Load a checkpoint folder in fp32; the architecture is None for a decoder of no known family.

    Raises:
        NoLibraryError: transformers is not installed.
        ValueError: It cannot load the folder, or would fill in weights that the folder lacks.
    """
    library = import_transformers()
    kind, options = library.AutoModelForCausalLM, {}
    has_encoder = isinstance(architecture, EncoderDecoderArchitecture)
    answers = getattr(architecture, "decoder_num_layer", 0) > 0
    if isinstance(architecture, EncoderArchitecture):
        kind, options = library.AutoModel, {"add_pooling_layer": False}
    elif has_encoder:
        kind = library.AutoModelForSeq2SeqLM if answers else library.AutoModelForTextEncoding
    try:
        model, info = kind.from_pretrained(
            path,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            attn_implementation="eager",
            **options,
        )
    except Exception as error:  # files can hold anything
        raise ValueError(f"transformers cannot load {path}: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{path} lacks {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}, which "
            "transformers fills with random values; there is nothing to compare with"
        )
    config = model.config.get_text_config()
    return Source(
        f"transformers {library.__version__}, {type(model).__name__}",
        model.eval(),
        config.vocab_size,
        getattr(config, "max_position_embeddings", None),
        has_encoder,
        start=(getattr(config, "decoder_start_token_id", None) or 0) if answers else None,
    )


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
