"""The source checkpoint as reference: greedy and log probabilities by its own library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from inference.evaluation.run.huggingface_model import HuggingFaceModel, load_reference_model
from inference.evaluation.run.task_run import EvaluationError

LETTERS = "abcdefghijklmnopqrstuvwxyz ."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small random GPT-2 whose tokens are letters, and whose settings ask to sample."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(3)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(LETTERS),
            n_positions=64,
            n_embd=24,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=27,
            initializer_range=0.6,
        )
    )
    model.generation_config.do_sample = True
    model.generation_config.temperature = 5.0
    model.save_pretrained(folder)
    letters = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(LETTERS)}, "."))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> HuggingFaceModel:
    return load_reference_model(folder)


def test_letters_are_encoded_and_decoded(model):
    assert model.encode("abc") == (0, 1, 2)


def test_decoding_is_greedy_whatever_the_checkpoint_suggests(model, folder):
    plain = GPT2LMHeadModel.from_pretrained(folder).eval()
    ids = [7, 4, 11, 11, 14]
    expected = list(ids)
    with torch.no_grad():
        for _ in range(5):
            expected.append(int(plain(torch.tensor([expected])).logits[0, -1].argmax()))
    answer = model.complete_ids(ids, output_len=5)
    assert list(answer) == expected[5:][: len(answer)]
    assert len(answer) == 5 or answer[-1] == 27


def test_the_log_probability_is_of_all_tokens_but_the_first(model, folder):
    plain = GPT2LMHeadModel.from_pretrained(folder).eval()
    with torch.no_grad():
        scores = plain(torch.tensor([[7, 4, 11]])).logits[0].log_softmax(-1)
    expected = float(scores[0, 4] + scores[1, 11])
    assert model.context_log_prob([7, 4, 11]) == pytest.approx(expected, abs=1e-5)


def test_the_prompt_is_scored_with_the_answer(model):
    found = model.complete_text("hell", output_len=3, score_prompt=True)
    assert found.context_log_prob == pytest.approx(model.context_log_prob(model.encode("hell")))
    assert found.generated == 3


def test_an_answer_ends_before_the_end_token(model):
    assert model.decode_answer([0, 1, 27, 2]) == model.decode([0, 1])


def test_virtual_tokens_are_refused(model):
    with pytest.raises(EvaluationError, match="virtual tokens are not part of the source"):
        model.complete_ids([1], output_len=1, tensors={"prompt_learning_task_name_ids": 0})


def test_a_folder_that_is_no_checkpoint_is_reported(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EvaluationError, match="transformers cannot load") as caught:
        load_reference_model(tmp_path)
    assert "set evaluate.reference=none" in str(caught.value)
