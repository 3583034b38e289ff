"""Every source under the golden folder becomes the reference converters' files, byte for byte."""

import fnmatch
import hashlib
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_scripts.conversion.convert import ConversionRequest, check_conversion, convert
from export_scripts.ft.config_ini import parse_ini
from export_scripts.ft.validation import validate_directory
from tests.conftest import SHARED
from tests.json_files import read_json

GOLDEN = SHARED / "golden"


@dataclass(frozen=True)
class Row:
    """The further inputs of a case, apart from its case.json.

    Attributes:
        request: Fields of the request; paths are relative to the case's folder.
        may_lack: Patterns of expected files that no loader reads.
        close: Patterns of files that are matrix products, compared within a tolerance.
        config: Whether the reference's config.ini is worth comparing.
        unlike: config.ini keys that may differ.
        only: Patterns of the config.ini keys worth comparing, as section.key.
    """

    request: Mapping[str, Any] | None = None
    may_lack: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    config: bool = True
    unlike: tuple[str, ...] = ("model_name", "_name_or_path")
    only: tuple[str, ...] = ("*",)


# A transposed copy of the embedding, next to the one that is read.
T5_COPY = ("shared.weight.bin",)
# Sections whose keys the loader reads; the reference also dumps the source's configuration.
T5_KEYS = (
    *(
        f"*.{key}"
        for key in (
            "num_heads", "d_kv", "d_model", "d_ff", "num_layers", "vocab_size", "weight_data_type",
            "relative_attention_num_buckets_or_max_pos_seq_len", "feed_forward_proj",
            "tensor_para_size", "has_adapter", "adapter_inter_size", "adapter_norm_position",
        )
    ),
    "encoder.num_tasks", "encoder.prompt_learning_*", "task_*.*", "structure.*",
    "decoder.decoder_start_token_id", "decoder.eos_token_id", "decoder.pad_id",
    "decoder.tie_word_embeddings",
)  # fmt: skip

# Files of a Hugging Face model that the reference's clients and examples also read.
T5_CLIENT_KEYS = tuple(
    f"*.{key}"
    for key in (
        "num_decoder_layers", "decoder_start_token_id", "eos_token_id", "pad_token_id",
        "is_gated_act", "is_decoder", "is_encoder_decoder", "use_cache", "model_type",
        "dropout_rate", "initializer_factor", "layer_norm_epsilon",
        "relative_attention_max_distance",
    )
)  # fmt: skip

# Keyed by family/case pattern; the first that matches holds.
ROWS: dict[str, Row] = {
    # The reference's config.ini is that of the 20B and the 6B model, whatever it converts.
    "gptneox_eleuther/*": Row(config=False),
    "gptj_slim/*": Row(config=False),
    "opt/int8_static": Row({"activation_ranges": "source/act_scales.pt"}),
    "opt/post_ln_projected": Row(close=("model.wte.bin", "model.lm_head.weight.bin")),
    "gpt_megatron/v0_tp1": Row({"given": (("head_num", "4"),)}),
    "gpt_nemo/prompt_table": Row({"prompt_checkpoints": ("source/prompt.nemo",)}),
    "t5/*": Row(may_lack=T5_COPY, only=T5_KEYS + T5_CLIENT_KEYS),
    # The depth of a decoder that the folder has not.
    "t5_encoder/*": Row(
        {"model_type": "t5_encoder"},
        may_lack=T5_COPY,
        only=T5_KEYS + T5_CLIENT_KEYS,
        unlike=("_name_or_path", "num_decoder_layers"),
    ),
    "t5_nemo/prompt_table": Row({"prompt_checkpoints": ("source/prompt.nemo",)}, only=T5_KEYS),
    "t5_nemo/linear_adapter": Row({"adapter_checkpoints": ("source/adapter.nemo",)}, only=T5_KEYS),
    "t5_nemo/ia3_two_tasks": Row(
        {"ia3_checkpoints": ("source/ia3_task0.nemo", "source/ia3_task1.nemo")}, only=T5_KEYS
    ),
    "t5_nemo/*": Row(only=T5_KEYS),
    "*": Row(),
}

_PATH_FIELDS = ("prompt_checkpoints", "ia3_checkpoints", "adapter_checkpoints")


def cases() -> list[Any]:
    found = []
    for path in sorted(GOLDEN.glob("*/*/case.json")):
        case = read_json(path)
        name = f"{path.parts[-3]}/{path.parts[-2]}"
        found += [
            pytest.param(path.parent, case, variant, id=f"{name}-{variant['label']}")
            for variant in case.get("variants", ())
        ]
    assert found, f"no golden cases under {GOLDEN}"
    return found


