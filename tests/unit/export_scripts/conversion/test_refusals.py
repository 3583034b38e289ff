"""Refusals of the conversion, with their reasons, before a folder appears."""

import io
import json
import re
import shutil
import tarfile
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from export_scripts.checkpoints.base import Region
from export_scripts.checkpoints.tokenizers import check_outside_files
from export_scripts.conversion.request import OPTION_NAMES
from foundations.errors import CheckpointMismatchError
from tests.conversions import folder_of, problems_of, refusal
from tests.json_files import read_json, write_json
from tests.tiny import NEMO, gpt_tensors, nemo_members, write_megatron, write_nemo, write_tar

QKV = NEMO + "encoder.layers.1.self_attention.query_key_value.weight"


@pytest.fixture
def gpt2(shared, tmp_path) -> Path:
    """Return a copy of a GPT-2, to be changed."""
    return shutil.copytree(shared / "golden/gpt2/tiny/source", tmp_path / "gpt2")


@pytest.mark.parametrize(
    "source",
    ["gpt_nemo/train_tp1_pp1_bf16/source/megatron_gpt.nemo", "gpt2/tiny/source",
     "bert/tiny/source", "opt/pre_ln/source", "t5/relu_tied/source"],
)  # fmt: skip
@pytest.mark.parametrize("tp_size", [3, 5, 8])
def test_sizes_that_do_not_divide_are_refused(shared, tmp_path, source, tp_size):
    text = refusal(shared / "golden" / source, tmp_path, tp_size=tp_size)
    assert re.search(
        rf"--tensor-model-parallel-size={tp_size} does not divide (head_num|num_heads)=4\b.* of "
        r".*; use 1, 2 or 4$",
        text,
    )
    assert "does not make" not in text  # once for the model, not for every tensor


def test_every_tensor_that_overflows_is_named(tmp_path):
    tensors = gpt_tensors()
    tensors[QKV][0, 0] = 70000.0
    tensors[NEMO + "embedding.word_embeddings.weight"][5, 5] = torch.nan
    tensors[NEMO + "embedding.word_embeddings.weight"][5, 6] = -torch.inf
    text = refusal(write_nemo(tmp_path / "x.nemo", tensors), tmp_path, weight_data_type="fp16")
    assert "layers.1.attention.query_key_value.weight: values up to 70000" in text
    assert "model.wte: the checkpoint holds 2 values that are infinite" in text


@pytest.mark.parametrize(
    "fields",
    [
        {"weight_data_type": "fp16", "allow": ("model.layers.1.attention.query_key_value.weight",)},
        {"weight_data_type": "bf16"},
    ],
)
def test_a_large_value_is_accepted_by_name_or_in_another_type(tmp_path, fields):
    tensors = gpt_tensors()
    tensors[QKV][0, 0] = 70000.0
    assert folder_of(write_nemo(tmp_path / "x.nemo", tensors), tmp_path, **fields).is_dir()


@pytest.mark.parametrize(
    ("layout", "lost", "words"),
    [
        (
            {"tp": 2}, ["mp_rank_01"],
            "checkpoint has 1 of 2 tensor-parallel ranks: mp_rank_01 is missing",
        ),
        (
            {"tp": 2, "pp": 2}, ["tp_rank_01_pp_rank_000", "tp_rank_00_pp_rank_001"],
            "2 of 4 training ranks: tp_rank_00_pp_rank_001, tp_rank_01_pp_rank_000 are missing",
        ),
        (
            {"tp": 3, "config": {"tensor_model_parallel_size": 2}}, [],
            "holds mp_rank_02, but its configuration says TP 2",
        ),
    ],
)  # fmt: skip
def test_ranks_that_are_missing_or_too_many_are_named(tmp_path, layout, lost, words):
    members = nemo_members(gpt_tensors(), **layout)
    for folder in lost:
        del members[f"{folder}/model_weights.ckpt"]
    assert words in refusal(write_tar(tmp_path / "x.nemo", members), tmp_path)


