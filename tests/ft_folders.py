"""FT folders for tests of the runtime: recorded ones unpacked, and small random ones."""

import configparser
import tarfile
from pathlib import Path
from typing import Any

import torch

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.families.bert import BERT, BertConfig
from export_scripts.families.gpt.layout import GPT, GPTConfig
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.spec import ModelFamily
from export_scripts.ft.reader import FTReader
from export_scripts.numeric.dtypes import torch_dtype
from tests.json_files import read_json


class OpenedFolder(FTReader):
    """A folder whose config can be asked for the fields of any family."""

    family: Any
    config: Any


def unpack_case(case: Path, target: Path, *, tp_size: int, data_type: str = "fp32") -> Path:
    """Return the FT folder of a golden case, its config.ini corrected as the case says.

    It is the recorded one; where only its sums are kept, the source is converted.
    """
    facts = read_json(case / "case.json")
    variant = next(
        v for v in facts["variants"] if v["tp"] == tp_size and v["weight_data_type"] == data_type
    )
    if not (case / variant["tar"]).is_file():
        request = ConversionRequest(
            case / facts["source"],
            target,
            tp_size,
            weight_data_type=data_type,
            adapter_checkpoints=tuple(case.glob("source/adapter.nemo")),
            # Megatron-LM's first version does not record it.
            given=(("head_num", "4"),) if case.name == "v0_tp1" else (),
        )
        return convert(request).ft_dir
    with tarfile.open(case / variant["tar"]) as archive:
        archive.extractall(target, filter="data")
    ft_dir = target / f"{tp_size}-gpu"
    ini = configparser.ConfigParser()
    ini.read(ft_dir / "config.ini")
    for section, values in (facts.get("config_overrides") or {}).items():
        for key, value in values.items():
            ini[section][key] = str(value)
    with (ft_dir / "config.ini").open("w") as file:
        ini.write(file)
    return ft_dir


def write_random(
    family: ModelFamily, config: FTConfig, target: Path, *, seed: int = 0, scale: float = 0.3
) -> Path:
    """Write an FT folder of random weights, fp32 or fp16; a seed gives one model for every TP."""
    tp_size = config.tensor_para_size
    ft_dir = target / f"{tp_size}-gpu"
    ft_dir.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    for tensor in family.tensors(config):
        whole = torch.randn(tensor.shape, generator=generator) * scale
        if tensor.name.endswith("layernorm.weight"):
            whole += 1
        if tensor.fp8_part == 1:  # scales
            whole = whole.abs() + 0.5
        for rank, name in enumerate(tensor.file_names(tp_size)):
            part = whole if tensor.split is None else whole.chunk(tp_size, tensor.split)[rank]
            part = part.to(torch_dtype(tensor.dtype or config.weight_data_type)).contiguous()
            part = part.view(torch.uint8) if tensor.fp8_part == 0 else part
            part.numpy().tofile(ft_dir / name)
    lines = []
    for section, values in config.sections().items():
        lines += [f"[{section}]", *(f"{key} = {value}" for key, value in values.items())]
    (ft_dir / "config.ini").write_text("\n".join(lines) + "\n")
    return ft_dir


def gpt_config(*, tp_size: int = 1, **changes: Any) -> GPTConfig:
    values = {
        "model_name": "tiny",
        "head_num": 4,
        "size_per_head": 6,
        "inter_size": 56,
        "num_layer": 2,
        "vocab_size": 53,
        "start_id": 51,
        "end_id": 52,
        "max_pos_seq_len": 80,
        "weight_data_type": "fp32",
        "tensor_para_size": tp_size,
    }
    return GPTConfig(**{**values, **changes})


def write_gpt(target: Path, *, tp_size: int = 1, seed: int = 0, **changes: Any) -> Path:
    return write_random(GPT, gpt_config(tp_size=tp_size, **changes), target, seed=seed)


def write_bert(target: Path, *, tp_size: int = 1) -> Path:
    config = BertConfig(
        model_name="bert",
        weight_data_type="fp32",
        tensor_para_size=tp_size,
        head_num=4,
        size_per_head=6,
        inter_size=28,
        num_layer=2,
    )
    return write_random(BERT, config, target)
