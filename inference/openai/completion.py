"""The course of one request: its prompts run together, its answers come whole or in pieces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference.openai.answers import (
    Answer,
    ScoredToken,
    chat_log_probs,
    completion_log_probs,
    score_prompt,
)
from inference.openai.codec import Codec
from inference.openai.generation import Candidate, GenerationJob, Generator
from inference.openai.jobs import generation_job
from inference.openai.parameters import ChatRequest, CompletionRequest, Sampling

# Prompts of one request that run at a time.
_AT_ONCE = 64


@dataclass
class Prompt:
    """One prompt of a request, and its answers.

    Attributes:
        text: how the prompt is shown where it is part of the answer.
        scored: its tokens, where log probabilities were asked for with it.
    """

    ids: tuple[int, ...]
    job: GenerationJob
    answers: list[Answer]
    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)


@dataclass(frozen=True)
class Usage:
    """Tokens of a request."""

    prompt: int
    completion: int

    def body(self) -> dict[str, int]:
        """Return them as OpenAI's API sends them."""
        total = self.prompt + self.completion
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": total,
        }


class CompletionRun:
    """The prompts of a request on their way through a model.

    `sampling` and `echo` are those of the request, `is_chat` decides the shape of the answers.
    """

    def __init__(
        self,
        model: Generator,
        codec: Codec,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        echo: bool = False,
        is_chat: bool = False,
    ) -> None:
        self.prompts = prompts
        self._model = model
        self._codec = codec
        self._sampling = sampling
        self._echo = echo
        self._is_chat = is_chat

    @property
    def usage(self) -> Usage:
        """Tokens so far; candidates that are not returned count too."""
        return Usage(
            sum(len(prompt.ids) for prompt in self.prompts),
            sum(answer.tokens for prompt in self.prompts for answer in prompt.answers),
        )

    async def whole(self) -> list[dict[str, Any]]:
        """Return the choices, once all of them are there."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def ask(prompt: Prompt) -> None:
            async with gate:
                async for _ in self._run(prompt, frames=bool(self._sampling.stop)):
                    pass

        await _together([ask(prompt) for prompt in self.prompts])
        return await asyncio.to_thread(self._choices)

    def _choices(self) -> list[dict[str, Any]]:
        kept = [answer for prompt in self.prompts for answer in self._best(prompt)]
        owners = [prompt for prompt in self.prompts for _ in range(self._sampling.choices)]
        pairs = enumerate(zip(owners, kept, strict=True))
        return [self._choice(number, owner, answer) for number, (owner, answer) in pairs]

    def _best(self, prompt: Prompt) -> list[Answer]:
        """Return the likeliest answers of a prompt, by the mean over their tokens."""
        if len(prompt.answers) == self._sampling.choices:
            return prompt.answers
        ranked = sorted(
            prompt.answers, key=lambda answer: -answer.cum_log_prob / max(answer.tokens, 1)
        )
        return ranked[: self._sampling.choices]

    def _choice(self, number: int, prompt: Prompt, answer: Answer) -> dict[str, Any]:
        common = {"index": number, "finish_reason": answer.finish_reason}
        if self._is_chat:
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            return {**common, "message": message, "logprobs": self._log_probs(answer.scored)}
        offset = 0 if self._echo else len(prompt.text)
        scored = answer.scored
        if self._echo and self._sampling.log_probs is not None:
            start = prompt.scored[-1].last if prompt.scored else 0
            scored = prompt.scored + [_moved(token, start) for token in scored]
        text = prompt.text + answer.text if self._echo else answer.text
        return {**common, "text": text, "logprobs": self._log_probs(scored, offset)}

    def _log_probs(self, tokens: Sequence[ScoredToken], offset: int = 0) -> dict[str, Any] | None:
        if self._sampling.log_probs is None:
            return None
        return chat_log_probs(tokens) if self._is_chat else completion_log_probs(
            tokens, offset=offset
        )  # fmt: skip

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the choices of each chunk of a stream as they come, those of all prompts mixed."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        gate = asyncio.Semaphore(_AT_ONCE)

        async def ask(first: int, prompt: Prompt) -> None:
            async with gate:
                sent = [_Sent() for _ in prompt.answers]
                async for _ in self._run(prompt, frames=True):
                    for number, (answer, each) in enumerate(
                        zip(prompt.answers, sent, strict=True), first
                    ):
                        if (news := self._news(number, prompt, answer, each)) is not None:
                            queue.put_nowait(news)

        async def ask_all() -> None:
            try:
                count = self._sampling.choices
                await _together(
                    [ask(place * count, each) for place, each in enumerate(self.prompts)]
                )
            finally:
                queue.put_nowait(None)

        task = asyncio.ensure_future(ask_all())
        try:
            while (piece := await queue.get()) is not None:
                yield piece
            await task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def _news(
        self, number: int, prompt: Prompt, answer: Answer, sent: _Sent
    ) -> dict[str, Any] | None:
        """Return what a choice has that was not sent yet, None if there is nothing."""
        is_first = not sent.has_begun
        if sent.is_ended or (is_first and not answer.tokens and answer.finish_reason is None):
            return None
        text = answer.text[sent.characters :]
        # A token goes with the text that it ends in; what is held back may never be sent.
        until = len(answer.text)
        ready = [
            token
            for token in answer.scored[sent.tokens :]
            if token.last <= until or answer.finish_reason is not None
        ]
        if not (text or ready or is_first or answer.finish_reason):
            return None
        sent.characters += len(text)
        sent.tokens += len(ready)
        sent.has_begun, sent.is_ended = True, answer.finish_reason is not None
        common = {"index": number, "finish_reason": answer.finish_reason}
        if self._is_chat:
            delta = ({"role": "assistant"} if is_first else {}) | {"content": text}
            return {**common, "delta": delta, "logprobs": self._log_probs(ready)}
        start = prompt.scored[-1].last if prompt.scored else len(prompt.text)
        if is_first and self._echo:
            moved = [_moved(token, start) for token in ready]
            log_probs = self._log_probs([*prompt.scored, *moved])
            return {**common, "text": prompt.text + text, "logprobs": log_probs}
        return {**common, "text": text, "logprobs": self._log_probs(ready, start)}

    async def _run(self, prompt: Prompt, *, frames: bool) -> AsyncIterator[None]:
        """Ask the model; yield after each frame of use and at the end; leave when all ended."""
        last: Sequence[Candidate] | None = None
        stream = self._model.generate(prompt.job)
        async with contextlib.aclosing(stream):  # type: ignore[type-var]
            async for last in stream:
                if not frames:
                    continue
                self._take(prompt, last, final=False)
                yield
                if all(answer.finish_reason for answer in prompt.answers):
                    return
        assert last is not None, "a model that has answered has sent a frame"
        self._take(prompt, last, final=True)
        yield

    def _take(self, prompt: Prompt, candidates: Sequence[Candidate], *, final: bool) -> None:
        if self._echo and self._sampling.log_probs is not None and not prompt.scored:
            best = self._sampling.log_probs
            prompt.scored = score_prompt(self._codec, prompt.ids, candidates[0], best)
        for answer, candidate in zip(prompt.answers, candidates, strict=True):
            answer.update(candidate, final=final)


@dataclass
class _Sent:
    """The part of a choice that was sent."""

    characters: int = 0
    tokens: int = 0
    has_begun: bool = False
    is_ended: bool = False


def begin_completion(model: Generator, codec: Codec, request: CompletionRequest) -> CompletionRun:
    """Return the course of a request of /v1/completions. Raises ApiError."""
    made = []
    for given in request.prompts:
        ids = codec.encode(given) if isinstance(given, str) else given
        text = given if isinstance(given, str) else codec.text(given)
        made.append(
            _prompt(
                model, codec, ids, request.sampling, param="prompt", text=text, echo=request.echo
            )
        )
    return CompletionRun(model, codec, made, request.sampling, echo=request.echo)


def begin_chat(model: Generator, codec: Codec, request: ChatRequest) -> CompletionRun:
    """Return the course of a request of /v1/chat/completions. Raises ApiError."""
    ids = codec.encode_chat(request.messages)
    ends = frozenset(() if codec.chat_end_id is None else (codec.chat_end_id,))
    prompt = _prompt(model, codec, ids, request.sampling, param="messages", end_ids=ends)
    return CompletionRun(model, codec, [prompt], request.sampling, is_chat=True)


def _prompt(
    model: Generator,
    codec: Codec,
    ids: tuple[int, ...],
    sampling: Sampling,
    *,
    param: str,
    text: str = "",
    echo: bool = False,
    end_ids: frozenset[int] = frozenset(),
) -> Prompt:
    facts = model.facts
    job = generation_job(facts, codec, ids, sampling, param=param, echo=echo, end_ids=end_ids)
    limit = job.output_len if sampling.max_tokens is None else sampling.max_tokens
    answers = [
        Answer(
            codec,
            () if facts.encoder_decoder else ids,
            limit,
            sampling.stop,
            codec.end_ids | end_ids,
            sampling.log_probs,
        )
        for _ in range(sampling.candidates)
    ]
    return Prompt(ids, job, answers, text)


def _moved(token: ScoredToken, by: int) -> ScoredToken:
    return ScoredToken(
        token.index, token.piece, token.first + by, token.last + by, token.place, token.names
    )


async def _together(jobs: Sequence[Any]) -> None:
    """Await all of them; where one fails, give up the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
