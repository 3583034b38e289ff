"""Wiring of ensembles: text to text around a generator, text to hidden states around an encoder."""

from __future__ import annotations

from export_scripts.triton.model_config import EnsembleStep
from export_scripts.triton.signature import (
    FROM_TEXT,
    TOKENS_OF_ENCODER,
    ModelSignature,
    ensemble,
)

_TEXT_INPUTS = {
    "QUERY": "INPUT_0",
    "REQUEST_OUTPUT_LEN": "INPUT_1",
    "BAD_WORDS_DICT": "INPUT_2",
    "STOP_WORDS_DICT": "INPUT_3",
}


def ensemble_steps(
    model: ModelSignature, *, model_name: str, decoupled: bool
) -> tuple[EnsembleStep, ...]:
    """Return the three steps around the generation model called `model_name`.

    Tensors between steps are named after what they hold in lower case, with a leading underscore.
    """
    outer = ensemble(model)
    options = {tensor.name for tensor in outer.inputs} - set(_TEXT_INPUTS.values())
    results = {tensor.name for tensor in outer.outputs} - {"OUTPUT_0"}
    taken = {tensor.name for tensor in model.inputs}
    produced = {tensor.name for tensor in model.outputs}

    def inner(name: str) -> str:
        return name if name in results else f"_{name.lower()}"

    to_text = {"TOKENS_BATCH": inner("output_ids"), "sequence_length": "sequence_length"}
    if "response_input_lengths" in produced:
        to_text["RESPONSE_INPUT_LENGTHS"] = inner("response_input_lengths")
    elif "input_lengths" in taken and not decoupled:
        # Next to the answers of a streaming model, Triton allows no other inputs of a step.
        to_text["REQUEST_INPUT_LEN"] = inner("REQUEST_INPUT_LEN")
    if "is_finished" in produced:
        to_text["IS_FINISHED"] = inner("is_finished")
    wanted = {"output_ids", "response_input_lengths", "is_finished"} & produced
    return (
        EnsembleStep(
            "preprocessing",
            input_map=_TEXT_INPUTS,
            output_map={name: inner(name) for name in sorted(set(FROM_TEXT.values()))},
        ),
        EnsembleStep(
            model_name,
            input_map={name: name for name in sorted(options)}
            | {name: inner(source) for name, source in FROM_TEXT.items() if name in taken},
            output_map={name: inner(name) for name in sorted(wanted | results)},
        ),
        EnsembleStep("postprocessing", input_map=to_text, output_map={"OUTPUT": "OUTPUT_0"}),
    )


def text_encoder_steps(model: ModelSignature, *, model_name: str) -> tuple[EnsembleStep, ...]:
    """Return the two steps of an encoder called `model_name` that takes text."""
    inner = {"input_ids": "_input_ids", "request_input_len": "request_input_len"}
    options = sorted({tensor.name for tensor in model.inputs} - set(TOKENS_OF_ENCODER))
    return (
        EnsembleStep("tokenizer", input_map={"query": "query"}, output_map=inner),
        EnsembleStep(
            model_name,
            input_map={name: inner[source] for name, source in TOKENS_OF_ENCODER.items()}
            | {name: name for name in options},
            output_map={tensor.name: tensor.name for tensor in model.outputs},
        ),
    )