def test_a_rank_of_another_shape_is_named(tmp_path):
    folder = tmp_path / "megatron"
    write_megatron(folder, gpt_tensors(), tp=2)
    file = folder / "mp_rank_01" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    encoder = content["model"]["language_model"]["encoder"]
    encoder["layers.2.mlp.dense_4h_to_h.weight"] = torch.zeros(31, 33)
    torch.save(content, file)
    text = refusal(folder, tmp_path)
    assert "layers.2.mlp.dense_4h_to_h.weight: training rank 1 has shape [31, 33]" in text


def test_every_missing_misshaped_and_unknown_tensor_is_listed(tmp_path):
    tensors = gpt_tensors()
    del tensors[NEMO + "encoder.layers.3.mlp.dense_4h_to_h.bias"]
    tensors[QKV] = torch.zeros(90, 31)
    tensors[NEMO + "encoder.layers.0.mlp.dense_h_to_4h_2.weight"] = torch.zeros(66, 30)
    text = refusal(write_nemo(tmp_path / "x.nemo", tensors), tmp_path)
    assert "encoder.layers.3.mlp.dense_4h_to_h.bias is missing" in text
    assert "[90, 31]" in text
    assert "does not make model.layers.1.attention.query_key_value.weight" in text
    assert "encoder.layers.0.mlp.dense_h_to_4h_2.weight [[66, 30]] is not a tensor of" in text


def test_names_behind_a_prefix_are_reported_to_come_from_a_wrapper(gpt2, tmp_path):
    weights = gpt2 / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    safetensors.torch.save_file({f"policy.{k}": v for k, v in tensors.items()}, weights)
    text = refusal(gpt2, tmp_path)
    assert "names there begin with 'policy.': save the model without its wrapper" in text


def test_flat_parameters_of_fsdp_are_named_with_the_remedy(gpt2, tmp_path):
    name = "transformer.h.0._fsdp_wrapped_module._flat_param"
    safetensors.torch.save_file({name: torch.zeros(9)}, gpt2 / "model.safetensors")
    assert "save it with SHARDED_STATE_DICT or FULL_STATE_DICT" in refusal(gpt2, tmp_path)


def test_an_unknown_tensor_is_left_out_where_it_is_allowed_by_name(tmp_path):
    tensors = gpt_tensors() | {NEMO + "extra": torch.zeros(2)}
    source = write_nemo(tmp_path / "x.nemo", tensors)
    assert "is not a tensor of" in refusal(source, tmp_path)
    assert folder_of(source, tmp_path / "out", allow=("*.extra",)).is_dir()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"activation": "swiglu"}, "activation = swiglu"),
        ({"activation": "fast-geglu"}, "activation = fast-geglu"),
        ({"activation": "squared-relu"}, "activation = squared-relu"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type = alibi"),
        ({"normalization": "rmsnorm"}, "normalization = rmsnorm"),
        ({"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size = 2"),
        ({"num_query_groups": 2}, "num_query_groups = 2"),
        ({"multi_query_attention": True}, "multi_query_attention"),
        ({"qk_layernorm": True}, "qk_layernorm"),
        ({"transformer_block_type": "post_ln"}, "transformer_block_type = 'post_ln'"),
        ({"headscale": True}, "headscale"),
        ({"normalize_attention_scores": False}, "normalize_attention_scores"),
        ({"kv_channels": 8}, "6 heads of 8 do not make hidden_size = 30"),
        ({"num_moe_experts": 4}, "4 experts"),
        ({"num_layers": None}, "num_layers = None"),
    ],
)
def test_models_that_the_layout_cannot_hold_are_refused(tmp_path, config, words):
    source = write_nemo(tmp_path / "x.nemo", config=config)
    assert words in refusal(source, tmp_path)
    assert words in problems_of(source, tmp_path / "out")


