"""The endpoint over HTTP in front of a fake model: shapes, errors, streams, who is let in."""

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from inference.front.access import Access, OpenAIOptions
from inference.front.openai.answers import Answer, Candidate
from inference.front.openai.codec import ChatTemplate, Codec, CodecFiles
from inference.front.workers import INLINE_BYTES, Workers
from tests.unit.inference.front.openai.fake_backend import (
    END,
    INPUTS,
    FakeModel,
    Letters,
    NoProcesses,
    run,
    with_facts,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "letters", "prompt": "Oh", "max_tokens": 50}
TALK = [{"role": "user", "content": "Who?"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot: "


async def ask(client: aiohttp.ClientSession, path: str = COMPLETIONS, **fields: Any) -> Any:
    body = fields if path == CHAT else {**ASKED, **fields}
    async with client.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == HTTPStatus.OK, answer
        return answer


async def refused(
    client: aiohttp.ClientSession, status: int, body: Any, path: str = COMPLETIONS
) -> Any:
    async with client.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == status, answer
        assert list(answer) == ["error"]
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        return answer["error"]


async def events(
    client: aiohttp.ClientSession, path: str = COMPLETIONS, **fields: Any
) -> list[Any]:
    """Return the events of a stream, the last as it is written."""
    body = {**(fields if path == CHAT else {**ASKED, **fields}), "stream": True}
    async with client.post(path, json=body) as response:
        assert response.status == HTTPStatus.OK, await response.text()
        assert response.content_type == "text/event-stream"
        text = await response.text()
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_completion_ends_at_the_end_token_and_counts_it():
    async def check(client: aiohttp.ClientSession) -> None:
        answer = await ask(client)
        (choice,) = answer["choices"]
        assert choice["text"] == "Hello, you there!"
        assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
        counts = {"prompt_tokens": 2, "completion_tokens": 18, "total_tokens": 20}
        assert answer["usage"].items() >= counts.items()
        short = await ask(client, max_tokens=5, echo=True)
        assert short["choices"][0]["text"] == "OhHello"
        assert short["choices"][0]["finish_reason"] == "length"

    run(check)


def test_prompts_and_choices_come_in_order():
    async def check(client: aiohttp.ClientSession) -> None:
        answer = await ask(client, prompt=["Oh", "bcd"], n=2, echo=True, max_tokens=1)
        assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
        assert [each["text"] for each in answer["choices"]] == ["OhH", "OhH", "bcdH", "bcdH"]
        assert answer["usage"]["prompt_tokens"] == 5
        assert answer["usage"]["completion_tokens"] == 4
        ids = await ask(client, prompt=[[1, 2, 3], [0]], echo=True, max_tokens=1)
        assert [each["text"] for each in ids["choices"]] == ["bcdH", "aH"]
        none = await ask(client, max_tokens=0, echo=True)
        assert none["choices"][0]["text"] == "Oh"
        assert none["usage"]["completion_tokens"] == 0

    run(check)


@pytest.mark.parametrize("stream", [False, True])
def test_more_choices_than_a_request_of_the_model_has_are_several_requests(stream):
    model = FakeModel()

    async def check(client: aiohttp.ClientSession) -> None:
        if stream:
            parts = (await events(client, n=10, seed=3))[:-1]
            ended = [each["choices"][0] for each in parts if each["choices"][0]["finish_reason"]]
            assert sorted(each["index"] for each in ended) == list(range(10))
        else:
            answer = await ask(client, n=10, seed=3)
            assert [each["index"] for each in answer["choices"]] == list(range(10))
            assert answer["usage"]["completion_tokens"] == 180
        assert [len(job["input_ids"]) for job in model.jobs] == [4, 4, 2]
        seeds = [seed for job in model.jobs for seed in job["random_seed"][:, 0].tolist()]
        assert len(set(seeds)) == 10

    run(check, model)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_text(stream):
    model = FakeModel()

    async def check(client: aiohttp.ClientSession) -> None:
        if stream:
            parts = (await events(client, stop=["you th", "yonder"]))[:-1]
            texts = [part["choices"][0]["text"] for part in parts]
            assert "".join(texts) == "Hello, "
            assert "y" not in "".join(texts)
            assert parts[-1]["choices"][0]["finish_reason"] == "stop"
        else:
            answer = await ask(client, stop=["you th", "yonder"])
            assert answer["choices"][0]["text"] == "Hello, "
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["usage"]["completion_tokens"] == 13
        # The model was given up there, although it had more to say; it is not cancelled.
        assert model.given_up.is_set()
        assert model.was_answered
        assert "stop_words_list" not in model.jobs[0]  # six tokens: found in the text

    run(check, model)


def test_the_tokens_of_a_whole_answer_count_up_to_its_stop_text():
    ids = Letters().encode("Hello, you there!")
    answer = Answer(Codec(Letters(), None, end_ids=(END,)), (), 50, ["yonder", "you th"])
    answer.update(Candidate(ids), final=True)
    assert (answer.text, answer.tokens, answer.finish_reason) == ("Hello, ", 13, "stop")


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("stop", "text"), [("l", "Hel"), ("o", "Hello, y"), ("o,", "Hell")])
def test_the_first_stop_text_after_the_minimum_ends_an_answer(stop, text, at_once):
    ids = Letters().encode("Hello, you there!")
    answer = Answer(Codec(Letters(), None, end_ids=(END,)), (), 50, [stop, "lo, you"], min_tokens=5)
    for count in [] if at_once else range(1, len(ids)):
        answer.update(Candidate(ids[:count]), final=False)
    answer.update(Candidate(ids), final=True)
    assert answer.text == text


class Utf8(Letters):
    """A tokenizer in which each byte is a token."""

    def decode(self, ids: Sequence[int], *, partial: bool = False, **_: bool) -> str:
        return bytes(ids).decode(errors="ignore" if partial else "replace")


def test_a_stream_sends_no_score_of_a_stop_text():
    ids, sent = list("ab\u597d".encode()), list[int]()
    answer = Answer(Codec(Utf8(), None), (), 50, ["\u597d"], top_n=0)
    for count in range(1, len(ids) + 1):
        answer.update(Candidate(ids[:count]), final=False)
        sent += [token.index for token in (answer.unsent() or ("", []))[1]]
    assert (sent, answer.text, answer.finish_reason) == (ids[:2], "ab", "stop")


def test_a_stream_sends_no_token_after_a_stop_text():
    ids, sent = list("ab\u00e9".encode()), list[int]()
    answer = Answer(Codec(Utf8(), None), (), 50, ["a"])
    for count in (3, 4):  # the first ends inside a character
        answer.update(Candidate(ids[:count]), final=False)
        sent += (answer.unsent() or ("", [], []))[2]
    assert sent == ids[:1]


def test_a_stop_text_of_one_token_ends_the_model_itself():
    model = FakeModel()

    async def check(client: aiohttp.ClientSession) -> None:
        assert (await ask(client, stop=","))["choices"][0]["text"] == "Hello"
        assert model.jobs[0]["stop_words_list"].tolist() == [[[54], [1]]]

    run(check, model)


def test_a_stream_adds_up_to_the_whole_and_ends_with_usage():
    async def check(client: aiohttp.ClientSession) -> None:
        *parts, usage, done = await events(client, n=2, stream_options={"include_usage": True})
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 36
        assert all(part["usage"] is None for part in parts)
        for index in (0, 1):
            own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
            assert "".join(each["text"] for each in own) == "Hello, you there!"
            assert len(own) == len("Hello, you there!") + 1  # a piece for each token, and the end
            assert [each["finish_reason"] for each in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1]["finish_reason"] == "stop"
        assert len({part["id"] for part in parts}) == 1

    run(check)


def test_a_chat_goes_through_the_template():
    model = FakeModel()

    async def check(client: aiohttp.ClientSession) -> None:
        answer = await ask(client, CHAT, model="letters", messages=TALK)
        assert answer["object"] == "chat.completion"
        message = answer["choices"][0]["message"]
        assert (message["role"], message["content"]) == ("assistant", "Hello, you there!")
        (prompt,) = model.jobs[0]["input_ids"].tolist()
        assert len(prompt) == answer["usage"]["prompt_tokens"]
        # Without a limit there is all the room that is left.
        assert model.jobs[0]["request_output_len"] == 64 - len(prompt)
        parts = [{"type": "text", "text": "W"}, {"type": "text", "text": "ho?"}]
        *chunks, done = await events(
            client, CHAT, model="letters", messages=[{"role": "user", "content": parts}]
        )
        assert model.jobs[1]["input_ids"].tolist() == [prompt]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta["content"] for delta in deltas) == "Hello, you there!"
        assert done == "[DONE]"
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}

    run(check, model, template=ChatTemplate(TEMPLATE, {}))


