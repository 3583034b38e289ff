"""NVIDIA's templates from a checkout, with small random weights of the vocabulary each expects."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import torch
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from export_scripts.add_tuning import main as add_tuning
from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.families import FAMILIES
from tests.conftest import ROOT
from tests.ft_folders import write_random
from tests.tiny_t5_tuning import write_prompts

_SIZES: dict[str, Any] = {
    "model_name": "tiny",
    "head_num": 4,
    "size_per_head": 16,
    "inter_size": 64,
    "num_layer": 2,
    "weight_data_type": "fp32",
}
_GPT2 = {"vocab_size": 50257, "start_id": 50256, "end_id": 50256, "max_pos_seq_len": 1024}
# Template -> family, and what its text models and clients take for granted.
_GENERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", _GPT2),
    "gpt-interactive-text-generation": ("gpt", _GPT2),
    "bloom": (
        "gpt",
        {
            "vocab_size": 250880,
            "start_id": 1,
            "end_id": 2,
            "has_positional_encoding": False,
            "has_pre_decoder_layernorm": True,
            "use_attention_linear_bias": True,
            "layernorm_eps": 1e-5,
        },
    ),
    "gptj": (
        "gptj",
        {"vocab_size": 50400, "start_id": 50256, "end_id": 50256, "rotary_embedding": 8},
    ),
    "gptneox": (
        "gptneox",
        {"vocab_size": 50432, "start_id": 0, "end_id": 2, "rotary_embedding": 4},
    ),
}
# Tokenizers that text models download, each by a copy as a download leaves it: where, and its name.
_DOWNLOADED = {
    "gptj": ("preprocessing/1/.cache", "EleutherAI/gpt-j-6B"),
    "bloom": ("../hub", "bigscience/bloom"),
    "t5-encoder": ("tokenizer/1/.cache", "t5-small"),
}
# The vocabulary of NeMo's mT5, and the markers that boolq_test.py looks for.
_T5 = {"vocab_size": 250112, "pad_token_id": 0, "eos_token_id": 102, "decoder_start_token_id": 101}
_PIECES = 1000
# Name, virtual tokens, width.
_TASKS = {"gpt": ("squad", 10, 64), "gptneox": ("any", 4, 64), "t5": ("boolq", 4, 32)}
_END = "<|endoftext|>"
_SPECIAL = (
    f'"eos_token": "{_END}", "bos_token": "{_END}", "unk_token": "{_END}", "pad_token": "{_END}"'
)


def copy_template(checkout: Path, name: str, home: Path, *, changes: Mapping[str, str]) -> Path:
    """Copy a template and give it weights; return the repository.

    Only what NVIDIA's create_*_config.sh set is changed: the sizes and the path of the weights.
    `changes` are further texts to replace, such as `decoupled`.
    """
    repository = home / "all_models"
    shutil.copytree(checkout / "all_models" / name, repository)
    weights = _weights(name, home / "c-model")
    config = repository / "fastertransformer" / "config.pbtxt"
    text = config.read_text()
    values = {
        "tensor_para_size": "1",
        "pipeline_para_size": "1",
        "model_checkpoint_path": f"{weights}/",
    }
    for key, value in values.items():
        pattern = rf'("{key}"\s+value:?\s*\{{\s*string_value:\s*)"[^"]*"'
        text, count = re.subn(pattern, rf'\g<1>"{value}"', text)
        assert count == 1, key
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    config.write_text(text)
    for script in repository.glob("*/config.pbtxt"):
        # Relative paths begin in the checkout; the template is one folder higher here.
        script.write_text(script.read_text().replace(f"all_models/{name}/", "all_models/"))
    if name in _DOWNLOADED:
        folder, repo_id = _DOWNLOADED[name]
        _add_download(repository / folder, repo_id, checkout / "all_models/gpt/preprocessing/1")
    return repository


def write_lambada(checkout: Path, folder: Path) -> None:
    """Write what evaluate_lambada.py reads: passages, and GPT-2's vocabulary."""
    folder.mkdir()
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        shutil.copy(checkout / "all_models/gpt/preprocessing/1" / name, folder)
    with (ROOT / "examples" / "passages.jsonl").open() as passages:
        (folder / "lambada_test.jsonl").write_text("".join(itertools.islice(passages, 3)))


def _weights(name: str, folder: Path) -> Path:
    """Write a template's weights, with a prompt table where a client asks for a task."""
    plain = _plain_weights(name, folder)
    if name not in _TASKS:
        return plain
    task, length, width = _TASKS[name]
    table = torch.randn(length, width, generator=torch.Generator().manual_seed(2))
    prompts = write_prompts(folder / "prompts.nemo", {task: table})
    words = ["--ft-dir", str(plain), "--prompt-checkpoint", str(prompts)]
    assert add_tuning([*words, "--output-dir", str(folder / "tuned")]) == 0
    return folder / "tuned" / plain.name


