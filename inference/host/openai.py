"""OpenAI's protocol on top of the served models."""

# Shapes: n candidates, S prompt, L prompt and answer, W top tokens per position; B rows, E hidden

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from export_scripts.ft.config_ini import read_config
from export_scripts.ft.generation_file import all_end_tokens
from export_scripts.triton.model_config import parameters_of
from inference.backend.requests import TOKENS, Array, InferRequest, Outputs
from inference.backend.text_models import pad_rows
from inference.front.access import OpenAIOptions
from inference.front.context import FrontContext
from inference.front.openai.answers import Candidate
from inference.front.openai.codec import CodecFiles
from inference.front.openai.endpoint import OpenAIEndpoint
from inference.front.openai.prepare import ModelFacts
from inference.host.hosted import Hosted, weights_of
from inference.host.models import HostedModel

_TEXT_MODELS = ("preprocessing", "tokenizer")  # for generating models, and for encoders
_HIDDEN = "output_hidden_state"
_DEFAULT_CONTEXT = 4096  # the engine's, if neither model nor parameters set one
_SCORES = ("token_log_probs", "top_token_ids", "top_token_log_probs")


async def open_endpoint(
    context: FrontContext[Hosted], hosted: Hosted, options: OpenAIOptions
) -> OpenAIEndpoint:
    """Return OpenAI's endpoint for loaded models.

    Raises ValueError if no model takes token ids, or this process can read no tokenizer.
    """
    repository = hosted.folder
    models = {
        name: HostedGenerator(model, model_facts_of(model, repository))
        for name, model in hosted.models.items()
        if _takes_tokens(model)
    }
    if not models:
        raise ValueError(
            "the repository has no model that completes or encodes token ids without sessions"
        )
    texts_model = next((name for name in _TEXT_MODELS if name in hosted.models), None)
    parameters = {} if texts_model is None else parameters_of(hosted.models[texts_model].config)
    tokenizer = options.tokenizer
    if tokenizer is None and repository is not None and texts_model is not None:
        tokenizer = repository / texts_model / "1" / parameters.get("tokenizer_path", ".")
    if tokenizer is None or not tokenizer.is_dir():
        raise ValueError(
            "the repository has no tokenizer folder that this server can read; export it with its "
            "text models (export.triton_deployment.ensemble=true), or name a folder with the "
            "tokenizer's files: --openai-tokenizer, deploy.openai.tokenizer"
        )
    end_ids = _token_ids(parameters.get("end_id", ""))
    further = parameters.get("end_ids")
    others = _token_ids(further) if further else all_end_tokens(tokenizer)
    texts = CodecFiles(
        tokenizer,
        kind=parameters.get("tokenizer_type") or None,
        end_ids=tuple(dict.fromkeys((*end_ids, *others))),
        suffix=end_ids if parameters.get("append_end_id") == "1" else (),
        uses_defaults=options.sampling_defaults == "model",
        own_template=options.chat_template,
        template_values=json.dumps(options.chat_template_kwargs),
        changed_ns=max((path.stat().st_mtime_ns for path in tokenizer.iterdir()), default=0),
    )
    await context.workers.start(texts.load)
    return OpenAIEndpoint(
        models,
        texts,
        context.guard_of(origins=options.origins),
        context.workers,
        is_ready=context.is_ready,
    )


def _token_ids(text: str) -> tuple[int, ...]:
    """Return the token ids in a comma-separated parameter."""
    return tuple(int(part) for part in text.split(",") if part.strip())


def _takes_tokens(model: HostedModel) -> bool:
    """Return whether a model completes or encodes token ids and has no sessions."""
    answers = {"request_output_len", "max_output_len"} & model.inputs.keys()
    is_known = "input_ids" in model.inputs and (answers or _HIDDEN in model.outputs)
    return bool(is_known) and not model.keeps_sessions


def model_facts_of(model: HostedModel, repository: Path | None) -> ModelFacts:
    """Return the facts that the endpoint needs, from a model's parameters and its config.ini."""
    parameters, folder = parameters_of(model.config), weights_of(model, repository)
    context_len, vocab_size = int(parameters.get("max_seq_len", _DEFAULT_CONTEXT)), None
    if folder is not None:
        _, weights = read_config(folder)
        positions = getattr(weights.architecture(), "max_pos_seq_len", None)
        context_len = min(context_len, positions or context_len)
        vocab_size = getattr(weights, "vocab_size", None)
    return ModelFacts(
        name=model.name,
        inputs=frozenset(model.inputs),
        max_rows=max(model.config.max_batch_size, 1),
        context_len=context_len,
        vocab_size=vocab_size,
        encoder_decoder="max_output_len" in model.inputs,
        encodes=_HIDDEN in model.outputs,
        about=tuple(model.about.items()),
    )


class HostedGenerator:
    """One served model that completes or encodes token ids."""

    def __init__(self, model: HostedModel, facts: ModelFacts) -> None:
        self.facts = facts
        self._model = model

    async def generate(
        self, job: Mapping[str, Array], *, streams: bool, is_answered: Callable[[], bool]
    ) -> AsyncGenerator[Sequence[Candidate], None]:
        """Yield the candidates while they grow, and at last complete.

        Closing it ends the job, which counts as cancelled unless `is_answered`. `job` holds the
        inputs. Without `streams` the incomplete ones may be left out. Raises RejectedError if the
        model refuses the request or cannot answer.
        """
        is_scored = "num_log_probs" in job  # only tensors carry scores, not token lists
        wanted = ["output_ids", "sequence_length", *(_SCORES if is_scored else ())]
        request = InferRequest(dict(job), wanted, streams=streams, wants_tokens=not is_scored)
        prompt_len = 0 if self.facts.encoder_decoder else job["input_ids"].shape[1]
        async with contextlib.aclosing(self._model.infer(request)) as responses:
            try:
                async for outputs, _ in responses:
                    if TOKENS in outputs:
                        yield [Candidate(ids) for ids in outputs[TOKENS]]
                    elif outputs:
                        yield _candidates(outputs, prompt_len)
            finally:
                request.is_answered = is_answered()

    async def embed(self, rows: Sequence[Sequence[int]]) -> Array:
        """Return each row's mean hidden state, scaled to length 1, (B, E). Raises RejectedError."""
        found = []
        for first in range(0, len(rows), self.facts.max_rows):
            ids, lengths = pad_rows(rows[first : first + self.facts.max_rows], pad_id=0)
            tensors = {"input_ids": ids, "sequence_length": lengths}
            request = InferRequest(tensors, [_HIDDEN])
            hidden = (await self._model.answer(request))[_HIDDEN]  # (B, S, E)
            found.append(hidden.sum(1, dtype=np.float32) / lengths)
        vectors = np.concatenate(found)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.maximum(norms, np.finfo(np.float32).tiny))


def _candidates(outputs: Outputs, prompt_len: int) -> list[Candidate]:
    """Return the candidates in a model's outputs, which begin with `prompt_len` prompt tokens."""
    ids, lengths = outputs["output_ids"], outputs["sequence_length"]  # (n, 1, L), (n, 1)
    found = []
    for row in range(len(ids)):
        scores = (outputs[name][row, 0] if name in outputs else None for name in _SCORES)
        tokens = ids[row, 0, prompt_len : int(lengths[row, 0])].tolist()
        found.append(Candidate(tokens, *scores))
    return found