def test_an_end_token_of_the_chat_ends_it():
    model = FakeModel("so\nno")

    async def check(client: aiohttp.ClientSession) -> None:
        answer = await ask(client, CHAT, model="letters", messages=TALK)
        assert answer["choices"][0]["message"]["content"] == "so"
        assert model.jobs[0]["stop_words_list"].shape == (1, 2, 1)

    run(check, model, template=ChatTemplate(TEMPLATE, {"eos_token": "\n"}))


def test_biases_and_the_frequency_penalty_reach_models_that_take_them():
    added = {"frequency_penalty", "logit_bias_ids", "logit_bias"}
    model = FakeModel(facts=with_facts(inputs=INPUTS | added))

    async def check(client: aiohttp.ClientSession) -> None:
        bias = {"0": -100, "5": -100, "7": 2.5, "9": 0}
        await ask(client, n=2, logit_bias=bias, frequency_penalty=0.5)
        (job,) = model.jobs
        assert job["bad_words_list"][1].tolist() == [[5], [1]]
        assert job["logit_bias_ids"].tolist() == [[0, 7]] * 2
        assert job["logit_bias"].tolist() == [[-100, 2.5]] * 2
        assert job["frequency_penalty"].tolist() == [[0.5]] * 2

    run(check, model)


def test_all_problems_of_a_request_are_reported_in_one_error():
    async def check(client: aiohttp.ClientSession) -> None:
        wrong = {
            "temperature": 3,
            "n": 0,
            "frequency_penalty": 3,
            "logit_bias": {"7": 101},
            "stop": [1],
            "frobnicate": 1,
            "logprobs": 21,
            "stream_options": {"x": 1},
        }
        error = await refused(client, 400, ASKED | wrong)
        assert error["type"] == "invalid_request_error"
        for name in wrong:
            assert f"{name}: " in error["message"], name
        error = await refused(client, 400, ASKED | {"n": 0, "frobnicate": 1})
        assert (error["param"], error["code"]) == ("frobnicate", "unknown_parameter")
        error = await refused(client, 400, ASKED | {"n": 0})
        assert (error["param"], error["code"]) == ("n", "invalid_value")

    run(check)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompt": None}, "prompt: is missing"),
        ({"prompt": []}, "prompt: must be"),
        ({"prompt": ["a", [1]]}, "prompt: must be"),
        ({"prompt": [True]}, "prompt: must be"),
        ({"prompt": "\ud800"}, "unexpected end of hex escape"),
        ({"temperature": "hot"}, "temperature: must be a valid number"),
        ({"temperature": 10**400}, "temperature: must be a valid number"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"min_tokens": 1, "stop_token_ids": [5]}, "min_tokens: must be 0 with stop_token_ids"),
        ({"best_of": 2}, "best_of: is not supported"),
        ({"logprobs": 1}, "takes no num_log_probs, which logprobs needs"),
        ({"presence_penalty": 1, "repetition_penalty": 2}, "repetition_penalty: must be 1"),
        ({"logit_bias": {"a": -100}}, "logit_bias: must be"),
        ({"logit_bias": {"0" * 5000 + "5": 1}}, "logit_bias: must be"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias: must be"),
        (dict.fromkeys(map(str, range(300_000)), 1), "300003 fields, 256 at most"),
        ({"frequency_penalty": 1}, "takes no frequency_penalty, which frequency_penalty needs"),
    ],
)
def test_what_cannot_be_done_is_refused(change, word):
    async def check(client: aiohttp.ClientSession) -> None:
        assert word in (await refused(client, 400, {**ASKED, **change}))["message"]

    run(check)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (COMPLETIONS, {"prompt": ["a", "a" * 65]}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 49, "max_tokens": 16}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 64}]}, "messages"),
    ],
)
def test_more_tokens_than_the_model_has_room_for_are_refused_in_words_that_clients_know(
    path, change, param, stream
):
    model = FakeModel()

    async def check(client: aiohttp.ClientSession) -> None:
        body = (ASKED if path == COMPLETIONS else {"model": "letters"}) | change
        error = await refused(client, 400, body | {"stream": stream}, path)
        assert error["message"].startswith("This model's maximum context length is 64 tokens")
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["code"] == "context_length_exceeded"

    run(check, model, template=ChatTemplate("{{ messages[0].content }}", {}))
    assert not model.jobs


