"""Runs one request: all its prompts concurrently, with complete or streamed answers."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from inference.front.openai.answers import (
    Answer,
    Array,
    Candidate,
    ScoredToken,
    chat_log_probs,
    completion_log_probs,
    prompt_log_probs,
    scored_tokens,
)
from inference.front.openai.codec import Codec
from inference.front.openai.prepare import ModelFacts, PreparedRequest, Prompt, generation_jobs

_MAX_JOBS = 64  # concurrent jobs of one request
_MAX_SHORT_TOKENS = 1 << 12  # tokens that the event loop encodes in a few milliseconds


class TokenModel(Protocol):
    """A model that completes or encodes token ids, see `inference.host.openai`."""

    facts: ModelFacts

    def generate(
        self, job: Mapping[str, Array], *, streams: bool, is_answered: Callable[[], bool]
    ) -> AsyncGenerator[Sequence[Candidate], None]:
        """Yield the candidates while they grow, and at last complete."""

    async def embed(self, rows: Sequence[Sequence[int]]) -> Array:
        """Return a vector for each row."""


@dataclass
class PromptRun:
    """One prompt of a request and its answers."""

    number: int
    prompt: Prompt
    answers: Sequence[Answer]
    # The tokens of the prompt, if its log probabilities were requested.
    scored: list[ScoredToken] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Length of the text of the prompt, in characters."""
        return self.scored[-1].last if self.scored else len(self.prompt.text)