def row_of(folder: Path) -> Row:
    name = "/".join(folder.parts[-2:])
    return next(row for pattern, row in ROWS.items() if fnmatch.fnmatchcase(name, pattern))


def request_for(
    folder: Path, case: Mapping[str, Any], variant: Mapping[str, Any], output_dir: Path
) -> ConversionRequest:
    fields = dict(row_of(folder).request or {})
    for key in _PATH_FIELDS:
        if key in fields:
            fields[key] = tuple(folder / path for path in fields[key])
    if "activation_ranges" in fields:
        fields["activation_ranges"] = folder / fields["activation_ranges"]
    return ConversionRequest(
        checkpoint_path=folder / case["source"],
        output_dir=output_dir,
        tp_size=variant["tp"],
        weight_data_type=variant["weight_data_type"],
        processes=2,
        **fields,
    )


@pytest.mark.parametrize(("folder", "case", "variant"), cases())
def test_shards_equal_the_reference(folder, case, variant, tmp_path):
    request = request_for(folder, case, variant, tmp_path / "ours")
    assert check_conversion(request) == []
    ours = convert(request).ft_dir
    row = row_of(folder)
    assert validate_directory(ours) == []
    assert different_sums(ours, variant["files"], row) == {}
    if not (folder / variant["tar"]).is_file():  # only its sums are kept
        recorded = (folder / "expected" / f"{variant['label']}.ini").read_text()
        if row.config:
            assert different_keys(ours, recorded, case.get("config_overrides", {}), row) == {}
        return
    with tarfile.open(folder / variant["tar"]) as archive:
        archive.extractall(tmp_path / "theirs", filter="data")
    theirs = next((tmp_path / "theirs").rglob("config.ini")).parent
    assert products_that_differ(ours, theirs, row, variant["weight_data_type"]) == []
    if row.config:
        recorded = (theirs / "config.ini").read_text()
        assert different_keys(ours, recorded, case.get("config_overrides", {}), row) == {}
    for name in ("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"):
        if (theirs / name).exists():
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def different_sums(ours: Path, recorded: Mapping[str, tuple[int, str]], row: Row) -> dict[str, str]:
    """Compare size and SHA-256 of every file of weights; `recorded` has its first 16 digits."""
    mine = {path.name: path.read_bytes() for path in ours.glob("*.bin")}
    wanted = {name: tuple(each) for name, each in recorded.items() if name.endswith(".bin")}
    problems = dict.fromkeys(mine.keys() - wanted.keys(), "unexpected")
    for name, (size, digits) in wanted.items():
        if name not in mine:
            if not _matches(name, row.may_lack):
                problems[name] = "missing"
        elif len(mine[name]) != size:
            problems[name] = f"{len(mine[name])} bytes, not {size}"
        elif (
            not _matches(name, row.close) and hashlib.sha256(mine[name]).hexdigest()[:16] != digits
        ):
            problems[name] = "different bytes"
    return problems


def products_that_differ(ours: Path, theirs: Path, row: Row, data_type: str) -> list[str]:
    """Return the matrix products that are not within their tolerance."""
    products = [path for path in theirs.glob("*.bin") if _matches(path.name, row.close)]
    return [each.name for each in products if not _is_close(ours / each.name, each, data_type)]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_close(mine: Path, theirs: Path, data_type: str) -> bool:
    if data_type == "fp16":
        # One unit in the last place: neighbouring halves have neighbouring bit patterns.
        bits = [np.fromfile(path, np.int16).astype(np.int32) for path in (mine, theirs)]
        return bool(np.abs(bits[0] - bits[1]).max() <= 1)
    ours, wanted = (np.fromfile(path, np.float32) for path in (mine, theirs))
    return bool(np.allclose(ours, wanted, rtol=0, atol=1e-6))  # sums of products, order unspecified


def different_keys(
    ours: Path, recorded: str, overrides: Mapping[str, Mapping[str, Any]], row: Row
) -> dict[str, tuple[str, str | None]]:
    mine = parse_ini((ours / "config.ini").read_text())
    wanted = parse_ini(recorded)
    for section, keys in overrides.items():
        wanted.setdefault(section, {}).update({k: str(v) for k, v in keys.items()})
    return {
        f"[{section}] {key}": (value, mine.get(section, {}).get(key))
        for section, keys in wanted.items()
        for key, value in keys.items()
        if key not in row.unlike
        and _matches(f"{section}.{key}", row.only)
        and _value(value) != _value(mine.get(section, {}).get(key))
    }


def _value(text: str | None) -> Any:
    """Return a config value as the loader takes it: numbers and booleans by value."""
    if text is None:
        return None
    word = text.strip().lower()
    if word in ("true", "yes", "on"):
        return 1.0
    if word in ("false", "no", "off"):
        return 0.0
    try:
        return float(word)
    except ValueError:
        return word