@pytest.mark.parametrize(
    ("change", "param"),
    [({"prompt": [[1], [50]]}, "prompt"), ({"logit_bias": {"50": 1}}, "logit_bias")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_token_that_the_model_lacks_is_refused_before_any_prompt_runs(change, param, stream):
    model = FakeModel(facts=with_facts(vocab_size=50, inputs=INPUTS | {"logit_bias_ids"}))

    async def check(client: aiohttp.ClientSession) -> None:
        error = await refused(client, 400, ASKED | change | {"stream": stream})
        assert error["message"] == f"{param}: the model has no token 50; its ids are below 50"
        assert (error["param"], error["code"]) == (param, "invalid_value")

    run(check, model)
    assert not model.jobs


def test_null_in_the_options_of_a_stream_is_as_good_as_absent():
    async def check(client: aiohttp.ClientSession) -> None:
        options = {"include_usage": None, "include_obfuscation": False}
        parts = await events(client, stream_options=options)
        assert "usage" not in parts[-1]

    run(check)


def test_prompts_and_answers_that_just_have_room_are_answered():
    async def check(client: aiohttp.ClientSession) -> None:
        await ask(client, prompt="a" * 48, max_tokens=16)
        talk = [{"role": "user", "content": "a" * 63}]
        answer = await ask(client, CHAT, model="letters", messages=talk)
        assert answer["usage"]["completion_tokens"] == 1

    run(check, template=ChatTemplate("{{ messages[0].content }}", {}))


def test_prompt_and_answer_of_an_encoder_decoder_have_a_room_each():
    async def check(client: aiohttp.ClientSession) -> None:
        await ask(client, prompt="a" * 64, max_tokens=64)
        for change in ({"prompt": "a" * 65}, {"max_tokens": 65}):
            error = await refused(client, 400, ASKED | change)
            assert error["code"] == "context_length_exceeded"

    run(check, FakeModel(facts=with_facts(encoder_decoder=True)))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "the body is not JSON"),
        (b"[" * 100_000, "at most 32 levels"),
        (b"[]", "the body is not an object"),
        (b"\xff", "the body is not JSON"),
        (b"", "the body is not JSON"),
        (b'{"prompt": "a", "prompt": "b"}', "Detected duplicate key"),
        (b'{"temperature": NaN}', "expected value at line 1"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "the body is not JSON"),
    ],
)
def test_what_is_not_a_json_object_is_refused(body, said):
    async def check(client: aiohttp.ClientSession) -> None:
        async with client.post(COMPLETIONS, data=body) as response:
            assert response.status == HTTPStatus.BAD_REQUEST
            assert said in (await response.json())["error"]["message"]

    run(check)


