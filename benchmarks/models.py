"""Random models of real sizes, as FT folders and as Hugging Face checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.families.table import FAMILIES
from export_scripts.ft.layout import ft_directory
from export_scripts.synthesize import synthesize, synthetic_config

SIZES: Mapping[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("models.toml").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Model:
    """A model of SIZES in fp16, the same for every contender."""

    ft_dir: Path
    vocab_size: int


def random_model(name: str, work_dir: Path, *, tp_size: int = 1) -> Model:
    """Return the model `name` with random weights; its shards are written unless they exist."""
    sizes = dict(SIZES[name])
    family, config = FAMILIES[sizes.pop("family")], sizes.pop("config", {})
    ft_dir = ft_directory(work_dir / name, tp_size)
    if not ft_dir.exists():
        settings = [(key, str(value)) for key, value in config.items()]
        written = synthetic_config(family, **sizes, tensor_para_size=tp_size, given=settings)
        synthesize(family, written, work_dir / name)
    return Model(ft_dir, sizes["vocab"])


def in_fp8(model: Model, form: str, *, tp_size: int = 1) -> Model:
    """Return a model whose folders store matrices in FP8, with the scales of `--fp8 form`.

    Its shards have the values of its Hugging Face folder.
    """
    source = huggingface_folder(model)
    target = source.parent.with_name(f"{source.parent.name}-fp8-{form}")
    request = ConversionRequest(source, target, 1, "fp16", output_format="huggingface", fp8=form)
    if not request.folder.exists():
        convert(request)
    shards = ConversionRequest(request.folder, target, tp_size, "fp16", keep_fp8=True)
    return Model(convert(shards).ft_dir, model.vocab_size)


def huggingface_folder(model: Model) -> Path:
    """Return a model's Hugging Face folder, which is converted unless it exists."""
    request = ConversionRequest(
        model.ft_dir, model.ft_dir.parent, 1, "fp16", processes=2, output_format="huggingface"
    )
    if not request.folder.exists():
        convert(request)
    return request.folder
