"""Activations of a Hugging Face checkpoint, computed by transformers in fp32."""

# Shapes: B one row, N tokens, E hidden, V vocabulary

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from export_scripts.checkpoints.base import json_file
from export_scripts.checkpoints.sharded_huggingface import CONFIG_NAME
from export_scripts.families.layout.architecture import (
    Architecture,
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.families.mapping.text_models import is_vision_language
from inference.certify.activations import (
    LOGITS,
    OUTPUT,
    Activations,
    ModelInputs,
    Source,
    record_layers,
)


class NoLibraryError(ValueError):
    """transformers is not installed: weights can be compared, layers cannot be computed."""


def load_huggingface(
    path: Path,
    architecture: Architecture | None,
    adapters: Sequence[Path] = (),
    *,
    is_quantised: bool = False,
) -> Source:
    """Load a checkpoint folder in fp32, with adapters merged by PEFT.

    `architecture` is None for a decoder of an unknown family.

    Raises:
        NoLibraryError: transformers is not installed.
        ValueError: a library cannot load the folder or an adapter, would initialise weights that
            the folder lacks, or does not recognise that its weights are quantised.
    """
    library = import_transformers()
    kind, options = library.AutoModelForCausalLM, {}
    has_encoder = isinstance(architecture, EncoderDecoderArchitecture)
    answers = getattr(architecture, "decoder_num_layer", 0) > 0
    if is_vision_language(json_file(path / CONFIG_NAME)):
        kind = library.AutoModelForImageTextToText
    elif isinstance(architecture, EncoderArchitecture):
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
            "transformers would initialise at random; its layers cannot be compared"
        )
    if is_quantised and getattr(model, "hf_quantizer", None) is None:
        raise ValueError(f"transformers does not recognise the quantised weights of {path}")
    config, title = model.config.get_text_config(), type(model).__name__
    for adapter in adapters:
        try:
            import peft

            model = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
        except Exception as error:  # files can hold anything
            raise ValueError(f"PEFT cannot merge {adapter}: {error}") from error
        title = f"{type(model).__name__} with PEFT {peft.__version__}"
    return Source(
        f"transformers {library.__version__}, {title}",
        config.vocab_size,
        getattr(config, "max_position_embeddings", None),
        partial(_compute, model.eval(), has_encoder),
        start=(getattr(config, "decoder_start_token_id", None) or 0) if answers else None,
    )


def _compute(model: Any, has_encoder: bool, inputs: ModelInputs) -> Activations:
    ids: dict[str, Any] = {"input_ids": torch.tensor([inputs.ids])}
    if inputs.decoder_ids:
        ids["decoder_input_ids"] = torch.tensor([inputs.decoder_ids])
    if inputs.decoder_ids or not has_encoder:  # a T5 encoder of transformers 4 lacks the option
        ids["use_cache"] = False
    activations: Activations = {}
    with contextlib.ExitStack() as hooks:
        for name, layers in _stacks(model):
            stack = f"{name.split('.')[0]} " if has_encoder else ""
            for hook in record_layers(layers, activations, stack):
                hooks.callback(hook.remove)
        outputs = model(**ids)
    if "logits" in outputs:
        activations[LOGITS] = outputs["logits"][0].float()
    else:
        activations[OUTPUT] = outputs["last_hidden_state"][0].float()
    return activations


def _stacks(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the stacks of layers by name: the outermost module lists."""
    outer = ""
    for name, module in model.named_modules():
        is_inner = outer and name.startswith(f"{outer}.")
        if isinstance(module, torch.nn.ModuleList) and len(module) and not is_inner:
            outer = name
            yield name, module


def import_transformers() -> Any:
    """Return transformers with its output silenced. Raises NoLibraryError if it is missing."""
    try:
        import transformers
    except ImportError as error:
        raise NoLibraryError(
            "the layers of a Hugging Face checkpoint need transformers: pip install transformers"
        ) from error
    # `load_huggingface` checks the loading info that transformers would print.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