class CompletionRun:
    """Runs a prepared request on a model."""

    def __init__(self, model: TokenModel, codec: Codec, request: PreparedRequest) -> None:
        self._model, self._codec, self._request = model, codec, request
        self._runs: list[PromptRun] = []
        sampling = request.sampling
        self._is_scored = sampling.top_n is not None or sampling.prompt_top_n is not None
        for number, prompt in enumerate(request.prompts):
            begin = partial(
                Answer,
                codec,
                () if model.facts.encoder_decoder else prompt.ids,
                model.facts.max_answer_len(prompt.ids) if request.limit is None else request.limit,
                request.sampling.stop,
                request.end_ids,
                request.sampling.top_n,
                shows_special=not request.sampling.skip_special_tokens,
                min_tokens=request.sampling.min_tokens,
            )
            answers = [begin() for _ in range(request.sampling.n)]
            self._runs.append(PromptRun(number, prompt, answers))

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._model.facts.name

    @property
    def is_short(self) -> bool:
        """Whether the event loop can encode the answers without delay."""
        return not self._is_scored and self.usage["total_tokens"] < _MAX_SHORT_TOKENS

    @property
    def ends(self) -> list[str | None]:
        """The finish reason of each answer, None while it runs."""
        return [answer.finish_reason for run in self._runs for answer in run.answers]

    @property
    def usage(self) -> dict[str, int]:
        """Token counts so far, in OpenAI's form."""
        prompt = sum(len(run.prompt.ids) for run in self._runs)
        answers = sum(answer.tokens for run in self._runs for answer in run.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
        }

    @property
    def operation(self) -> str:
        """Name of the operation in OpenTelemetry's conventions for generative AI."""
        return "chat" if self._request.sampling.kind == "chat" else "text_completion"

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the request in these conventions; none holds text of prompts or answers."""
        sampling, usage = self._request.sampling, self.usage
        return {
            "gen_ai.request.max_tokens": self._request.limit,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.choice.count": sampling.n,
            "gen_ai.request.stream": sampling.stream,
            "gen_ai.response.finish_reasons": [end for end in self.ends if end],
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
        }

    @property
    def about_prompt(self) -> dict[str, Any]:
        """The fields about the prompt in a chat's answer."""
        return self._about(self._runs[0]) if self._request.sampling.kind == "chat" else {}

    def _about(self, run: PromptRun) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if self._request.sampling.return_token_ids:
            about["prompt_token_ids"] = run.prompt.ids.tolist()
        if self._request.sampling.prompt_logprobs is not None and run.scored:
            about["prompt_logprobs"] = prompt_log_probs(run.scored)
        return about

    async def choices(self) -> Iterator[dict[str, Any]]:
        """Return the complete choices."""
        async with contextlib.aclosing(
            self._frames(streams=bool(self._request.sampling.stop))
        ) as frames:
            async for _ in frames:
                pass
        answers = ((run, answer) for run in self._runs for answer in run.answers)
        choices = (self._choice(*pair, number, whole=True) for number, pair in enumerate(answers))
        return filter(None, choices)

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of all choices as they arrive, interleaved."""
        async with contextlib.aclosing(self._frames(streams=True)) as frames:
            async for run, answers in frames:
                for place in answers:
                    number = run.number * self._request.sampling.n + place
                    part = self._choice(run, run.answers[place], number, whole=False)
                    if part is not None:
                        yield part

    async def _frames(self, *, streams: bool) -> AsyncGenerator[tuple[PromptRun, range], None]:
        """Run all jobs; yield after each frame the prompt and the answers that have grown."""
        jobs = self._jobs()
        if len(self._runs) == 1 and self._request.sampling.n <= self._model.facts.max_rows:
            (only,) = jobs
            async with contextlib.aclosing(self._run_job(*only, streams=streams)) as frames:
                async for frame in frames:
                    yield frame
            return
        # A worker puts None after its last job, or its error.
        queue: asyncio.Queue[tuple[PromptRun, range] | Exception | None] = asyncio.Queue()

        async def work() -> None:  # each takes the next job
            try:
                for run, answers, job in jobs:
                    async with contextlib.aclosing(
                        self._run_job(run, answers, job, streams=streams)
                    ) as frames:
                        async for frame in frames:
                            queue.put_nowait(frame)
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.ensure_future(work()) for _ in range(_MAX_JOBS)]
        try:
            working = len(tasks)
            while working:
                if isinstance(item := await queue.get(), Exception):
                    raise item
                if item is None:
                    working -= 1
                else:
                    yield item
        finally:  # after a failure, or when the client has left, cancel the others
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _jobs(self) -> Iterator[tuple[PromptRun, range, Mapping[str, Array]]]:
        for run in self._runs:
            first = 0
            for job in generation_jobs(self._model.facts, self._request, run.prompt.ids):
                answers = range(first, first + len(job["input_ids"]))
                yield run, answers, job
                first = answers.stop

    async def _run_job(
        self, run: PromptRun, answers: range, job: Mapping[str, Array], *, streams: bool
    ) -> AsyncGenerator[tuple[PromptRun, range], None]:
        """Run one job; yield after each frame and at the end; stop once all answers have ended."""
        last = None

        def is_answered() -> bool:
            return all(run.answers[place].finish_reason for place in answers)

        generated = self._model.generate(job, streams=streams, is_answered=is_answered)
        async with contextlib.aclosing(generated) as frames:
            async for last in frames:
                if streams:
                    await self._update(run, answers, last, final=False)
                    yield run, answers
                    if is_answered():
                        return
        assert last is not None, "a model that has answered has sent a frame"
        await self._update(run, answers, last, final=True)
        yield run, answers

    async def _update(
        self, run: PromptRun, answers: range, candidates: Sequence[Candidate], *, final: bool
    ) -> None:
        """Add a frame to the answers; scores are handled in a thread, as decoding them is slow."""
        if self._is_scored:
            await asyncio.to_thread(self._update_now, run, answers, candidates, final=final)
        else:
            self._update_now(run, answers, candidates, final=final)

    def _update_now(
        self, run: PromptRun, answers: range, candidates: Sequence[Candidate], *, final: bool
    ) -> None:
        prompt_top_n, ids = self._request.sampling.prompt_top_n, run.prompt.ids
        if prompt_top_n is not None and not run.scored:
            first = candidates[0]
            others = (first.scores_at(n, top_n=prompt_top_n) for n in range(1, len(ids)))
            # The first token of a text has no scores.
            scores = [(None, ()), *others][: len(ids)]
            run.scored = [*scored_tokens(self._codec, (), ids, scores)]
        for place, candidate in zip(answers, candidates, strict=True):
            run.answers[place].update(candidate, final=final)

    def _choice(
        self, run: PromptRun, answer: Answer, number: int, *, whole: bool
    ) -> dict[str, Any] | None:
        """Return the unsent part of a choice, None if there is nothing."""
        sampling, is_first = self._request.sampling, not answer.has_begun
        if (new := answer.unsent()) is None:
            return None
        text, tokens, ids = new
        part: dict[str, Any] = {"index": number, "finish_reason": answer.finish_reason}
        if sampling.return_token_ids:
            part["token_ids"] = ids
        is_scored, offset = sampling.top_n is not None, run.end
        if sampling.kind == "chat":
            message = ({"role": "assistant"} if is_first else {}) | {"content": text}
            part |= {"message": {**message, "refusal": None}} if whole else {"delta": message}
            return part | {"logprobs": chat_log_probs(tokens, self._codec) if is_scored else None}
        if is_first:
            part |= self._about(run)
        if is_first and sampling.echo:
            text, offset = run.prompt.text + text, 0
            moved = (replace(t, first=t.first + run.end, last=t.last + run.end) for t in tokens)
            tokens = [*run.scored, *moved]
        scores = completion_log_probs(tokens, offset=offset) if is_scored else None
        return part | {"text": text, "logprobs": scores}
