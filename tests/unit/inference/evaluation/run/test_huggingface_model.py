"""The source checkpoint as reference: greedy and log probabilities by its own library."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.ft.layout import manifest_path
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.run.huggingface_model import HuggingFaceModel, load_reference_model
from inference.evaluation.task import EvaluationError

LETTERS = "abcdefghijklmnopqrstuvwxyz ."


def load(folder: Path, **options: Any) -> HuggingFaceModel:
    return load_reference_model(EvaluationOptions(data_dir=Path(), source_path=folder, **options))


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
    return load(folder)


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


def test_virtual_tokens_take_the_embeddings_of_the_request_s_table(model, folder):
    plain = GPT2LMHeadModel.from_pretrained(folder).eval()
    # A table of real tokens' embeddings must give the answer after these tokens.
    table = plain.get_input_embeddings().weight[[3, 9]].tolist()
    tensors = {"request_prompt_embedding": table, "request_prompt_lengths": 2}
    found = model.complete_ids([100, 101, 7, 4], output_len=5, tensors=tensors)
    assert found == model.complete_ids([3, 9, 7, 4], output_len=5)


def test_virtual_tokens_take_the_embeddings_of_the_served_table(folder, tmp_path):
    request = ConversionRequest(folder, tmp_path, 1, "fp32")
    ft_dir = convert(request).ft_dir
    plain = GPT2LMHeadModel.from_pretrained(folder).eval()
    rows = plain.get_input_embeddings().weight[[3, 9]].detach().numpy()
    rows.tofile(ft_dir / "model.prompt_table.boolq.weight.bin")
    manifest_path(ft_dir).unlink()  # it would not know of the table
    config = (ft_dir / "config.ini").read_text()
    config = config.replace("[gpt]\n", "[gpt]\nnum_tasks = 1\nprompt_learning_start_id = 100\n")
    (ft_dir / "config.ini").write_text(
        f"{config}\n[task_0]\ntask_name = boolq\nprompt_length = 2\n"
    )
    served = load(folder, weights_dir=ft_dir)
    found = served.complete_ids(
        [100, 101, 7, 4], output_len=5, tensors={"prompt_learning_task_name_ids": 0}
    )
    assert found == served.complete_ids([3, 9, 7, 4], output_len=5)


def test_virtual_tokens_of_an_unknown_table_are_refused(model):
    with pytest.raises(EvaluationError, match="the served folder lists no such prompt table"):
        model.complete_ids([1], output_len=1, tensors={"prompt_learning_task_name_ids": 0})


def test_the_type_of_the_computation_is_the_user_s(folder):
    served = load(folder, reference_data_type="bf16")
    assert served.model.dtype == torch.bfloat16
    assert " in bf16 on " in served.source
    assert len(served.complete_ids([7, 4], output_len=3)) <= 3


@pytest.mark.parametrize("ends", [27, [26, 27]])
def test_an_answer_ends_at_any_end_token(model, monkeypatch, ends):
    monkeypatch.setattr(model.model.config, "eos_token_id", ends)
    assert model.decode_answer([0, 1, 27, 2]) == model.decode([0, 1])


def test_a_folder_that_is_no_checkpoint_is_reported(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EvaluationError, match=r"evaluate\.reference=huggingface: ") as caught:
        load(tmp_path)
    assert "set evaluate.reference=none" in str(caught.value)


def test_a_checkpoint_that_lacks_weights_is_no_reference(folder, tmp_path):
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    weights = load_file(damaged / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EvaluationError, match=r"lacks transformer\.h\.1\.mlp\.c_fc\.weight"):
        load(damaged)
