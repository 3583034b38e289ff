"""The bodies that clients and load generators send, and fields that only some of them know."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inference.backend.tokenizer import load_tokenizer
from inference.front.access import OpenAIOptions, add_openai_options, openai_of
from inference.front.guard import RejectedError
from inference.front.openai.codec import ChatTemplate, Codec, CodecFiles
from inference.front.openai.requests import (
    ChatRequest,
    CompletionRequest,
    read_request,
)
from tests.unit.inference.front.openai.fake_backend import (
    END,
    INPUTS,
    LETTERS,
    FakeModel,
    Letters,
    LetterTexts,
    run,
    with_facts,
)
from tests.unit.inference.front.openai.test_endpoint import CHAT, ask, events, refused

RECORDED = json.loads((Path(__file__).parent / "recorded_bodies.json").read_text())
COMMA = LETTERS.index(",")
TALK = [{"role": "user", "content": "Who?"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}bot{{ mood }}: {% endif %}"
)


@pytest.mark.parametrize("record", RECORDED, ids=lambda each: each["client"])
def test_a_recorded_body_is_taken(record):
    if "response_format" in record["body"]:
        pytest.importorskip("llguidance")
    kind = ChatRequest if "messages" in record["body"] else CompletionRequest
    request = read_request(kind, record["body"])
    for name, value in record.get("read", {}).items():
        assert getattr(request, name) == value


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_the_generation_files_of_lm_eval_are_taken(kind):
    # The distinct options of the 4,793 files with generation_kwargs of lm-eval 0.4.13.
    prompt = {"messages": TALK} if kind is ChatRequest else {"prompt": ["a"]}
    for body in json.loads((Path(__file__).parent / "lm_eval_bodies.json").read_text()):
        if body.get("num_beams", 1) > 1:
            with pytest.raises(RejectedError, match="num_beams"):
                read_request(kind, {**prompt, **body})
            continue
        request = read_request(kind, {**prompt, **body})
        assert request.max_tokens == min(v for k, v in body.items() if k.startswith("max_"))
        assert request.stop == [each for each in body["stop"] if each]
        assert request.temperature == body["temperature"]
        assert request.top_p == body.get("top_p", 1)


@pytest.mark.parametrize(
    ("body", "read"),
    [
        ({"max_new_tokens": 3}, {"max_tokens": 3}),
        ({"max_completion_tokens": 3, "max_tokens": 9}, {"max_tokens": 3}),
        ({"max_tokens": 9, "max_new_tokens": 4.0}, {"max_tokens": 4}),
        ({"max_tokens": 4.0, "n": 2.0, "seed": 7.0}, {"max_tokens": 4, "n": 2, "seed": 7}),
        ({"stop": list("abcdefghijklmnop")}, {"stop": list("abcdefghijklmnop")}),
        ({"stop_token_ids": [1, 2.0]}, {"stop_token_ids": [1, 2]}),
        ({"num_beams": 1, "use_beam_search": False, "early_stopping": True}, {}),
        ({"bad_words": [], "stream_interval": 1, "include_reasoning": True, "suffix": ""}, {}),
        ({"cache_prompt": True, "id_slot": -1, "mirostat": 0, "typical_p": 1.0}, {}),  # llama.cpp
        ({"rid": "a", "no_stop_trim": False, "return_hidden_states": False}, {}),  # SGLang
        ({"reasoning_effort": "none", "prompt_cache_options": {"ttl": "30m"}}, {}),
    ],
)
def test_other_spellings_are_taken(body, read):
    request = read_request(CompletionRequest, {"prompt": "a", **body})
    assert {name: getattr(request, name) for name in read} == read


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"cache_salt": "mine"}, "cache_salt"),
        ({"mirostat": 2}, "mirostat"),
        ({"regex": "a+"}, "regex"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "high", "messages": TALK}, "reasoning_effort"),
        ({"verbosity": "low", "messages": TALK}, "verbosity"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_p": 2}, "min_p"),
        ({"min_tokens": 17}, "min_tokens"),  # more than the 16 of a completion
        ({"max_tokens": 4.5}, "max_tokens"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_tokens": 4, "max_new_tokens": "8"}, "max_new_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"chat_template": "{{ 1 }}", "messages": TALK}, "chat_template"),
        ({"continue_final_message": True, "messages": TALK}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}, "messages": TALK}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"content": "Who?"}]}, "messages"),
        ({"tools": [{"type": "function"}], "messages": TALK}, "tools"),
        ({"response_format": {"type": "xml"}, "messages": TALK}, "response_format"),
        ({"top_logprobs": 3, "messages": TALK}, "top_logprobs"),
        ({"max_completion_tokens": 0, "messages": TALK}, "max_completion_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_regex": "(", "n": 1}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
def test_what_has_no_equivalent_is_refused_by_name(body, param):
    path = CHAT if "messages" in body else "/v1/completions"

    async def check(client: aiohttp.ClientSession) -> None:
        fields = {"model": "letters", **({} if path == CHAT else {"prompt": "a"}), **body}
        assert (await refused(client, 400, fields, path))["param"] == param

    run(check, template=ChatTemplate(TEMPLATE, {}))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
        ({"guided_regex": "a+", "response_format": {"type": "text"}}, {"regex": "a+"}),
    ],
)
def test_the_form_of_an_answer_reaches_the_model(fields, expected):
    pytest.importorskip("llguidance")

    async def check(client: aiohttp.ClientSession) -> None:
        await ask(client, n=2, **fields)
        (job,) = model.jobs
        sent = job.get("structured_output")
        found = None if sent is None else [json.loads(each) for (each,) in sent]
        assert found == (None if expected is None else [expected] * 2)

    model = FakeModel()
    run(check, model)


def test_an_answer_ends_at_each_end_token_and_at_a_requests_own():
    async def check(client: aiohttp.ClientSession) -> None:
        for path, fields in (("/v1/completions", {}), (CHAT, {"messages": TALK})):
            answer = await ask(client, path, **fields)
            choice = answer["choices"][0]
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert (text, choice["finish_reason"]) == ("Hello", "stop")
        whole = await ask(client, ignore_eos=True, return_token_ids=True)
        assert whole["choices"][0]["text"] == "Hello you there!"  # ends are never text
        assert whole["choices"][0]["token_ids"][-1] == END
        assert (await ask(client, stop_token_ids=[0]))["choices"][0]["text"] == "Hello"
        own = await ask(client, stop_token_ids=[LETTERS.index("H")], return_token_ids=True)
        assert own["choices"][0]["token_ids"] == [LETTERS.index("H")]
        assert own["choices"][0]["text"] == ""

    model = FakeModel()
    texts = LetterTexts(template=ChatTemplate(TEMPLATE, {}), others=(COMMA,))
    run(check, model, texts=texts)
    words = [job.get("stop_words_list") for job in model.jobs]
    assert [None if each is None else each[0, 0].tolist() for each in words] == [
        *([COMMA], [COMMA], None, [0, COMMA], [LETTERS.index("H"), COMMA])
    ]
    assert [bool("ignore_eos" in job) for job in model.jobs] == [False, False, True, False, False]


def test_what_a_request_leaves_open_is_as_the_model_says():
    async def check(client: aiohttp.ClientSession) -> None:
        await ask(client)
        await ask(client, CHAT, messages=TALK)
        await ask(client, temperature=0.25, top_k=0, presence_penalty=1, min_p=None)

    advice = {"temperature": 0.5, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.25}
    model = FakeModel()
    texts = LetterTexts(
        template=ChatTemplate(TEMPLATE, {}), defaults=(*advice.items(), ("max_tokens", 5))
    )
    run(check, model, texts=texts)
    names = ("temperature", "runtime_top_k", "min_p", "repetition_penalty", "request_output_len")
    found = [[float(job[name][0, 0]) if name in job else None for name in names]
             for job in model.jobs]  # fmt: skip
    share = pytest.approx(0.1)
    assert found == [
        [0.5, 7, share, 1.25, 50],
        [0.5, 7, share, 1.25, 5],
        [0.25, 0, share, None, 50],
    ]


def test_advice_that_no_request_may_follow_is_refused_when_it_is_loaded(tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\na\n")
    (tmp_path / "generation_config.json").write_text('{"temperature": 9, "top_k": "x"}')
    with pytest.raises(ValueError, match=r"temperature = 9, top_k = 'x' is outside of what"):
        CodecFiles(tmp_path).codec()
    assert CodecFiles(tmp_path, uses_defaults=False).codec().defaults == {}


def test_the_boundary_of_the_nucleus_is_whole_where_the_model_can():
    async def check(client: aiohttp.ClientSession) -> None:
        await ask(client, top_p=0.5)
        await ask(client, top_p=1)

    model = FakeModel(facts=with_facts(inputs=INPUTS | {"nucleus_include_boundary"}))
    run(check, model)
    assert model.jobs[0]["nucleus_include_boundary"].tolist() == [[True]]
    assert "nucleus_include_boundary" not in model.jobs[1]


def test_the_only_model_need_not_be_named():
    async def check(client: aiohttp.ClientSession) -> None:
        for body in ({"model": None}, {"model": ""}):
            assert (await ask(client, **body))["model"] == "letters"
        await refused(client, 404, {"model": "gpt-4", "prompt": "a"})

    run(check)


def test_usage_comes_with_each_chunk_where_it_is_asked_for():
    async def check(client: aiohttp.ClientSession) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        *parts, last, _ = await events(client, stream_options=options, return_token_ids=True)
        counts = [part["usage"]["completion_tokens"] for part in parts]
        assert counts == sorted(counts)
        assert counts[-1] == last["usage"]["completion_tokens"]
        first, *others = (part["choices"][0] for part in parts)
        assert first["prompt_token_ids"] == [LETTERS.index(each) for each in "Oh"]
        assert all("prompt_token_ids" not in each for each in others)
        ids = [token for each in (first, *others) for token in each["token_ids"]]
        assert len(ids) == last["usage"]["completion_tokens"]

    run(check)


def test_variables_of_the_template_come_from_the_server_and_the_request():
    template = ChatTemplate(TEMPLATE, {}, {"mood": " (calm)"})
    assert template.render(TALK) == "user: Who?\nbot (calm): "
    assert template.render(TALK, values={"mood": "!"}) == "user: Who?\nbot!: "
    assert template.render(TALK, answers=False) == "user: Who?\n"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "-- Who?"),
        ({"reasoning_effort": "low"}, "low-True Who?"),
        ({"reasoning_effort": "none"}, "none-False Who?"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "low-False Who?",
        ),
    ],
)
def test_the_effort_of_reasoning_is_the_templates(fields, prompt):
    template = ChatTemplate(
        "{{ reasoning_effort or '-' }}-{{ enable_thinking }} {{ messages[0].content }}", {}
    )
    codec, spoken = Codec(Received(), template), Received.spoken
    codec.encode_chat(read_request(ChatRequest, {"messages": TALK, **fields}))
    assert spoken.pop() == prompt


def test_an_answer_has_the_fields_that_clients_read():
    async def check(client: aiohttp.ClientSession) -> None:
        answer = await ask(client, CHAT, messages=TALK, top_logprobs=0)
        assert answer["service_tier"] == "default"
        assert answer["usage"]["prompt_tokens_details"] is None
        *_, last, _ = await events(
            client, CHAT, messages=TALK, stream_options={"include_usage": True}
        )
        assert last["usage"] == answer["usage"]

    run(check, template=ChatTemplate(TEMPLATE, {}))


def test_the_description_has_every_field_and_its_spellings():
    async def check(client: aiohttp.ClientSession) -> None:
        async with client.get("/openapi.json") as response:
            description = await response.json()
        chat, whole = (
            description["components"]["schemas"][each]["properties"]
            for each in ("ChatRequest", "CompletionRequest")
        )
        assert chat.keys() >= ChatRequest.model_fields.keys() | {"max_completion_tokens", "user"}
        assert whole["suffix"]["enum"] == ["", None]
        assert all(None in each["enum"] for each in whole.values() if "enum" in each)
        assert "string" in whole["guided_regex"]["type"]
        assert whole["temperature"]["maximum"] == 2
        assert description["paths"].keys() >= {"/v1/completions", CHAT, "/v1/embeddings"}
        for record in RECORDED:
            assert record["body"].keys() <= (chat if "messages" in record["body"] else whole).keys()

    run(check)


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLED = {"name": "weather", "arguments": '{"at": "Rome"}'}
CALL = {"id": "1", "type": "function", "function": CALLED}


class Received(Letters):
    """A tokenizer that remembers the prompts."""

    spoken: ClassVar[list[str]] = []

    def encode(self, text: str, **_: bool) -> list[int]:
        self.spoken.append(text)
        return []


def test_tools_and_calls_reach_the_template_as_it_takes_them():
    """As openai-python sends a conversation with a tool: arguments as a text, no content."""
    template = ChatTemplate("{{ tools | tojson }} {{ messages[1:] | tojson }}", {})
    talk = [
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sun"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": ""}}]},
    ]
    body = {"messages": talk, "tools": [WEATHER], "tool_choice": "auto"}
    request = read_request(ChatRequest, body)
    codec, spoken = Codec(Received(), template), Received.spoken
    codec.encode_chat(request)
    codec.encode_chat(request.model_copy(update={"tool_choice": "none"}))
    answered = CALL | {"function": {"name": "weather", "arguments": {"at": "Rome"}}}
    expected = [
        {"role": "assistant", "tool_calls": [answered], "content": ""},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "now", "arguments": {}}}],
            "content": "",
        },
    ]
    assert json.JSONDecoder().raw_decode(spoken[0])[0] == [WEATHER]
    assert spoken[1].startswith("null ")
    assert json.loads(spoken[1].removeprefix("null ")) == expected


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": WEATHER}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "a"}}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]}, "messages"),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [WEATHER]}, "tools"),  # the template has no place for them
    ],
)
def test_tools_that_cannot_have_an_effect_are_refused(change, param):
    async def check(client: aiohttp.ClientSession) -> None:
        body = {"model": "letters", "messages": TALK, **change}
        assert (await refused(client, 400, body, CHAT))["param"] == param

    run(check, template=ChatTemplate(TEMPLATE, {}))


@pytest.mark.parametrize("text", ["Well", " Well ", "Who?", ""])
def test_an_answer_that_is_begun_is_continued(text):
    template = ChatTemplate("{% for m in messages %}<{{ m.content | trim }}>\n{% endfor %}", {})
    talk = [*TALK, {"role": "assistant", "content": text}]
    prompt = template.render(talk, answers=False, continues=True)
    expected = f"<Who?>\n<{text.strip()}"
    assert prompt == (expected if text else "<Who?>\n<>\n")


def test_a_template_of_the_servers_own_takes_the_place_of_the_tokenizers(tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\na\n")
    (tmp_path / "chat_template.jinja").write_text("a")
    own = tmp_path / "own.jinja"
    own.write_text("a a {{ more }}")
    request = read_request(ChatRequest, {"messages": TALK})
    codec = CodecFiles(tmp_path, own_template=own, template_values='{"more": "a"}').codec()
    assert codec.encode_chat(request) == (3, 3, 3)
    assert CodecFiles(tmp_path).codec().encode_chat(request) == (3,)
    missing = OpenAIOptions(chat_template=tmp_path / "none")
    assert "chat_template" in missing.problems()[0]


def byte_level(folder: Path) -> Codec:
    """Return a codec whose tokens are bytes and one word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab | {"no": 256}, [("n", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return Codec(load_tokenizer(folder), None)


def test_a_part_of_a_character_has_its_own_bytes(tmp_path):
    codec = byte_level(tmp_path)
    text = "n\xe9\u20ac no"
    before: list[int] = []
    found = b""
    for token in codec.tokenizer.encode(text):
        found += codec.bytes_of(token, codec.piece(before, token))
        before.append(token)
    assert found == text.encode()
    part, whole = codec.tokenizer.encode("\u20ac")[0], 256
    assert codec.name([part], whole) == "no"
    assert codec.bytes_of(part, codec.name([], part)) == b"\xe2"


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("a b", False), ("x" * 129, False)])
def test_an_answer_carries_the_id_of_its_request(given, kept):
    async def check(client: aiohttp.ClientSession) -> None:
        for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}, {}):
            headers = {"X-Request-Id": given}
            async with client.post("/v1/completions", json=body, headers=headers) as response:
                found = response.headers["X-Request-Id"]
                assert (found == given) is kept
                assert found

    run(check)


