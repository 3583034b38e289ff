"""config.ini is read by the loader's rules and written so that they give the same values."""

from dataclasses import replace

import pytest

from export_scripts.families.gpt.layout import GPTConfig
from export_scripts.families.layout.config import PromptTask, parse_integer
from export_scripts.ft.config_ini import config_text, parse_ini, read_config, write_config
from export_scripts.ft.validation import validate_directory
from foundations.errors import CheckpointMismatchError

CONFIG = GPTConfig(
    model_name="gpt", weight_data_type="fp16", tensor_para_size=2, head_num=4, size_per_head=6,
    inter_size=56, num_layer=2, vocab_size=52, start_id=50, end_id=51, max_pos_seq_len=20,
    layernorm_eps=1e-5, tasks=(PromptTask(task_name="a b", prompt_length=3),),
    prompt_learning_start_id=52, prompt_learning_type=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[GPT]\nHead_Num = 4", {"gpt": {"head_num": "4"}}),
        ("[a]\nk=v", {"a": {"k": "v"}}),
        ("[a]\nk : v", {"a": {"k": "v"}}),
        ("[a]\nk = v ; comment", {"a": {"k": "v"}}),
        ("[a]\nk = v;no comment", {"a": {"k": "v;no comment"}}),
        ("[a]\nk = v # part of it", {"a": {"k": "v # part of it"}}),
        ("[a]\n; comment\n# comment\n\nk = v", {"a": {"k": "v"}}),
        ("[a]\nk = v\n  more", {"a": {"k": "v\nmore"}}),
        ("[a]\nk = 1\nk = 2", {"a": {"k": "1\n2"}}),
        ("\ufeff[a]\nk = v", {"a": {"k": "v"}}),
    ],
)
def test_the_loaders_reading_rules(text, expected):
    assert parse_ini(text) == expected


def test_lines_are_cut_where_the_loader_cuts_them():
    line = "k = " + "x" * 195 + "y = 1"
    assert parse_ini("[a]\n" + line)["a"] == {"k": "x" * 195, "y": "1"}


def test_a_line_that_is_no_pair_is_reported():
    with pytest.raises(ValueError, match="line 2 is not 'key = value': 'nonsense'"):
        parse_ini("[a]\nnonsense")


@pytest.mark.parametrize(("text", "value"), [("12", 12), ("-3", -3), ("0x10", 16), ("010", 8)])
def test_integers_are_read_like_strtol(text, value):
    assert parse_integer(text) == value


@pytest.mark.parametrize("text", ["None", "", "1.5", "4 heads"])
def test_values_that_would_end_the_server_are_refused(text):
    with pytest.raises(ValueError, match="is not an integer"):
        parse_integer(text)


def test_written_configs_read_back_equal(tmp_path):
    folder = tmp_path / "2-gpu"
    folder.mkdir()
    write_config(folder, CONFIG)
    family, config = read_config(folder)
    assert (family.name, config) == ("gpt", CONFIG)


@pytest.mark.parametrize("name", ["a%b", "x ; y", "a\nb", "", "x" * 190])
def test_values_that_read_back_differently_are_refused(name):
    with pytest.raises(ValueError, match=r"config\.ini \[gpt\] model_name"):
        config_text(replace(CONFIG, model_name=name))


def test_all_missing_and_unreadable_keys_are_listed(tmp_path):
    (tmp_path / "config.ini").write_text(
        "[gpt]\nmodel_name=x\nhead_num=None\nsize_per_head=8\nnum_layer=2\nweight_data_type=fp16\n"
        "has_adapters=perhaps\n"
    )
    with pytest.raises(CheckpointMismatchError) as caught:
        read_config(tmp_path)
    text = str(caught.value)
    assert "[gpt] head_num: 'None' is not an integer" in text
    assert "[gpt] has no inter_size" in text
    assert "has_adapters: 'perhaps' is not a boolean" in text


def test_sections_of_no_family_are_reported(tmp_path):
    (tmp_path / "config.ini").write_text("[x]\na=b\n")
    with pytest.raises(
        CheckpointMismatchError, match=r"has sections \['x'\]; expected one of .*\[gpt\]"
    ):
        read_config(tmp_path)


def test_the_folder_s_name_gives_a_size_that_the_file_leaves_out(tmp_path):
    folder = tmp_path / "4-gpu"
    folder.mkdir()
    text = config_text(CONFIG).replace("tensor_para_size = 2\n", "")
    (folder / "config.ini").write_text(text)
    assert read_config(folder)[1].tensor_para_size == 4


def test_a_folder_of_another_name_has_the_size_that_its_files_show(tmp_path):
    text = config_text(CONFIG).replace("tensor_para_size = 2\n", "")
    (tmp_path / "config.ini").write_text(text)
    assert read_config(tmp_path)[1].tensor_para_size == 1
    (tmp_path / "model.layers.0.attention.dense.weight.1.bin").touch()
    (tmp_path / "model.layers.11.input_layernorm.weight.bin").touch()
    assert read_config(tmp_path)[1].tensor_para_size == 2


def test_a_folder_named_for_another_size_is_reported(tmp_path):
    folder = tmp_path / "4-gpu"
    folder.mkdir()
    write_config(folder, CONFIG)
    with pytest.raises(CheckpointMismatchError, match="= 2, but the folder is named 4-gpu"):
        read_config(folder)


def test_a_folder_for_no_ranks_is_reported(tmp_path):
    folder = tmp_path / "0-gpu"
    folder.mkdir()
    write_config(folder, CONFIG)
    text = (folder / "config.ini").read_text()
    stated = f"tensor_para_size = {CONFIG.tensor_para_size}\n"
    (folder / "config.ini").write_text(text.replace(stated, "tensor_para_size = 0\n"))
    assert validate_directory(folder) == [
        f"{folder / 'config.ini'}: config.ini tensor_para_size = 0; expected at least 1"
    ]


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(CheckpointMismatchError, match=r"is .* a converted folder"):
        read_config(tmp_path)
