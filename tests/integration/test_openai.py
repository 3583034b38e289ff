"""OpenAI's own client against the endpoint of a real server with the sample model, twice in it."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from inference.front.access import Access, Credentials, OpenAIOptions
from inference.server.client import TritonClient
from inference.server.kinds import TRITONSERVER
from inference.server.server import ModelServer
from tests.conftest import ROOT
from tests.integration.triton_process import hosted
from tests.waiting import until

WHOLE, STREAMING = "fastertransformer", "streaming"
BOTH = pytest.mark.parametrize("model", [WHOLE, STREAMING])
NEW_TOKENS = 32
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
Cases = list[dict[str, Any]]


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text("0123456789" * 3 + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(
    usual_host: str,
    sample_repository: Callable[..., Path],
    token_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ModelServer]:
    repository = sample_repository(tp_size=1, parameters={"device": "cpu"})
    shutil.copytree(repository / WHOLE, repository / STREAMING)
    config = repository / STREAMING / "config.pbtxt"
    described = text_format.Parse(config.read_text(), model_config_pb2.ModelConfig())
    described.name, described.model_transaction_policy.decoupled = STREAMING, True
    config.write_text(text_format.MessageToString(described))
    settings = {"chat_template": TEMPLATE}
    (repository / "preprocessing" / "1" / "tokenizer_config.json").write_text(json.dumps(settings))
    running = hosted(
        usual_host,
        repository,
        tmp_path_factory.mktemp("log"),
        access=Access(token_file=token_file),
        openai=OpenAIOptions(port=0),
    )
    with running:
        running.start(timeout_s=120)
        yield running


@pytest.fixture(scope="module")
def client(server: ModelServer, token_file: Path) -> Iterator[openai.OpenAI]:
    assert server.openai_url is not None
    key = token_file.read_text().strip()
    with openai.OpenAI(
        base_url=server.openai_url, api_key=key, max_retries=0, timeout=60
    ) as connected:
        yield connected


def test_the_models_that_complete_tokens_are_listed(client):
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {WHOLE, STREAMING}
    assert client.models.retrieve(WHOLE).id == WHOLE


@BOTH
def test_answers_are_the_recorded_ones_whole_and_streamed(client, model, greedy_cases, usual_host):
    asked: dict[str, Any] = {"model": model, "max_tokens": NEW_TOKENS, "temperature": 0}
    # A tritonserver has one response of a model that is not decoupled.
    is_whole = usual_host == TRITONSERVER and model == WHOLE
    prompts, counts = [case["input_ids"] for case in greedy_cases[:4]], []
    done = client.completions.create(prompt=prompts, **asked)
    for case, prompt, choice in zip(greedy_cases, prompts, done.choices, strict=False):
        streamed = asked | {"stream": True, "stream_options": {"include_usage": True}}
        *parts, last = client.completions.create(prompt=prompt, **streamed)
        assert "".join(part.choices[0].text for part in parts) == choice.text
        assert last.usage is not None
        assert last.usage.prompt_tokens == len(prompt)
        counts.append(len(parts))
        scored = client.completions.create(prompt=prompt, logprobs=1, **asked).choices[0]
        assert scored.text == choice.text
        assert scored.logprobs is not None
        assert "".join(scored.logprobs.tokens or ()) == choice.text
        assert len(scored.logprobs.tokens or ()) == NEW_TOKENS
        assert case["prompt"] + choice.text == case["greedy_text"]
    # Clients that fall behind, as on a busy machine, get several tokens in a piece.
    assert (max(counts) == 1) == is_whole


def test_the_scores_of_an_echoed_prompt_add_up_to_the_servers_own(
    client, server, token_file, greedy_cases
):
    prompt = greedy_cases[0]["input_ids"]
    flag = np.array([[True]])
    with TritonClient(
        server.address("grpc"), timeout_s=60, credentials=Credentials(token_file=token_file)
    ) as triton:
        outputs = triton.infer(
            WHOLE,
            {
                "input_ids": np.array([prompt], np.uint32),
                "input_lengths": np.array([[len(prompt)]], np.uint32),
                "request_output_len": np.array([[1]], np.uint32),
                "is_return_log_probs": flag,
                "is_return_context_cum_log_probs": flag,
            },
        )
    done = client.completions.create(
        model=WHOLE, prompt=prompt, echo=True, logprobs=3, max_tokens=1, temperature=0
    )
    scores = done.choices[0].logprobs
    assert scores is not None
    log_probs, tops = scores.token_logprobs, scores.top_logprobs
    assert log_probs is not None
    assert tops is not None
    assert len(log_probs) == len(tops) == len(prompt) + 1
    assert log_probs[0] is None
    assert sum(log_probs[1:]) == pytest.approx(float(outputs["cum_log_probs"][0, 0]), abs=1e-3)
    # Greedy: the token that was taken is the best one.
    assert log_probs[-1] == max(tops[-1].values())
    assert all(3 <= len(each) <= 4 for each in tops[1:])
    ends = [*(scores.text_offset or ())[1:], len(done.choices[0].text)]
    pieces = zip(scores.text_offset or (), ends, scores.tokens or (), strict=True)
    assert all(done.choices[0].text[first:last] == piece for first, last, piece in pieces)


@BOTH
def test_seeded_samples_are_the_same_again_and_differ_from_each_other(client, model):
    asked: dict[str, Any] = {"model": model, "prompt": "It was the", "n": 3, "max_tokens": 12}
    first, again, other = (
        [choice.text for choice in client.completions.create(seed=seed, **asked).choices]
        for seed in (7, 7, 8)
    )
    assert first == again != other
    assert len(set(first)) == 3


@BOTH
def test_a_chat_is_the_completion_of_its_template(client, model):
    text = "The old man said"
    asked: dict[str, Any] = {"model": model, "max_tokens": 8, "temperature": 0}
    expected = client.completions.create(prompt=text, **asked).choices[0].text
    messages: Any = [{"role": "user", "content": text}]
    done = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **asked)
    assert done.choices[0].message.content == expected
    assert done.choices[0].logprobs is not None
    content = done.choices[0].logprobs.content or []
    assert "".join(each.token for each in content) == expected
    assert all(len(each.top_logprobs) == 2 for each in content)
    parts = client.chat.completions.create(messages=messages, stream=True, **asked)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected


def test_the_documents_example_runs(server, token_file, capsys):
    text = (ROOT / "docs" / "openai.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert server.openai_url is not None
    example = example.replace("http://127.0.0.1:8003/v1", server.openai_url)
    exec(example.replace('"none"', repr(token_file.read_text().strip())), {})
    assert len(capsys.readouterr().out.split()) > 8


def test_the_end_of_the_endpoint_is_a_failure_of_the_server(server):
    assert server.failure() is None
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: server.failure() is not None, "the loss of the server")
    assert "ended with status -9" in (server.failure() or "")