class CountedWorkers(NoProcesses):
    """Notes the paths of a process's work."""

    count = 0

    async def run(self, work: Any, *args: Any, **more: int) -> Any:
        self.count += 1
        return await super().run(work, *args, **more)


@pytest.mark.parametrize(
    ("path", "body", "is_apart"),
    [
        (COMPLETIONS, json.dumps(ASKED), False),
        (COMPLETIONS, json.dumps({**ASKED, "prompt": [1, 2]}), False),
        ("/tokenize", json.dumps({"prompt": "Oh"}), False),
        (COMPLETIONS, json.dumps({**ASKED, "prompt": "h" * INLINE_BYTES}), True),
        (COMPLETIONS, json.dumps({**ASKED, "guided_regex": "h*"}), True),
        (COMPLETIONS, '{"prompt": "Oh", "guided\\u005fregex": "h*"}', True),
        (CHAT, json.dumps({"messages": TALK}), True),
    ],
)
def test_templates_forms_and_large_bodies_are_read_in_a_process_of_their_own(path, body, is_apart):
    workers = CountedWorkers()

    async def check(client: aiohttp.ClientSession) -> None:
        async with client.post(path, data=body) as response:
            await response.read()

    run(check, workers=workers)
    assert workers.count == is_apart


def test_a_body_that_is_not_compressed_as_it_says_is_refused():
    async def check(client: aiohttp.ClientSession) -> None:
        headers = {"Content-Encoding": "gzip"}
        async with client.post(COMPLETIONS, data=b"{}", headers=headers) as response:
            assert response.status == HTTPStatus.BAD_REQUEST
            assert "cannot be decoded" in (await response.json())["error"]["message"]

    run(check)