def test_tensors_of_low_rank_adapters_are_refused(tmp_path):
    key = NEMO + "encoder.layers.0.self_attention.lora_kqv_adapter.linear_in.weight"
    source = write_nemo(tmp_path / "x.nemo", gpt_tensors() | {key: torch.zeros(8, 30)})
    assert "merge them into the base model first" in refusal(source, tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x"])
def test_archive_members_outside_their_folder_are_refused(tmp_path, name):
    path = write_nemo(tmp_path / "x.nemo")
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo(name)
        info.size = 1
        archive.addfile(info, io.BytesIO(b"x"))
    text = refusal(path, tmp_path)
    assert f"refused: member '{name}' leads outside its folder" in text


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_archives_are_refused(tmp_path, kind):
    path = write_nemo(tmp_path / "x.nemo")
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo("odd")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    assert "refused: member 'odd' is" in refusal(path, tmp_path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (tarfile.REGTYPE, "member 'odd' has a size of -512 bytes|is not a readable tar archive"),
        (tarfile.DIRTYPE, "member 'odd' has a size of -512 bytes"),
        (tarfile.GNUTYPE_LONGNAME, "is not a readable tar archive"),
        (tarfile.XHDTYPE, "is not a readable tar archive"),
    ],
)
def test_members_smaller_than_nothing_are_refused(tmp_path, kind, words):
    """Python's tarfile can go back by as much, and for ever (CVE-2025-8194)."""
    info = tarfile.TarInfo("odd")
    info.type = kind
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    head[124:136] = (-512).to_bytes(12, "big", signed=True)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    (tmp_path / "x.nemo").write_bytes(head + bytes(2048))
    assert re.search(words, refusal(tmp_path / "x.nemo", tmp_path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "is not YAML: ") for text in (b"a: 2020-13-45", b"a: !!python/name:os")),
        (b"a: " + b"9" * 5000, "is not YAML: "),
        *((text, "is not a table") for text in (b"", b"# nothing", b"- a")),
        *(
            (b"num_layers: " + value, "is not YAML: a value does not fit its tag")
            for value in (b"!!bool yep", b"!!int ''", b"!!timestamp today")
        ),
    ],
)
def test_a_configuration_that_yaml_cannot_read_is_named(tmp_path, text, words):
    path = write_tar(tmp_path / "x.nemo", {"model_config.yaml": text, "model_weights.ckpt": b""})
    assert f"x.nemo: model_config.yaml {words}" in refusal(path, tmp_path)


ALIASES = b"a: &a [0, 0, 0, 0, 0, 0, 0, 0, 0]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(20)
)
MERGES = b"k0: &k0 {x: 1}\n" + b"".join(
    b"k%d: &k%d {<<: [%s]}\n" % (i, i, b",".join([b"*k%d" % (i - 1)] * 40)) for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (ALIASES + b"num_layers: *u\n", "its aliases unfold to more than 1000000 values"),
        (MERGES, "its aliases unfold to more than 1000000 values"),
        (b"a: &a {b: *a}\n", "its aliases unfold to more than 1000000 values"),
        (b"num_layers: 1" + b":59" * 50_000, "it holds a number of 150001 characters"),
        (b"a: [" + b"1," * 1_000_000 + b"1]", "more than 1048576"),
    ],
    ids=["aliases", "merges", "a circle", "a number", "a list"],
)
def test_a_configuration_that_would_keep_its_reader_busy_is_refused(text, reported, tmp_path):
    source = tmp_path / "x.nemo"
    write_tar(source, {**nemo_members(gpt_tensors()), "model_config.yaml": text})
    began = time.monotonic()
    assert reported in problems_of(source, tmp_path / "out")
    assert time.monotonic() - began < 10


VOCABULARY = json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3})
# A credential file whose lines have two words each, as merges do; and one that is JSON.
NETRC = "machine a.host\nlogin me\npassword secret\n"
LOGINS = json.dumps({"auths": {"a.registry": {"auth": "secret"}}})


def nemo_naming(tmp_path: Path, vocab: str, merges: str) -> Path:
    """Return an archive that names two files outside of it."""
    files = {"vocab.json": vocab, "merges.txt": merges}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    tokenizer = {"vocab_file": f"{tmp_path}/vocab.json", "merge_file": f"{tmp_path}/merges.txt"}
    members = nemo_members(gpt_tensors(), config={"tokenizer": tokenizer})
    kept = {name: data for name, data in members.items() if not name.startswith("0123_")}
    return write_tar(tmp_path / "x.nemo", kept)


