"""Prompt tables and IA3 as PEFT adapters: loaded by peft, and what it then computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from export_scripts.add_tuning import add_tuning
from export_scripts.conversion.convert import (
    ConversionRequest,
    check_conversion,
    convert,
    folder_problems,
)
from tests.tiny import torch_bytes, write_tar
from tests.tiny_t5 import TinyT5
from tests.tiny_t5_tuning import ia3_scalers, write_ia3, write_prompts
from tests.tiny_transformers import write_model

IDS = torch.arange(3, 13)[None]
# The sizes of tests/tiny_transformers.py.
T5 = TinyT5(encoder_layers=2, decoder_layers=3)


def request(source: Path, output: Path, **fields: Any) -> ConversionRequest:
    values: dict[str, Any] = {"output_format": "huggingface"} | fields
    return ConversionRequest(source, output, values.pop("tp_size", 1), "fp32", **values)


@pytest.mark.parametrize("through_shards", [False, True])
def test_prompt_tables_are_prompt_tuning(through_shards: bool, tmp_path: Path) -> None:
    original = write_model("gpt2", tmp_path / "original")
    table = torch.randn(5, 24)
    archive = write_prompts(tmp_path / "boolq.nemo", {"boolq": table})
    fields: dict[str, Any] = {"prompt_checkpoints": (archive,)}
    source = original
    if through_shards:
        shards = convert(
            request(original, tmp_path, tp_size=2, output_format="fastertransformer")
        ).ft_dir
        source, fields = add_tuning(shards, tmp_path / "tuned", prompts=[archive]), {}
    folder = convert(request(source, tmp_path, **fields)).ft_dir
    assert folder_problems(folder) == []
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        embedded = torch.cat([table[None], model.get_input_embeddings()(IDS)], 1)
        expected = model(inputs_embeds=embedded).logits
        tuned = peft.PeftModel.from_pretrained(model, folder / "adapters" / "boolq").eval()
        assert tuned.peft_config["default"].peft_type == "PROMPT_TUNING"
        torch.testing.assert_close(tuned(IDS).logits, expected, rtol=0, atol=0)


def scaled(model: Any, scalers: Mapping[str, torch.Tensor]) -> None:
    """Multiply keys, values and the inputs of the last matrix of each MLP."""
    for side in ("encoder", "decoder"):
        for number, block in enumerate(getattr(model, side).block):
            kinds = {"": block.layer[0].SelfAttention}
            if side == "decoder":
                kinds["inter_"] = block.layer[1].EncDecAttention
            for prefix, attention in kinds.items():
                for part, kind in (("k", "key"), ("v", "value")):
                    factor = scalers[f"{side}.{number}.{prefix}{kind}"]
                    getattr(attention, part).register_forward_hook(
                        lambda _, __, out, factor=factor: out * factor
                    )
            factor = scalers[f"{side}.{number}.mlp"]
            block.layer[-1].DenseReluDense.wo.register_forward_pre_hook(
                lambda _, inputs, factor=factor: (inputs[0] * factor,)
            )


def test_ia3_tasks_are_ia3(tmp_path: Path) -> None:
    original = write_model("t5", tmp_path / "original")
    shards = convert(
        request(original, tmp_path, tp_size=2, output_format="fastertransformer")
    ).ft_dir
    tasks = [ia3_scalers(T5, seed=seed) for seed in (1, 2)]
    archives = [
        write_ia3(tmp_path / f"{number}.nemo", each, T5) for number, each in enumerate(tasks)
    ]
    folder = convert(request(add_tuning(shards, tmp_path / "tuned", ia3=archives), tmp_path)).ft_dir
    assert folder_problems(folder) == []
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
    for number, scalers in enumerate(tasks):
        base, plain = (
            transformers.T5ForConditionalGeneration.from_pretrained(folder).eval() for _ in "ab"
        )
        tuned = peft.PeftModel.from_pretrained(base, folder / "adapters" / f"ia3_{number}").eval()
        scaled(plain, scalers)
        with torch.no_grad():
            expected, found = plain(**inputs).logits, tuned(**inputs).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_virtual_tokens_in_several_places_are_refused(tmp_path: Path) -> None:
    original = write_model("gpt2", tmp_path / "original")
    template = {"taskname": "boolq", "total_virtual_tokens": 5, "virtual_token_splits": [3, 2]}
    weights = {"prompt_table": {"prompt_table.boolq.prompt_embeddings.weight": torch.ones(5, 24)}}
    members = {
        "model_config.yaml": json.dumps({"task_templates": [template]}).encode(),
        "model_weights.ckpt": torch_bytes(weights),
    }
    archive = write_tar(tmp_path / "boolq.nemo", members)
    fields: dict[str, Any] = {"prompt_checkpoints": (archive,)}
    (problem,) = check_conversion(request(original, tmp_path, **fields))
    assert "task 'boolq' has its virtual tokens in 2 places" in problem
    folder = convert(request(original, tmp_path, allow=("prompt:*",), **fields)).ft_dir
    assert not (folder / "adapters").exists()