@dataclasses.dataclass(frozen=True)
class EndlessTexts(CodecFiles):
    """Letters with a template that runs for ever, or takes all memory."""

    folder: Path = Path()
    source: str = ""

    def codec(self) -> Codec:
        return Codec(Letters(), ChatTemplate(self.source, {}), end_ids=(END,))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (f"{{% for a in range(99999) %}}{'{% for b in range(99999) %}{% endfor %}'}{{% endfor %}}",
         "more than 1 s"),
        pytest.param(
            "{{ ('a' * 99999999) * 99999999 }}", "more than 1 s|memory", marks=pytest.mark.long
        ),
    ],
)  # fmt: skip
def test_more_endless_chats_than_processes_put_nobody_to_sleep(source, said):
    texts, workers = EndlessTexts(source=source), Workers(work_s=1.0)

    async def check(client: aiohttp.ClientSession) -> None:
        await workers.start(texts.load)
        chat = {"model": "letters", "messages": TALK}
        asked = [asyncio.ensure_future(refused(client, 400, chat, CHAT)) for _ in range(3)]
        answered, longest_s = 0, 0.0
        while not all(each.done() for each in asked):
            began = time.monotonic()
            async with client.get("/health") as response:
                assert response.status == HTTPStatus.OK
            longest_s = max(longest_s, time.monotonic() - began)
            answered += 1
            await asyncio.sleep(0.02)
        # The event loop waits for none of them; a slow machine may answer each time after a second.
        assert longest_s < 1.0 or answered > len(asked) + 1
        for each in await asyncio.gather(*asked):
            assert re.search(said, each["message"])
        assert (await ask(client))["choices"][0]["text"] == "Hello, you there!"

        workers.close()

    run(check, texts=texts, workers=workers)


def test_a_chat_without_a_template_is_refused():
    async def check(client: aiohttp.ClientSession) -> None:
        error = await refused(client, 400, {"model": "letters", "messages": TALK}, CHAT)
        assert error["code"] == "no_chat_template"

    run(check)