@pytest.mark.parametrize(("vocab", "merges"), [(LOGINS, "#version\n"), (VOCABULARY, NETRC)])
def test_files_outside_of_an_archive_are_taken_only_if_they_are_a_tokenizers(
    tmp_path, vocab, merges
):
    text = refusal(nemo_naming(tmp_path, vocab, merges), tmp_path)
    name = "vocab.json" if vocab == LOGINS else "merges.txt"
    assert f"{tmp_path / name} is refused: it is outside of the checkpoint" in text


def test_tokenizer_outside_of_an_archive_is_carried(tmp_path):
    source = nemo_naming(tmp_path, VOCABULARY, "#version: 0.2\na b\n")
    folder = folder_of(source, tmp_path / "out")
    assert (folder / "merges.txt").read_text() == "#version: 0.2\na b\n"
    assert (folder / "vocab.json").read_text() == VOCABULARY


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "merges.txt"])
def test_links_out_of_a_folder_are_not_followed_to_other_files(gpt2, tmp_path, name):
    (tmp_path / "secret").write_text(NETRC)
    (gpt2 / name).unlink(missing_ok=True)
    (gpt2 / name).symlink_to(tmp_path / "secret")
    assert f"{gpt2 / name} is refused: it is outside" in refusal(gpt2, tmp_path)


def test_a_linked_folder_hides_no_file_of_another_kind(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "tokenizer.json").write_text(LOGINS)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer").symlink_to(tmp_path / "home")
    file = Region(tmp_path / "model" / "tokenizer" / "tokenizer.json")
    with pytest.raises(CheckpointMismatchError, match="is outside of the checkpoint"):
        check_outside_files({"tokenizer.json": file}, tmp_path / "model")


def test_links_within_a_hub_cache_are_followed(shared, tmp_path):
    source = tmp_path / "models--a--b" / "snapshots" / "1"
    shutil.copytree(shared / "golden/gpt2/tiny/source", source)
    blob = tmp_path / "models--a--b" / "blobs" / "2"
    blob.parent.mkdir()
    blob.write_text("{}")
    (source / "generation_config.json").unlink(missing_ok=True)
    (source / "generation_config.json").symlink_to(blob)
    folder = folder_of(source, tmp_path / "out")
    assert (folder / "generation_config.json").read_text() == "{}"


def test_another_folder_of_snapshots_is_no_hub_cache(shared, tmp_path):
    source = tmp_path / "home" / "snapshots" / "1"
    shutil.copytree(shared / "golden/gpt2/tiny/source", source)
    (tmp_path / "home" / "secret").write_text(NETRC)
    (source / "tokenizer_config.json").unlink(missing_ok=True)
    (source / "tokenizer_config.json").symlink_to(tmp_path / "home" / "secret")
    assert "is outside of the checkpoint" in refusal(source, tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "vocab.txt", "tokenizer.json", "special_tokens_map.json"]
)
def test_a_file_far_too_large_for_a_tokenizer_is_not_read(name, gpt2, tmp_path):
    for vocabulary in ("vocab.json", "merges.txt"):
        (gpt2 / vocabulary).unlink(missing_ok=True)
    with (gpt2 / name).open("wb") as file:
        file.truncate(3 << 30)
    text = refusal(gpt2, tmp_path)
    assert str(gpt2 / name) in text
    assert "MiB" in text


@pytest.mark.parametrize("key", ["activation_function", "model_type", "n_head", "bos_token_id"])
def test_a_message_does_not_repeat_a_value_of_any_length(key, gpt2, tmp_path):
    path = gpt2 / "config.json"
    write_json(path, read_json(path) | {key: "x" * 100_000})
    text = refusal(gpt2, tmp_path)
    assert key in text or "model type" in text
    assert len(text) < 10_000


def test_names_of_a_checkpoint_do_not_reach_the_terminal_as_they_are(tmp_path):
    path = write_tar(tmp_path / "x.nemo", {"../\x1b]0;x\x07": b""})
    text = refusal(path, tmp_path)
    assert "leads outside its folder" in text
    assert text.replace("\n", "").isprintable()


