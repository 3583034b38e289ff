"""A model and a tokenizer of letters, which stand in for Triton's and the checkpoint's."""

import asyncio
import contextlib
import dataclasses
import string
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.test_utils import RawTestServer

from inference.backend.tokenizer import Tokenizer
from inference.front.access import OPEN_ACCESS, Access
from inference.front.guard import Guard, RejectedError
from inference.front.openai.answers import Array, Candidate
from inference.front.openai.codec import ChatTemplate, Codec, CodecFiles
from inference.front.openai.completion import TokenModel
from inference.front.openai.endpoint import OpenAIEndpoint
from inference.front.openai.prepare import ModelFacts
from inference.front.request_log import with_ids
from inference.front.tracing import tracer_of
from inference.front.workers import Workers

LETTERS = string.ascii_letters + " .,!\n"
END = 200
INPUTS = frozenset(
    {
        *("input_ids", "input_lengths", "request_output_len", "runtime_top_k", "runtime_top_p"),
        *("temperature", "random_seed", "stop_words_list", "bad_words_list", "min_length"),
        *("presence_penalty", "repetition_penalty", "is_return_log_probs", "min_p", "ignore_eos"),
        "structured_output",
    }
)
FACTS = ModelFacts("letters", INPUTS, max_rows=4, context_len=64)


class Letters(Tokenizer):
    """A tokenizer in which each letter is a token; the end token is `<end>`."""

    vocab_size = 256
    special_ids = frozenset({END})
    prefix_ids = ()

    def encode(self, text: str, **_: bool) -> list[int]:
        return [LETTERS.index(each) for each in text if each in LETTERS]

    def word_forms(self, word: str) -> list[list[int]]:
        return [self.encode(word)]

    def decode(self, ids: Sequence[int], **_: bool) -> str:
        return "".join("<end>" if each == END else LETTERS[each] for each in ids)


@dataclasses.dataclass(frozen=True)
class LetterTexts(CodecFiles):
    """The codec of letters."""

    folder: Path = Path()
    template: ChatTemplate | None = None
    others: tuple[int, ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()

    def codec(self) -> Codec:
        ends = (END, *self.others)
        return Codec(Letters(), self.template, end_ids=ends, defaults=dict(self.defaults))


class NoProcesses(Workers):
    """Does all work in this process."""

    async def run(self, work: Any, *args: Any, **_: int) -> Any:
        return work(*args)


class FakeModel(TokenModel):
    """Says `text` a letter at a time, each candidate with its number in front.

    `fails_after` letters it fails; `waits` makes it stop there until it is given up.
    """

    def __init__(
        self,
        text: str = "Hello, you there!",
        *,
        facts: ModelFacts = FACTS,
        fails_after: int | None = None,
        waits: bool = False,
        failure: Exception | None = None,
    ) -> None:
        self.facts = facts
        self._failure = failure or RejectedError("the model broke", HTTPStatus.SERVICE_UNAVAILABLE)
        self.jobs: list[Mapping[str, Array]] = []
        self.given_up = asyncio.Event()
        self._ids = [*Letters().encode(text), END]
        self._fails_after = fails_after
        self._waits = waits

    async def generate(
        self, job: Mapping[str, Array], *, streams: bool, is_answered: Callable[[], bool]
    ) -> AsyncGenerator[Sequence[Candidate], None]:
        del streams
        self.jobs.append(job)
        try:
            length = "max_output_len" if self.facts.encoder_decoder else "request_output_len"
            whole = self._ids[: int(job[length][0, 0])]
            for count in range(1, len(whole) + 1):
                if count - 1 == self._fails_after:
                    if self._waits:
                        await asyncio.Event().wait()
                    raise self._failure
                yield [Candidate(whole[:count]) for _ in job["input_ids"]]
        finally:
            self.was_answered = is_answered()
            self.given_up.set()

    async def embed(self, rows: Sequence[Sequence[int]]) -> Array:
        raise NotImplementedError


def run(
    check: Callable[[aiohttp.ClientSession], AsyncIterator[None] | object],
    model: FakeModel | None = None,
    *,
    access: Access = OPEN_ACCESS,
    template: ChatTemplate | None = None,
    ready: bool = True,
    texts: CodecFiles | None = None,
    workers: Workers | None = None,
    origins: Sequence[str] = (),
    access_log: bool = False,
    collector: str | None = None,
) -> None:
    """Run `check` with a client of an endpoint in front of a fake model."""

    async def main() -> None:
        served = model or FakeModel()
        guard = Guard(access, listens_at="127.0.0.1", origins=origins)
        endpoint = OpenAIEndpoint(
            {served.facts.name: served},
            texts or LetterTexts(template=template),
            guard,
            workers or NoProcesses(),
            is_ready=lambda: ready,
        )
        answer = with_ids(endpoint.answer, logs=access_log, tracer=tracer_of(collector))
        server = RawTestServer(answer)
        async with contextlib.AsyncExitStack() as stack:
            await server.start_server(auto_decompress=False)
            stack.push_async_callback(server.close)
            session = aiohttp.ClientSession(base_url=server.make_url("/"))
            await stack.enter_async_context(session)
            await check(session)  # type: ignore[misc]

    asyncio.run(main())


def with_facts(**changes: object) -> ModelFacts:
    """Return the fake model's facts with some of them changed."""
    return dataclasses.replace(FACTS, **changes)  # type: ignore[arg-type]
