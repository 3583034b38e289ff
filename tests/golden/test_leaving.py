"""Every source under the golden folder becomes a Hugging Face folder with the recorded logits."""

import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from export_scripts.conversion.convert import ConversionRequest, convert, folder_problems
from tests.golden.test_shards import GOLDEN
from tests.json_files import read_json

# Models that Hugging Face cannot express, and the reason given.
REFUSED = {
    "t5_nemo/train_tp2_pp1_relative_geglu_nobias": "",  # an equal
    "gpt_megatron/v3_tp2_pp1_adapters": "adapter_inter_size is 12 in the model",
    "t5_nemo/*": "position is absolute in the model, and can only be relative",
}
# The release does not state its heads, nor version 0 of Megatron-LM.
GIVEN = {"gptj_slim/tiny": (("head_num", "4"),), "gpt_megatron/v0_tp1": (("head_num", "4"),)}
LARGEST_ERROR = 1e-5  # of the largest logit


def cases() -> list[Any]:
    if not GOLDEN.is_dir():
        reason = f"golden checkpoints not found at {GOLDEN}; set SLIPWAY_SHARED to their folder"
        return [pytest.param(GOLDEN, marks=pytest.mark.skip(reason=reason))]
    folders = sorted(path.parent for path in GOLDEN.glob("*/*/case.json"))
    return [pytest.param(folder, id="/".join(folder.parts[-2:])) for folder in folders]


@pytest.mark.parametrize("folder", cases())
def test_the_folder_has_the_logits_of_its_source(folder, tmp_path):
    case, name = read_json(folder / "case.json"), "/".join(folder.parts[-2:])
    request = ConversionRequest(
        folder / case["source"],
        tmp_path,
        1,
        "fp32",
        model_type="t5_encoder" if name.startswith("t5_encoder") else None,
        given=GIVEN.get(name, ()),
        output_format="huggingface",
    )
    words = next((w for key, w in REFUSED.items() if fnmatch.fnmatchcase(name, key)), "")
    if words:
        with pytest.raises(ValueError, match=words):
            convert(request)
        assert not list(tmp_path.glob("huggingface*"))
        return
    written = convert(request).ft_dir
    assert folder_problems(written) == []
    config = read_json(written / "config.json")
    model, info = load(written, config["architectures"][0])
    assert not any(info.values()), info
    is_encoder = name.startswith("t5_encoder")
    recorded = folder / ("encoder_hidden.npy" if is_encoder else "logits.npy")
    if recorded.exists():
        greedy = read_json(folder / "greedy.json")
        expected = np.load(recorded)
        found = outputs(model, greedy, len(expected), config, is_encoder=is_encoder)
        error = np.abs(found - expected.reshape(found.shape)).max() / np.abs(expected).max()
        assert error < LARGEST_ERROR


def load(written: Path, architecture: str) -> tuple[Any, dict[str, Any]]:
    kind = getattr(transformers, architecture)
    model, info = kind.from_pretrained(written, output_loading_info=True)
    return model.eval(), info


def outputs(
    model: Any, greedy: dict[str, Any], rows: int, config: dict[str, Any], *, is_encoder: bool
) -> Any:
    ids = torch.tensor(greedy["prompt"]).reshape(1, -1)
    further = {}
    if config["model_type"] in ("t5", "mt5") and not is_encoder:
        start = config["decoder_start_token_id"]
        further["decoder_input_ids"] = torch.tensor([[start, *greedy["continuation"][: rows - 1]]])
    with torch.no_grad():
        return model(ids, **further)[0][0].numpy()
