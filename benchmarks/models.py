"""Random models of real sizes, as FT folders and as Hugging Face checkpoints."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.families import FAMILIES
from export_scripts.ft.layout import ft_directory
from export_scripts.synthesize import synthesize, synthetic_config

_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
# A scale for each row, or for blocks of 128 x 128.
FP8_FORMS: Mapping[str, dict[str, Any]] = {
    "row": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_FP8, "strategy": "channel", "dynamic": False},
                "input_activations": {**_FP8, "strategy": "token", "dynamic": True},
            }
        },
    },
    "block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
SIZES: Mapping[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("models.toml").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Model:
    """A model of SIZES in fp16, the same for every contender."""

    ft_dir: Path
    vocab_size: int


def random_model(name: str, work_dir: Path, *, tp_size: int = 1) -> Model:
    """Return the model called `name` with random weights, written unless it is there."""
    sizes = dict(SIZES[name])
    family, config = FAMILIES[sizes.pop("family")], sizes.pop("config", {})
    ft_dir = ft_directory(work_dir / name, tp_size)
    if not ft_dir.exists():
        given = [(key, str(value)) for key, value in config.items()]
        written = synthetic_config(family, **sizes, tensor_para_size=tp_size, given=given)
        synthesize(family, written, work_dir / name)
    return Model(ft_dir, sizes["vocab"])


def in_fp8(model: Model, form: str, *, tp_size: int = 1) -> Model:
    """Return a model whose matrices are in FP8 in its folders, in a form of FP8_FORMS.

    Its Hugging Face folder is as compressed-tensors or DeepSeek would save it, and its shards keep
    that folder's values.
    """
    import torch
    from safetensors.torch import load_file, save_file

    source = huggingface_folder(model)
    target = source.parent.with_name(f"{source.parent.name}-fp8-{form}")
    folder, places = target / source.name, dict[str, str]()
    if not folder.exists():
        folder.mkdir(parents=True)
        end = "_inv" if form == "block" else ""
        for path in source.glob("*.safetensors"):
            tensors = load_file(path, device="cuda" if torch.cuda.is_available() else "cpu")
            for key in [key for key in tensors if key.endswith("_proj.weight")]:
                rows, columns = tensors[key].shape
                grid = (rows // 128, columns // 128) if form == "block" else (rows, 1)
                blocks = tensors[key].float().view(grid[0], -1, grid[1], columns // grid[1])
                scale = blocks.abs().amax((1, 3), keepdim=True) / 448
                values = (blocks / scale).view(rows, columns).to(torch.float8_e4m3fn)
                tensors |= {key: values, f"{key}_scale{end}": scale.view(grid)}
            save_file(tensors, folder / path.name, {"format": "pt"})
            places |= dict.fromkeys(tensors, path.name)
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        config = json.loads((source / "config.json").read_text())
        text = json.dumps(config | {"quantization_config": FP8_FORMS[form]})
        (folder / "config.json").write_text(text)
    request = ConversionRequest(folder, target, tp_size, "fp16", keep_fp8=True)
    return Model(convert(request).ft_dir, model.vocab_size)


def huggingface_folder(model: Model) -> Path:
    """Return a model's weights as a folder of transformers, converted unless it is there."""
    request = ConversionRequest(
        model.ft_dir, model.ft_dir.parent, 1, "fp16", processes=2, output_format="huggingface"
    )
    if not request.folder.exists():
        convert(request)
    return request.folder