def test_unknown_models_and_paths_are_not_found():
    async def check(client: aiohttp.ClientSession) -> None:
        error = await refused(client, 404, {**ASKED, "model": "gpt-4"})
        assert (error["type"], error["code"]) == ("invalid_request_error", "model_not_found")
        assert "letters" in error["message"]
        await refused(client, 404, ASKED, "/v1/edits")
        for name in ("letters", ""):  # a request need not name the only model
            async with client.get(f"/v1/models/{name}") as response:
                assert (await response.json())["id"] == "letters"
        async with client.get("/v1/models/others") as response:
            assert response.status == HTTPStatus.NOT_FOUND
        async with client.get(COMPLETIONS) as response:
            assert response.status == HTTPStatus.METHOD_NOT_ALLOWED
            assert "error" in await response.json()

    run(check)


def test_a_failure_before_the_first_piece_is_an_answer_of_its_own():
    async def check(client: aiohttp.ClientSession) -> None:
        for stream in (False, True):
            error = await refused(client, 503, {**ASKED, "stream": stream})
            assert (error["type"], error["message"]) == ("server_error", "the model broke")

    run(check, FakeModel(fails_after=0))


@pytest.mark.parametrize(
    ("failure", "said"),
    [(None, "the model broke"), (KeyError("secret"), "the endpoint failed; its log says why")],
)
def test_a_failure_in_the_middle_is_the_last_event(failure, said):
    async def check(client: aiohttp.ClientSession) -> None:
        *parts, last = await events(client)
        assert "".join(part["choices"][0]["text"] for part in parts) == "Hello"
        assert last["error"]["message"] == said

    run(check, FakeModel(fails_after=5, failure=failure))