def test_a_truncated_archive_is_reported(tmp_path):
    path = write_nemo(tmp_path / "x.nemo", tp=2)
    path.write_bytes(path.read_bytes()[:-20000])
    text = refusal(path, tmp_path)
    assert "x.nemo" in text
    assert "truncated" in text or "missing" in text or "not a readable tar" in text


def test_a_truncated_gzip_archive_is_reported(tmp_path):
    path = write_nemo(tmp_path / "x.nemo", gzip=True)
    path.write_bytes(path.read_bytes()[:-5000])
    assert "truncated" in refusal(path, tmp_path)


def test_an_existing_folder_is_not_replaced_unasked(tmp_path):
    first = write_nemo(tmp_path / "a.nemo")
    second = write_nemo(tmp_path / "b.nemo", gpt_tensors(seed=1))
    folder = folder_of(first, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "exists and holds another conversion" in problems_of(second, tmp_path / "out")
    with pytest.raises(ValueError, match="exists and holds another conversion"):
        folder_of(second, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_foreign_folder_in_the_way_is_refused(tmp_path):
    (tmp_path / "out" / "1-gpu").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds another conversion"):
        folder_of(write_nemo(tmp_path / "a.nemo"), tmp_path / "out")


def test_unknown_names_and_sizes_are_listed_together(tmp_path):
    text = problems_of(
        tmp_path / "nowhere",
        tmp_path / "out",
        tp_size=0,
        weight_data_type="int4",
        model_type="gpt9",
        names={**OPTION_NAMES, "tp_size": "export.model.tp"},
    )
    assert "export.model.tp=0 is not a positive number" in text
    assert "--weight-data-type=int4 is unknown; use fp32, fp16, bf16" in text
    assert "--model-type=gpt9 is unknown" in text
    assert f"--checkpoint-path={tmp_path / 'nowhere'} does not exist" in text


def test_another_kind_of_model_than_expected_is_refused(tmp_path):
    source = write_nemo(tmp_path / "a.nemo")
    assert "--model-type=t5, but" in refusal(source, tmp_path, model_type="t5")
    assert problems_of(source, tmp_path / "out", model_type="gpt3") == ""


def test_pipeline_stages_that_do_not_divide_the_layers_are_refused(tmp_path):
    text = refusal(write_nemo(tmp_path / "a.nemo"), tmp_path, pp_size=3)
    assert "--pipeline-model-parallel-size=3 does not divide num_layer=4" in text
    assert "use 1, 2 or 4" in text


def test_a_path_of_no_known_format_is_reported(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"hello")
    text = refusal(tmp_path / "x.bin", tmp_path)
    assert "is not a checkpoint of a known format" in text
    assert ".nemo archive" in text


def test_an_unknown_hugging_face_architecture_is_reported(tmp_path):
    write_json(tmp_path / "config.json", {"model_type": "mamba"})
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    text = refusal(tmp_path, tmp_path)
    assert "of an unknown architecture (model type mamba" in text


@pytest.mark.parametrize("given", [("hed_num", "4"), ("tasks", "1")])
def test_a_stated_key_that_config_ini_lacks_is_reported(tmp_path, given):
    text = refusal(write_nemo(tmp_path / "a.nemo"), tmp_path, given=(given,))
    assert f"--set {'='.join(given)}: not a key of this model's config.ini" in text


def test_archives_that_a_source_cannot_take_are_refused(tmp_path):
    source = write_nemo(tmp_path / "a.nemo")
    text = refusal(source, tmp_path, ia3_checkpoints=(source,))
    assert "does not support ia3 add-ons" in text


def test_checks_import_neither_torch_nor_numpy(tmp_path):
    import subprocess
    import sys

    source = write_nemo(tmp_path / "a.nemo", tp=2, pp=2)
    code = (
        "import sys, pathlib\n"
        "from export_scripts.conversion.convert import ConversionRequest, check_conversion\n"
        f"source = pathlib.Path({str(source)!r})\n"
        "r = ConversionRequest(source, pathlib.Path('/nowhere'), 5, 'fp16')\n"
        "problems = check_conversion(r)\n"
        "assert 'does not divide' in problems[0], problems\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
