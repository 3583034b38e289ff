"""A model at a server of OpenAI's protocol, as tasks see it.

Servers differ in what they answer, and some ignore a parameter without an error. Each ability that
a metric needs is therefore tried once, on a short text, before the first sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from inference.evaluation.openai_client import OpenAIClient, choices_of
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.statistics import is_number
from inference.evaluation.task import (
    LOG_PROBS,
    TENSORS,
    TOKEN_IDS,
    Completion,
    EvaluationError,
    RequestFailedError,
    RequestTensors,
    TextGenerator,
)

if TYPE_CHECKING:
    from inference.backend.tokenizer import Tokenizer

UNKNOWN_TOKEN = -1  # of an answer that came as text; only the number of tokens is known
_PROBE = "The old lighthouse stood at the end of the point"
_GREEDY = {"temperature": 0, "n": 1}
# Parameters of vLLM and others, which a server may refuse: its own defaults could be a model's.
_EXTRAS = {"return_token_ids": True, "repetition_penalty": 1.0}


def _tried(client: OpenAIClient, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return an answer, or None where a parameter is refused."""
    try:
        return client.complete(body)
    except RequestFailedError:
        return None


def _text(answer: Mapping[str, Any]) -> str:
    text = choices_of(answer)[0].get("text")
    if not isinstance(text, str):
        raise RequestFailedError("an answer without text")
    return text


def _answer_ids(answer: Mapping[str, Any], row: int = 0) -> tuple[int, ...] | None:
    ids = choices_of(answer)[row].get("token_ids")
    if not isinstance(ids, list) or not ids or any(type(each) is not int for each in ids):
        return None
    return tuple(ids)


def _count(answer: Mapping[str, Any], key: str) -> int | None:
    usage = answer.get("usage")
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else None


def _prompt_scores(answer: Mapping[str, Any], count: int) -> list[float] | None:
    """Return the log probabilities of a prompt's tokens but the first; None without them."""
    found = choices_of(answer)[0].get("logprobs")
    values = found.get("token_logprobs") if isinstance(found, dict) else None
    if not isinstance(values, list) or not count <= len(values) <= count + 1:
        return None
    scores = values[1:count]
    return [float(each) for each in scores] if all(map(is_number, scores)) else None