def test_a_client_that_leaves_in_its_body_is_no_failure(caplog):
    async def check(client: aiohttp.ClientSession) -> None:
        assert client._base_url is not None
        _, writer = await asyncio.open_connection("127.0.0.1", client._base_url.port)
        writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n".encode())
        writer.write(b"Content-Length: 9\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.transport.abort()
        await asyncio.sleep(0.1)

    run(check)
    assert "a request failed" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_request_up(stream):
    model = FakeModel(fails_after=3, waits=True)

    async def check(client: aiohttp.ClientSession) -> None:
        async def leave() -> None:
            async with client.post(COMPLETIONS, json={**ASKED, "stream": stream}) as response:
                await response.content.read()

        task = asyncio.ensure_future(leave())
        while not model.jobs:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait_for(model.given_up.wait(), 60)

    run(check, model)


def test_only_token_holders_are_let_in(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("a" * 32 + "\n" + "b" * 32 + "\n")
    tokens.chmod(0o600)

    async def check(client: aiohttp.ClientSession) -> None:
        error = await refused(client, 401, ASKED)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "Incorrect API key provided" in error["message"]
        for key, status in (("b" * 32, 200), ("c" * 32, 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            async with client.get("/v1/models", headers=headers) as response:
                assert response.status == status
        async with client.get("/health") as response:
            assert response.status == HTTPStatus.OK

    run(check, access=Access(token_file=tokens))


def test_health_is_the_servers():
    async def check(client: aiohttp.ClientSession) -> None:
        async with client.get("/health") as response:
            assert response.status == HTTPStatus.SERVICE_UNAVAILABLE

    run(check, ready=False)


def test_web_pages_and_large_bodies_are_refused():
    async def check(client: aiohttp.ClientSession) -> None:
        headers = {"Origin": "https://example.org"}
        async with client.post(COMPLETIONS, json=ASKED, headers=headers) as response:
            assert response.status == HTTPStatus.FORBIDDEN
        error = await refused(client, 413, {**ASKED, "prompt": "a" * (1 << 20)})
        assert "larger than 1 MiB" in error["message"]

    run(check, access=Access(max_request_mb=1))


@pytest.mark.parametrize(("origins", "status"), [(["https://a.page"], 403), (["*"], 200)])
def test_web_pages_of_origins_that_may_ask_are_answered(tmp_path, origins, status):
    tokens = tmp_path / "tokens"
    tokens.write_text("a" * 32)
    tokens.chmod(0o600)

    async def check(client: aiohttp.ClientSession) -> None:
        key = {"Authorization": f"Bearer {'a' * 32}"}
        page = {"Origin": "https://a.page", "Sec-Fetch-Site": "cross-site"}
        wanted = {"Access-Control-Request-Headers": "authorization,x-stainless-os"}
        async with client.options(COMPLETIONS, headers=page | wanted) as response:
            assert response.status == HTTPStatus.NO_CONTENT
            allowed = response.headers["Access-Control-Allow-Headers"]
            assert allowed == wanted["Access-Control-Request-Headers"]
        for stream in (False, True):
            for headers, expected in ((page | key, 200), (page, 401)):
                body = {**ASKED, "stream": stream}
                async with client.post(COMPLETIONS, json=body, headers=headers) as response:
                    assert response.status == expected
                    assert response.headers["Access-Control-Allow-Origin"] == "https://a.page"
        other = {"Origin": "https://a.page.org"}
        async with client.post(COMPLETIONS, json=ASKED, headers=other | key) as response:
            assert response.status == status
            assert ("Access-Control-Allow-Origin" in response.headers) == (status == 200)

    run(check, access=Access(token_file=tokens), origins=origins)


@pytest.mark.parametrize("origin", ["a.page", "https://a.page/", "https://a.page/x", "null", ""])
def test_what_no_browser_would_send_is_no_origin(origin):
    assert "is not an origin" in OpenAIOptions(origins=[origin]).problems()[0]


def test_a_tokenizer_that_is_not_there_is_named_before_the_start():
    (problem,) = OpenAIOptions(tokenizer=Path("ensemble")).problems(prefix="--openai-")
    assert problem == "--openai-tokenizer=ensemble is not a folder."
    assert not OpenAIOptions(origins=["*", "http://127.0.0.1:3000", "http://[::1]:80"]).problems()


def test_the_json_of_a_request_has_8_mib_whatever_other_requests_may_have():
    async def check(client: aiohttp.ClientSession) -> None:
        error = await refused(client, 413, {**ASKED, "prompt": "a" * (8 << 20)})
        assert "larger than 8 MiB" in error["message"]

    run(check, access=Access(max_request_mb=128))


def test_an_answer_that_did_not_end_itself_has_no_end_token():
    model = FakeModel()

    async def check(client: aiohttp.ClientSession) -> None:
        answer = await ask(client, max_tokens=17)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert END not in model.jobs[0]["input_ids"]
        assert answer["usage"]["completion_tokens"] == 17

    run(check, model)


def test_texts_are_encoded_and_decoded_as_harnesses_ask():
    async def check(client: aiohttp.ClientSession) -> None:
        async with client.get("/tokenizer_info") as response:
            assert (await response.json())["eos_token"] == "<end>"
        for text, tokens in (("bad", [1, 0, 3]), ("<end>", [END])):
            body = {"prompt": text, "add_special_tokens": False}
            async with client.post("/tokenize", json=body) as response:
                assert (await response.json())["tokens"] == tokens
            async with client.post("/detokenize", json={"tokens": tokens}) as response:
                assert (await response.json())["prompt"] == text
        await refused(client, 400, {"prompt": ["a"]}, "/tokenize")
        await refused(client, 400, {"tokens": "a"}, "/detokenize")

    run(check)


def test_names_for_many_scores_leave_the_event_loop_free(monkeypatch):
    piece = Codec.piece

    def slowly(codec: Codec, before: Any, index: int) -> str:
        time.sleep(0.005)
        return piece(codec, before, index)

    monkeypatch.setattr(Codec, "piece", slowly)
    inputs = INPUTS | {"num_log_probs"}
    model = FakeModel("a" * 200, facts=with_facts(inputs=inputs, context_len=256))

    async def check(client: aiohttp.ClientSession) -> None:
        asked = asyncio.ensure_future(ask(client, max_tokens=150, logprobs=1))
        turns = 0
        while not asked.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert len((await asked)["choices"][0]["logprobs"]["tokens"]) == 150
        assert turns > 50

    run(check, model)
