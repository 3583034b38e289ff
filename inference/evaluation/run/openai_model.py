"""A TextGenerator on top of a server of OpenAI's protocol.

Servers differ in their answers, and some silently ignore a parameter. Before the first sample, each
ability that a metric needs is therefore tried on a short text, and parameters that the server
refuses are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from foundations.files.json_content import Fields, Table
from inference.evaluation.openai_client import (
    NEUTRAL,
    PROBE,
    OpenAIClient,
    choices_of,
    client_of,
    listed_model,
    prompt_scores,
    usage_count,
)
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.task import (
    LOG_PROBS,
    TENSORS,
    TOKEN_IDS,
    Completion,
    EvaluationError,
    Ids,
    ImplausibleAnswerError,
    RequestFailedError,
    RequestTensors,
    Tally,
    TextGenerator,
    TokenIds,
)

if TYPE_CHECKING:
    from inference.backend.tokenizer import Tokenizer

UNKNOWN_TOKEN = -1  # a token of an answer as text, of which only the number of tokens is known
# Parameters that a server may refuse.
_EXTRAS = {"return_token_ids": True, **NEUTRAL}
# Fields of a listed model that change: vLLM's permission has a new id each time, and a router loads
# a model on request.
_VOLATILE = ("created", "permission", "status", "state")


def _text(choice: Table, message: str = "message") -> str:
    """Return the text of a choice; in a chat it is the content of a message."""
    found = choice.get(message)
    text = found.get("content") if isinstance(found, dict) else choice.get("text")
    if not isinstance(text, str):
        raise RequestFailedError("the server's answer has no text")
    return text


def _answer_ids(answer: Table, row: int = 0) -> TokenIds | None:
    ids = choices_of(answer)[row].get("token_ids")
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        return None
    return tuple(ids)


@dataclass(frozen=True)
class OpenAIModel(TextGenerator):
    """A model at a server of OpenAI's protocol, with the server's abilities.

    Attributes:
        extras: parameters beyond OpenAI's that the server accepts.
        takes_ids: prompts may be token ids.
        gives_ids: answers have their token ids.
        scores: `echo` returns the log probabilities of a prompt's tokens.
        streams: answers arrive in several events.
        listed: the model's entry in the server's list at the start.
    """

    client: OpenAIClient
    model: str
    tokenizer: Tokenizer
    extras: Table = field(default_factory=dict)
    takes_ids: bool = False
    gives_ids: bool = False
    scores: bool = False
    streams: bool = False
    listed: Table = field(default_factory=dict)

    def check_unchanged(self) -> None:
        """Raise ImplausibleAnswerError if the model's entry in the server's list has changed."""
        now = _listed(self.client, self.model)
        if any(now[key] != self.listed[key] for key in now.keys() & self.listed.keys()):
            raise ImplausibleAnswerError(
                f"{self.client.url} serves another model than at the start: now {now}, at the "
                f"start {self.listed}."
            )

    @property
    def tally(self) -> Tally:
        """The outcomes of its requests."""
        return self.client.tally

    @property
    def lacks(self) -> dict[str, str]:
        """The abilities that the server lacks, each with the reason."""
        found = {TENSORS: "the protocol has no tensors"}
        if not (self.takes_ids and self.gives_ids):
            verb = "takes" if not self.takes_ids else "returns"
            found[TOKEN_IDS] = f"the server {verb} no token ids"
        if not self.scores:
            found[LOG_PROBS] = "the server returns no log probabilities of prompts (echo, logprobs)"
        return found

    def encode(self, text: str) -> TokenIds:
        """Return the token ids of `text`."""
        return tuple(self.tokenizer.encode(text))

    def decode(self, ids: Ids) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode(ids)

    def complete_text(self, prompt: str, *, output_len: int) -> Completion:
        """Return the greedy continuation as text."""
        ids = self.encode(prompt)
        answer = self.client.complete(self.body(self._prompt(ids, prompt), output_len))
        counted = usage_count(answer, "prompt_tokens")
        if counted is not None and counted < len(ids):  # servers may add special tokens to text
            self.client.check_count(counted, len(ids))
        return Completion(
            text=_text(choices_of(answer)[0]),
            generated=usage_count(answer, "completion_tokens") or 0,
        )

    def complete_ids(
        self, input_ids: Ids, *, output_len: int, tensors: RequestTensors | None = None
    ) -> TokenIds:
        """Return the greedy tokens after `input_ids`."""
        if tensors:
            raise RequestFailedError(f"the protocol has no tensors ({', '.join(tensors)}).")
        answer = self.client.complete(self.body(list(input_ids), output_len))
        if (ids := _answer_ids(answer)) is None:
            raise RequestFailedError("the server returned no token ids.")
        return ids

    def complete_rows(
        self,
        rows: Sequence[Ids],
        *,
        output_len: int,
        each_frame: Callable[[], None] | None = None,
    ) -> list[TokenIds]:
        """Return the greedy tokens after each row; UNKNOWN_TOKEN if they arrive as text."""
        prompts = [self._prompt(row) for row in rows]
        if self.client.chat and len(rows) > 1:  # a chat request has one row
            return [
                self.complete_rows([row], output_len=output_len, each_frame=each_frame)[0]
                for row in rows
            ]
        body = self.body(prompts[0] if len(prompts) == 1 else prompts, output_len)
        if each_frame is not None and self.streams and len(rows) == 1:
            return [self._streamed(body, each_frame)]
        answer = self.client.complete(body)
        count = (usage_count(answer, "completion_tokens") or 0) // len(rows)
        return [_answer_ids(answer, row) or (UNKNOWN_TOKEN,) * count for row in range(len(rows))]

    def _streamed(self, body: Table, each_frame: Callable[[], None]) -> TokenIds:
        ids: list[int] = []
        frames, count = 0, None
        usage = {"stream_options": {"include_usage": True}} if self.extras else {}
        for event in self.client.stream({**body, **usage}):
            if _has_text(event):
                each_frame()
                frames += 1
                ids += _answer_ids(event) or ()
            found = usage_count(event, "completion_tokens")
            count = count if found is None else found
        if not frames:  # no event had text, for example of incomplete characters: time the end
            each_frame()
        return tuple(ids) or (UNKNOWN_TOKEN,) * (frames if count is None else count)

    def context_log_prob(self, input_ids: Ids) -> float:
        """Return the natural log probability of `input_ids` after their first token."""
        body = self.body(list(input_ids), 1) | {"echo": True, "logprobs": 1}
        scores = prompt_scores(choices_of(self.client.complete(body))[0], len(input_ids))
        if scores is None:
            raise RequestFailedError("the server returned no log probabilities of the prompt.")
        return math.fsum(scores)

    def _prompt(self, ids: Ids, text: str | None = None) -> Any:
        if self.takes_ids:
            return list(ids)
        return self.decode(ids) if text is None else text

    def body(self, prompt: Any, output_len: int) -> Fields:
        """Return the request for the greedy tokens after a prompt."""
        return {**self.client.greedy_request(self.model, prompt, output_len), **self.extras}


def _has_text(event: Table) -> bool:
    """Return whether an event of a stream has a part of the answer."""
    choices = choices_of(event)
    if not choices:
        return False
    delta = choices[0].get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choices[0].get("text")
    return bool(_answer_ids(event) or text)


def _listed(client: OpenAIClient, name: str | None) -> Fields:
    """Return a model's entry in the server's list, without volatile fields.

    Empty if the model was named and the server does not list it, or has no list.
    """
    try:
        found = listed_model(client, name)
    except EvaluationError:
        if name is None:
            raise
        return {}
    return {key: value for key, value in found.items() if key not in _VOLATILE}


def open_model(options: EvaluationOptions) -> OpenAIModel:
    """Return the model at `options.url`, with the abilities of its server.

    Raises:
        EvaluationError: no server answers there, or the model or its tokenizer is unknown.
    """
    from inference.backend.tokenizer import load_tokenizer

    client = client_of(options, options.url)
    if options.tokenizer_dir is None:
        raise EvaluationError(
            "evaluate.protocol=openai needs the model's tokenizer: set evaluate.tokenizer to its "
            "folder, such as the served folder."
        )
    try:
        listed = _listed(client, options.model)
        name = options.model or str(listed["id"])
        tokenizer = load_tokenizer(options.tokenizer_dir)
        return _probed(OpenAIModel(client, name, tokenizer, listed=listed))
    except RequestFailedError as error:
        raise EvaluationError(
            f"no server of OpenAI's protocol completes text at {client.url}: {error}"
        ) from error


def _probed(model: OpenAIModel) -> OpenAIModel:
    """Return a model with the abilities that requests to its server show.

    Raises:
        RequestFailedError: the server does not complete a plain text.
    """
    client, plain = model.client, model.body(PROBE, 3)
    _text(choices_of(client.complete_with_retries(plain, lost_too=False))[0])
    extras = client.accepted_parameters(plain, _EXTRAS)
    answer = client.complete_or_none(plain | extras)
    ids = list(model.encode(PROBE))
    takes_ids = (
        not client.chat and client.complete_or_none({**plain, **extras, "prompt": ids}) is not None
    )
    echo = {**plain, **extras, "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1}
    echoed = client.complete_or_none(echo) if takes_ids else None
    try:
        streams = sum(map(_has_text, client.stream({**plain, **extras}))) > 1
    except RequestFailedError:
        streams = False
    return replace(
        model,
        extras=extras,
        takes_ids=takes_ids,
        gives_ids=answer is not None and _answer_ids(answer) is not None,
        scores=echoed is not None and prompt_scores(choices_of(echoed)[0], len(ids)) is not None,
        streams=streams,
    )