def test_a_stream_is_not_held_back_by_proxies_and_health_has_a_head():
    async def check(client: aiohttp.ClientSession) -> None:
        body = {"prompt": "a", "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            assert response.headers["X-Accel-Buffering"] == "no"
        async with client.head("/health") as response:
            assert (response.status, await response.read()) == (200, b"")

    run(check)


def test_what_is_served_is_named_and_changes_the_fingerprint():
    async def answer_of(client: aiohttp.ClientSession) -> None:
        async with client.get("/v1/models") as response:
            (model,) = (await response.json())["data"]
        prints.append((await ask(client))["system_fingerprint"])
        shown.append(model.get("checkpoint"))

    prints: list[str | None] = []
    shown: list[str | None] = []
    for checkpoint in ("abc", "abd", ""):
        about = (("checkpoint", checkpoint), ("data_type", "fp16"))
        run(answer_of, FakeModel(facts=with_facts(about=about)))
    assert shown == ["abc", "abd", ""]
    assert prints[0] != prints[1]
    assert prints[2] is None


def test_the_access_log_has_a_line_for_each_request_and_no_text(
    capfd,
):
    async def check(client: aiohttp.ClientSession) -> None:
        await ask(client, n=2)
        await events(client)
        await refused(client, 400, {"prompt": "a", "n": 0})
        async with client.get("/nowhere", headers={"X-Request-Id": "mine"}):
            pass

    run(check, access_log=True)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[:1] == "{"]
    assert [each["status"] for each in lines] == [200, 200, 400, 404]
    assert lines[0]["ends"] == ["stop", "stop"]
    assert (lines[1]["completion_tokens"], lines[1]["model"]) == (18, "letters")
    assert lines[3]["request_id"] == "mine"
    assert "Hello" not in json.dumps(lines)
    run(check)
    assert "request_id" not in capfd.readouterr().err


def test_a_command_line_gives_the_options_back(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    add_openai_options(parser)
    assert openai_of(parser.parse_args([])) is None
    options = OpenAIOptions(
        port=7,
        tokenizer=tmp_path,
        origins=["https://a.example", "https://b.example"],
        sampling_defaults="openai",
        chat_template=tmp_path / "t",
        chat_template_kwargs={"enable_thinking": False},
        access_log=True,
    )
    assert openai_of(parser.parse_args(["--openai-port=7", *options.arguments()])) == options
    for wrong, reason in (
        ("access-log=maybe", "maybe is neither true nor false"),
        ("chat-template-kwargs=[1]", "it is not a JSON object: it is of type list"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--openai-{wrong}"])
        assert reason in capsys.readouterr().err
    assert {f"--openai-{each.name}".replace("_", "-") for each in dataclasses.fields(options)} - {
        "--openai-enabled", "--openai-origins"
    } <= set(parser._option_string_actions)  # fmt: skip
