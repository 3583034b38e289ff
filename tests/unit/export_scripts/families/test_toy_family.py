"""A family is one record and a row in each table; nothing else changes."""

import dataclasses
import itertools
import pkgutil
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import safetensors.torch
import torch

from export_scripts.conversion import plan
from export_scripts.families import table
from export_scripts.families.layout.architecture import DecoderArchitecture
from export_scripts.families.layout.config import FTConfig, ini_field
from export_scripts.families.layout.spec import ModelFamily, WeightSpec
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, StackQKV, TensorSource, transposed
from export_scripts.ft import config_ini
from export_scripts.ft.reader import FTReader
from export_scripts.ft.validation import validate_directory
from tests.conversions import folder_of
from tests.json_files import write_json


@dataclass(frozen=True, kw_only=True)
class ToyConfig(FTConfig):
    SECTION: ClassVar[str] = "toy"

    head_num: int
    hidden: int
    num_layer: int
    vocab_size: int
    parallel: bool = ini_field(True, as_digit=True)

    def architecture(self) -> DecoderArchitecture:
        return DecoderArchitecture(
            head_num=self.head_num, kv_head_num=self.head_num, hidden=self.hidden,
            size_per_head=self.hidden // self.head_num, inter_size=0, position="none",
            num_layer=self.num_layer, vocab_size=self.vocab_size,
        )  # fmt: skip


TOY = ModelFamily(
    name="toy",
    model_type="Toy",
    config=ToyConfig,
    layout=(
        WeightSpec("model.wte", ("vocab_size", "hidden")),
        WeightSpec("model.layers.{layer}.qkv.weight", ("hidden", 3, "hidden"), split=2),
        WeightSpec("model.layers.{layer}.out.weight", ("hidden", "hidden"), split=0),
    ),
    divisible=("head_num",),
)


def toy_weights(facts: Facts, config: ToyConfig) -> dict[str, TensorSource]:
    return {
        "model.wte": Copy("emb"),
        "model.layers.{layer}.qkv.weight": StackQKV(("{layer}.q", "{layer}.k", "{layer}.v")),
        "model.layers.{layer}.out.weight": transposed("{layer}.o"),
    }


TOY_MAPPING = SourceMapping(
    name="toy",
    title="Toy",
    family=TOY,
    format="huggingface",
    matches=lambda facts: facts.config.get("model_type") == "toy",
    config=lambda facts: ToyConfig(
        weight_data_type=facts.weight_data_type,
        tensor_para_size=facts.tp_size,
        head_num=facts.config["heads"],
        hidden=facts.pieces("emb")[0].shape[1],
        num_layer=facts.config["layers"],
        vocab_size=facts.rows("emb"),
    ),
    weights=toy_weights,
)


def test_a_new_family_needs_only_its_record_and_two_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(config_ini.SECTIONS, "toy", (f"{__name__}:TOY",))
    monkeypatch.setattr(plan, "SOURCE_MAPPINGS", (TOY_MAPPING, *table.SOURCE_MAPPINGS))
    tensors = {"emb": torch.randn(7, 6)}
    tensors |= {f"{i}.{name}": torch.randn(6, 6) for i in range(2) for name in "qkvo"}
    write_json(tmp_path / "config.json", {"model_type": "toy", "heads": 2, "layers": 2})
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    folder = folder_of(tmp_path, tmp_path / "out", tp_size=2)
    assert validate_directory(folder) == []
    reader = FTReader(folder)
    assert (reader.family.name, reader.config.parallel) == ("toy", True)  # type: ignore[attr-defined]
    assert "parallel = 1" in (folder / "config.ini").read_text()
    qkv = torch.stack([tensors[f"1.{name}"].t() for name in "qkv"], 1)  # (6, 3, 6)
    assert torch.equal(reader.read("model.layers.1.qkv.weight", 1), qkv[:, :, 3:])
    assert torch.equal(reader.read("model.layers.1.out.weight", 1), tensors["1.o"].t()[3:])


def test_mappings_have_names_of_their_own_and_a_listed_family():
    names = [mapping.name for mapping in table.SOURCE_MAPPINGS]
    assert len(set(names)) == len(names)
    for mapping in table.SOURCE_MAPPINGS:
        if mapping.family.has_shards:  # whose families the table lists
            assert table.FAMILIES[mapping.family.name] is mapping.family
    placed = {
        (section, pkgutil.resolve_name(place).name)
        for section, places in config_ini.SECTIONS.items()
        for place in places
    }
    assert placed == {(each.config.SECTION, each.name) for each in table.FAMILIES.values()}


@pytest.mark.parametrize(
    "family",
    dict.fromkeys(mapping.family for mapping in table.SOURCE_MAPPINGS),
    ids=lambda family: family.name,
)
def test_a_layout_names_fields_and_properties_of_its_config(family):
    fields = {field.name for field in dataclasses.fields(family.config)}
    for spec in family.layout:
        conditions = (each.removeprefix("not ").partition("=")[0] for each in spec.when)
        sizes = (re.split(r"[*+]", size) for size in spec.shape if isinstance(size, str))
        for name in (*itertools.chain.from_iterable(sizes), *conditions):
            assert name in fields or hasattr(family.config, name), spec
        assert spec.split is None or 0 <= spec.split < len(spec.shape), spec
    assert len({(spec.name, spec.when) for spec in family.layout}) == len(family.layout)
