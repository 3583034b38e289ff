"""Small random models that take text, what their library answers, and repositories with them."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.families.layout.config import PromptTask
from export_scripts.families.mapping.prompts import P_PROMPT_TUNING
from export_scripts.ft.config_ini import read_config, write_config
from export_scripts.triton.repository import RepositoryRequest, build_repository

T5_SIZE, GPT_SIZE = 24, 24
VIRTUAL = 3  # rows of a prompt table
TABLE_NAME = "model.prompt_table.boolq.weight.bin"
END_ID = 1
SPECIAL = ("<pad>", "</s>", "<unk>")
CHOICES = ("yes", "no")
LABELS = ("true", "false", "entailment", "neutral", "contradiction")
PREFIX = "translate English to German:"
PAIRS = (
    ("the cat sees a dog", "die Katze sieht eine Hund"),
    ("the old house is lost", "die alt Haus ist verloren"),
    ("a river and a house", "eine Fluss und eine Haus"),
    ("the dog has lost the river", "die Hund hat die Fluss verloren"),
)
ENGLISH = tuple(english for english, _ in PAIRS)
VOCABULARY = (
    *SPECIAL,
    *LABELS,
    *CHOICES,
    *dict.fromkeys(f"{PREFIX} {' '.join(map(' '.join, PAIRS))}".replace(":", " :").split()),
)


@dataclass(frozen=True)
class Source:
    """A model as its library saves it, and the table of its task 0, (VIRTUAL, size)."""

    folder: Path
    table: torch.Tensor

    def answers(self, prompts: Sequence[str], *, output_len: int, tuned: bool = False) -> list[str]:
        """Return the library's greedy answers, with the table in front of prompts if `tuned`."""
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        is_t5 = json.loads((self.folder / "config.json").read_text())["model_type"] == "t5"
        kind = T5ForConditionalGeneration if is_t5 else GPT2LMHeadModel
        model = kind.from_pretrained(self.folder).eval()
        found = []
        for prompt in prompts:
            ids = tokenizer.encode(prompt, add_special_tokens=is_t5).ids
            embedded = model.get_input_embeddings()(torch.tensor([ids]))
            if tuned:
                embedded = torch.cat((self.table[None], embedded), dim=1)
            answer = model.generate(
                inputs_embeds=embedded,
                attention_mask=torch.ones(embedded.shape[:2], dtype=torch.long),
                do_sample=False,
                max_new_tokens=output_len,
                pad_token_id=0,
            )[0].tolist()
            answer = answer[1:] if is_t5 else answer
            answer = answer[: answer.index(END_ID)] if END_ID in answer else answer
            found.append(tokenizer.decode(answer, skip_special_tokens=False))
        return found


def likelier(source: Source, prompts: Sequence[str]) -> list[str]:
    """Return "true" where the library finds "yes" likelier after a prompt than "no"."""
    tokenizer = Tokenizer.from_file(str(source.folder / "tokenizer.json"))
    model = GPT2LMHeadModel.from_pretrained(source.folder).eval()
    yes, no = map(VOCABULARY.index, CHOICES)
    found = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
        logits = model(ids).logits[0, -1]
        found.append("true" if logits[yes] > logits[no] else "false")
    return found


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of whole words; texts of T5 end with the end token."""
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", END_ID)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def save_source(folder: Path, model: Any, *, size: int) -> Source:
    """Save a random model whose likeliest words are often labels."""
    with torch.no_grad():
        spread = float(model.get_input_embeddings().weight.std())
        model.get_input_embeddings().weight[len(SPECIAL) : len(SPECIAL) + len(LABELS)] *= 3.0
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return Source(folder, torch.randn(VIRTUAL, size) * spread)


def t5_source(folder: Path) -> Source:
    torch.manual_seed(6)  # answers differ, and some of them are labels
    config = T5Config(
        vocab_size=len(VOCABULARY),
        d_model=T5_SIZE,
        d_kv=6,
        num_heads=4,
        d_ff=40,
        num_layers=2,
        num_decoder_layers=2,
        initializer_factor=4.0,
        pad_token_id=0,
        eos_token_id=END_ID,
        decoder_start_token_id=0,
    )
    return save_source(folder, T5ForConditionalGeneration(config), size=T5_SIZE)


def gpt_source(folder: Path) -> Source:
    torch.manual_seed(8)
    config = GPT2Config(
        vocab_size=len(VOCABULARY),
        n_embd=GPT_SIZE,
        n_head=4,
        n_layer=2,
        n_positions=64,
        initializer_range=0.5,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
    )
    return save_source(folder, GPT2LMHeadModel(config), size=GPT_SIZE)


def add_table(ft_dir: Path, table: torch.Tensor) -> None:
    """Add the table of task 0 to a folder of shards."""
    table.numpy().tofile(ft_dir / TABLE_NAME)
    _, config = read_config(ft_dir)
    tuned = replace(
        config,
        tasks=(PromptTask(task_name="boolq", prompt_length=VIRTUAL),),
        prompt_learning_start_id=len(VOCABULARY),
        prompt_learning_type=P_PROMPT_TUNING,
    )
    write_config(ft_dir, tuned)


def add_model(repository: Path, name: str, source: Source, *, tp_size: int, **options: Any) -> None:
    """Convert a model and add it to a repository, with its prompt table."""
    weights = convert(
        ConversionRequest(
            checkpoint_path=source.folder,
            output_dir=repository.parent / name,
            tp_size=tp_size,
            weight_data_type="fp32",
        )
    ).ft_dir
    model_dir = repository / name
    add_table(shutil.copytree(weights, model_dir / "1" / weights.name), source.table)
    request = RepositoryRequest(
        model_dir=model_dir,
        tp_size=tp_size,
        pp_size=1,
        max_batch_size=8,
        data_type="fp32",
        **options,
    )
    build_repository(request)