def _plain_weights(name: str, folder: Path) -> Path:
    if name in _GENERATORS:
        family, own = _GENERATORS[name]
        config = FAMILIES[family].config(**_SIZES, tensor_para_size=1, **own)
        return write_random(FAMILIES[family], config, folder)
    torch.manual_seed(0)
    if name == "bert":
        sizes = {"num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 100}
        BertModel(BertConfig(**sizes)).save_pretrained(folder / "source")
    else:
        small = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 2}
        markers = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        model = T5ForConditionalGeneration(T5Config(**small, **(_T5 if name == "t5" else markers)))
        # Answers keep to the tokens of a small tokenizer.
        model.shared.weight.data[_PIECES:] = 0
        model.save_pretrained(folder / "source")
    return convert(
        ConversionRequest(folder / "source", folder, tp_size=1, weight_data_type="fp32")
    ).ft_dir


def write_utilities(checkout: Path, home: Path) -> None:
    """Write what the clients in t5_utils and gpt read, in place of what they would download."""
    hub, tools, weights = home / "hub", checkout / "tools", home / "c-model"
    gpt2 = checkout / "all_models/gpt/preprocessing/1"
    _add_download(hub, "gpt2", gpt2)
    _write_t5_tokenizer(tools / "t5_utils" / "test.en", _snapshot(hub, "t5-small"))
    shutil.copytree(hub / "models--t5-small/snapshots/0", weights / "source", dirs_exist_ok=True,
                    ignore=lambda *_: ["config.json"])  # fmt: skip
    lines = (tools / "t5_utils" / "boolq_test.jsonl").read_text().splitlines()[:4]
    (home / "boolq.jsonl").write_text("\n".join(lines))
    words = ["[PAD]", *(f"[unused{i}]" for i in range(1, 100)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += sorted({*re.findall(r"\w+|[^\w\s]", " ".join(lines)), "neutral"})
    bert = _snapshot(hub, "bert-large-cased")
    (bert / "config.json").write_text('{"model_type": "bert"}')
    caches = [bert / "vocab.txt", home / "torch" / "megatron" / "megatron-bert-345m-cased_vocab"]
    for path in [*caches, weights / "tuned" / "1-gpu" / "vocab.txt"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(words) + "\n")
    pair = ["The book is on the table.", "A book lies there."]
    mnli = [["index", *"1234567", "s1", "s2", "g"], ["0", *"1234567", *pair, "neutral"]]
    xnli = [["language", "label", *"2345", "s1", "s2"], ["de", "neutral", *"2345", *pair]]
    for name, rows in {"mnli": mnli, "xnli": xnli}.items():
        (home / f"{name}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    _write_squad(home, gpt2, weights / "prompts.nemo")


def _write_squad(home: Path, gpt2: Path, prompts: Path) -> None:
    """Write the unpacked archives of a GPT and of its prompt table, and one question."""
    virtual = home / "virtual"
    virtual.mkdir()
    shutil.copytree(gpt2, home / "gpt", ignore=lambda *_: ["model.py", "utils", "word_list.py"])
    names = {"vocab_file": "nemo:gpt2-vocab.json", "merges_file": "nemo:gpt2-merges.txt"}
    (home / "gpt" / "model_config.yaml").write_text(json.dumps(names))
    task = {
        "taskname": "squad",
        "prompt_template": "<|VIRTUAL_PROMPT_0|> Context: {context} Question: {question} "
        "Answer: {answer}",
        "total_virtual_tokens": 10,
        "virtual_token_splits": [10],
        "truncate_field": None,
        "answer_only_loss": False,
        "answer_field": "answer",
    }
    config = {"task_templates": [task], "virtual_prompt_style": "inference"}
    config |= {"existing_tasks": ["squad"], "new_tasks": []}
    with tarfile.open(prompts) as archive:
        archive.extractall(virtual, filter="data")
    (virtual / "model_config.yaml").write_text(json.dumps(config))
    sample = {"context": "A book is red.", "question": "What is red?", "answer": "A book"}
    (home / "squad.jsonl").write_text(json.dumps({"taskname": "squad", **sample}) + "\n")


def _write_t5_tokenizer(text: Path, folder: Path) -> None:
    """Write a SentencePiece model and the same as tokenizer.json."""
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "spiece"), vocab_size=_PIECES, pad_id=0,
        eos_id=1, unk_id=2, bos_id=-1, minloglevel=2, input_sentence_size=500,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    same = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    same.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    same.decoder = tokenizers.decoders.Metaspace()
    same.add_special_tokens(["<pad>", "</s>", "<unk>"])
    same.save(str(folder / "tokenizer.json"))
    markers = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    kind = {"tokenizer_class": "T5Tokenizer", **markers}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    (folder / "config.json").write_text('{"model_type": "t5"}')


def _snapshot(cache: Path, repo_id: str) -> Path:
    """Return the empty folder of a download in a hub's cache."""
    root = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = root / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0")
    return snapshot


def _add_download(cache: Path, repo_id: str, gpt2: Path) -> None:
    snapshot = _snapshot(cache, repo_id)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(gpt2 / f"gpt2-{name}", snapshot / name)
    (snapshot / "config.json").write_text('{"model_type": "gpt2"}')
    kind = f'{{"tokenizer_class": "GPT2Tokenizer", {_SPECIAL}}}'
    (snapshot / "tokenizer_config.json").write_text(kind)