@dataclass(frozen=True)
class OpenAIModel(TextGenerator):
    """Meets TextGenerator over a client of OpenAI's protocol, within what its server can do.

    Attributes:
        extras: parameters beyond OpenAI's that it takes.
        takes_ids: prompts may be token ids.
        gives_ids: answers come with their token ids.
        scores: the log probabilities of a prompt's tokens come with `echo`.
        streams: answers come in events.
    """

    client: OpenAIClient
    model: str
    tokenizer: Tokenizer
    extras: Mapping[str, Any] = field(default_factory=dict)
    takes_ids: bool = False
    gives_ids: bool = False
    scores: bool = False
    streams: bool = False

    @property
    def lacks(self) -> dict[str, str]:
        """The abilities that metrics may need and the server lacks, with the reason."""
        found = {TENSORS: "the protocol has no tensors"}
        if not (self.takes_ids and self.gives_ids):
            which = "takes" if not self.takes_ids else "returns"
            found[TOKEN_IDS] = f"the server {which} no token ids"
        if not self.scores:
            found[LOG_PROBS] = "the server returns no log probabilities of prompts (echo, logprobs)"
        return found

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of `text`."""
        return tuple(self.tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode(ids)

    def complete_text(
        self, prompt: str, *, output_len: int, score_prompt: bool = False
    ) -> Completion:
        """Return the greedy continuation as text."""
        ids = self.encode(prompt)
        answer = self.client.complete(self._body(self._prompt(ids), output_len))
        return Completion(
            text=_text(answer),
            generated=_count(answer, "completion_tokens") or 0,
            context_log_prob=self.context_log_prob(ids) if score_prompt else None,
        )

    def complete_ids(
        self, input_ids: Sequence[int], *, output_len: int, tensors: RequestTensors | None = None
    ) -> tuple[int, ...]:
        """Return the greedy tokens after `input_ids`."""
        if tensors:
            raise RequestFailedError(f"the protocol has no tensors ({', '.join(tensors)}).")
        answer = self.client.complete(self._body(list(input_ids), output_len))
        if (ids := _answer_ids(answer)) is None:
            raise RequestFailedError("the server returned no token ids.")
        return ids

    def complete_rows(
        self,
        rows: Sequence[Sequence[int]],
        *,
        output_len: int,
        each_frame: Callable[[], None] | None = None,
    ) -> list[tuple[int, ...]]:
        """Return the greedy tokens after each row; UNKNOWN_TOKEN for those that came as text."""
        prompts = [self._prompt(row) for row in rows]
        body = self._body(prompts[0] if len(prompts) == 1 else prompts, output_len)
        if each_frame is not None and self.streams and len(rows) == 1:
            return [self._streamed(body, each_frame)]
        answer = self.client.complete(body)
        count = (_count(answer, "completion_tokens") or 0) // len(rows)
        return [
            _answer_ids(answer, row) or (UNKNOWN_TOKEN,) * count
            for row in range(len(choices_of(answer)))
        ]

    def _streamed(self, body: Mapping[str, Any], each_frame: Callable[[], None]) -> tuple[int, ...]:
        ids: list[int] = []
        frames, count = 0, None
        usage = {"stream_options": {"include_usage": True}} if self.extras else {}
        for event in self.client.stream({**body, **usage}):
            if choices_of(event) and (_answer_ids(event) or choices_of(event)[0].get("text")):
                each_frame()
                frames += 1
                ids += _answer_ids(event) or ()
            found = _count(event, "completion_tokens")
            count = count if found is None else found
        if not frames:  # text of parts of characters, or none: it arrived with the end
            each_frame()
        return tuple(ids) or (UNKNOWN_TOKEN,) * (frames if count is None else count)

    def context_log_prob(self, input_ids: Sequence[int]) -> float:
        """Return the natural log probability of `input_ids`, the first token given."""
        body = self._body(list(input_ids), 1) | {"echo": True, "logprobs": 1}
        scores = _prompt_scores(self.client.complete(body), len(input_ids))
        if scores is None:
            raise RequestFailedError("the server returned no log probabilities of the prompt.")
        return math.fsum(scores)

    def _prompt(self, ids: Sequence[int]) -> Any:
        return list(ids) if self.takes_ids else self.decode(ids)

    def _body(self, prompt: Any, output_len: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_len,
            **_GREEDY,
            **self.extras,
        }


def open_model(options: EvaluationOptions) -> OpenAIModel:
    """Return the model at `options.url`, with what its server was found to be able to do.

    Raises:
        EvaluationError: nothing answers there, or the model or its tokenizer is unknown.
    """
    from inference.backend.tokenizer import load_tokenizer

    client = OpenAIClient(options.url, options.credentials, timeout_s=options.request_timeout_s)
    if options.tokenizer_dir is None:
        raise EvaluationError(
            "evaluate.protocol=openai needs the model's tokenizer: set evaluate.tokenizer to its "
            "folder, such as the one that is served."
        )
    try:
        model = options.model or _only_model(client)
        return _probed(OpenAIModel(client, model, load_tokenizer(options.tokenizer_dir)))
    except RequestFailedError as error:
        raise EvaluationError(
            f"no server of OpenAI's protocol completes text at {client.url}: {error}"
        ) from error


def _probed(model: OpenAIModel) -> OpenAIModel:
    """Return a model with the abilities of its server.

    Raises:
        RequestFailedError: it does not complete a plain text.
    """
    client = model.client
    plain = {"model": model.model, "prompt": _PROBE, "max_tokens": 3, **_GREEDY}
    text = _text(client.complete(plain))
    extras: Mapping[str, Any] = _EXTRAS
    if (given := _tried(client, {**plain, **_EXTRAS})) is None or _text(given) != text:
        extras, given = {}, None
    ids = list(model.encode(_PROBE))
    taken = _tried(client, {**plain, **extras, "prompt": ids})
    takes_ids = taken is not None and _count(taken, "prompt_tokens") in (None, len(ids))
    echo = {**plain, **extras, "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1}
    echoed = _tried(client, echo) if takes_ids else None
    try:
        streams = sum(bool(choices_of(each)) for each in client.stream({**plain, **extras})) > 1
    except RequestFailedError:
        streams = False
    return replace(
        model,
        extras=extras,
        takes_ids=takes_ids,
        gives_ids=given is not None and _answer_ids(given) is not None,
        scores=echoed is not None and _prompt_scores(echoed, len(ids)) is not None,
        streams=streams,
    )


def _only_model(client: OpenAIClient) -> str:
    answer = client.get("/models")
    data = answer.get("data") if isinstance(answer, dict) else None
    models = data if isinstance(data, list) else []
    names = [str(each.get("id")) for each in models if isinstance(each, dict)]
    if len(names) != 1:
        raise EvaluationError(
            f"{client.url} serves {', '.join(names) or 'no model that it lists'}; name the one to "
            "ask in evaluate.model."
        )
    return names[0]
