"""Embeddings of a T5 encoder by OpenAI's own client, against transformers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.triton.repository import RepositoryRequest, build_repository
from inference.front.access import OpenAIOptions
from tests.integration.triton_process import hosted
from tests.tiny_transformers import write_model

MODEL = "encoder"
ROWS = 4  # of one request of the model
WORDS = ("<unk>", "</s>", "it", "was", "the", "best", "of", "times", "worst")
TEXTS = ("it was", "", "it was the best of times", "the worst", "unheard of", "times")
WIDEST = 4096


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model("t5-encoder", tmp_path_factory.mktemp("source"))
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def served(
    request: pytest.FixtureRequest,
    usual_host: str,
    source: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[openai.OpenAI, str]]:
    root = tmp_path_factory.mktemp("repository")
    weights = convert(ConversionRequest(source, root / MODEL / "1", 1, "fp32")).ft_dir
    assert weights.parent == root / MODEL / "1"
    build_repository(
        RepositoryRequest(
            model_dir=root / MODEL,
            tp_size=1,
            pp_size=1,
            max_batch_size=ROWS,
            data_type=request.param,
            parameters={"device": "cpu"},
        )
    )
    server = hosted(
        usual_host,
        root,
        tmp_path_factory.mktemp("log"),
        openai=OpenAIOptions(port=0),
    )
    with server:
        server.start(timeout_s=240)
        assert server.openai_url is not None
        with openai.OpenAI(base_url=server.openai_url, api_key="none", max_retries=0) as client:
            yield client, request.param


def means(source: Path, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the mean over the mask of what transformers computes, each of length 1."""
    model = transformers.T5EncoderModel.from_pretrained(source).eval()
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    return np.asarray(torch.nn.functional.normalize(mean, dim=1))


def test_a_vector_is_the_mean_over_the_mask(served, source):
    client, data_type = served
    tolerance = 1e-5 if data_type == "fp32" else 0.03
    encode = Tokenizer.from_file(str(source / "tokenizer.json")).encode
    rows = [encode(text).ids for text in TEXTS]
    answer = client.embeddings.create(model=MODEL, input=list(TEXTS))
    found = np.array([each.embedding for each in answer.data])
    np.testing.assert_allclose(found, means(source, rows), atol=tolerance)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, rows))
    # Token ids are taken as they are; plain numbers instead of the client's base64.
    alone = client.embeddings.create(model=MODEL, input=rows[2], encoding_format="float")
    np.testing.assert_allclose(alone.data[0].embedding, found[2], atol=tolerance)


def test_what_cannot_be_embedded_is_refused(served):
    client, _ = served
    assert [model.id for model in client.models.list()] == [MODEL]
    for text, said in (
        ([], "input: must be a string"),
        ([[]], "input: must be a string"),
        ([100], "the model has no token"),
        ([2] * (WIDEST + 1), f"has {WIDEST + 1} tokens. This model's maximum context length"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            client.embeddings.create(model=MODEL, input=text)
    with pytest.raises(openai.BadRequestError, match="dimensions: is not supported"):
        client.embeddings.create(model=MODEL, input="it", dimensions=2)
    with pytest.raises(openai.NotFoundError, match=f"does not exist, or .*; it has {MODEL}"):
        client.embeddings.create(model="other", input="it")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model=MODEL, prompt="it")
