"""Composition of command lines, and the messages for wrong ones."""

import dataclasses
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from export_scripts.conversion.request import ConversionRequest
from export_scripts.triton.repository import RepositoryRequest
from inference.evaluation.options import EvaluateSection, EvaluationOptions
from inference.evaluation.tasks.text_task import TEXT_TASKS
from launcher_scripts.configuration.arguments import read_arguments
from launcher_scripts.configuration.compose import Composition, ConfigRoot, compose_config
from launcher_scripts.configuration.diagnosis import files_of_group
from launcher_scripts.configuration.schema import KEYS
from launcher_scripts.configuration.server_config import server_config
from launcher_scripts.configuration.settings import CHECKOUT, CONFIG_DIR
from launcher_scripts.job_folder import repeatable
from stages import convert, export


def compose(*words: str) -> Composition:
    return compose_config(read_arguments(words).overrides)


def problem(*words: str) -> str:
    composition = compose(*words)
    assert len(composition.problems) == 1
    return composition.problems[0]


def test_defaults_are_those_of_the_guide():
    config = compose().config
    assert config is not None
    assert config.export.run.name == "export_gpt3_5b"
    assert config.export.run.config_summary == "tp8_pp1_fp16_fp16"
    results = f"{CHECKOUT}/launcher_scripts/results/gpt3_5b"
    assert str(config.export.run.results_dir) == f"{results}/export_tp8_pp1_fp16_fp16"
    assert str(config.export.model.checkpoint_path) == f"{results}/checkpoints"
    assert str(config.export.triton_deployment.triton_model_dir) == (
        f"{results}/export_tp8_pp1_fp16_fp16/model_repo/gpt3_5b"
    )


def test_command_line_of_the_guide_is_understood():
    config = compose(
        "stages=[export]",
        "cluster_type=bcp",
        "launcher_scripts_path=/opt/NeMo-Megatron-Launcher/launcher_scripts",
        "data_dir=/mount/data/the_pile_gpt3",
        "base_results_dir=/mount/results",
        "export.run.model_train_name=gpt3_126m",
        "export.model.tensor_model_parallel_size=2",
        "export.triton_deployment.pipeline_model_parallel_size=1",
    ).config
    assert config is not None
    assert config.cluster_type == "bcp"
    assert str(config.export.run.results_dir) == "/mount/results/gpt3_126m/export_tp2_pp1_fp16_fp16"


@pytest.mark.parametrize(
    "choice",
    [choice for choice in files_of_group("export") if not choice.startswith(("t5", "mt5"))],
)
def test_every_export_file_composes(choice):
    assert not compose(f"export={choice}").problems


@pytest.mark.parametrize("choice", ["t5/export_t5", "mt5/export_mt5"])
def test_placeholders_must_be_given(choice):
    problems = compose(f"export={choice}").problems
    assert [text.partition(" is not set")[0] for text in problems] == [
        "export.run.model_train_name",
        "export.model.checkpoint_path",
    ]
    given = compose(
        f"export={choice}", "export.run.model_train_name=m", "export.model.checkpoint_path=/c"
    )
    assert not given.problems


def test_misspelt_key_is_answered_with_the_likely_one():
    assert problem("export.model.tensor_model_paralel_size=2") == (
        "export.model.tensor_model_paralel_size=2: unknown key "
        "export.model.tensor_model_paralel_size "
        "(did you mean export.model.tensor_model_parallel_size?)."
    )


def test_removed_key_is_answered_with_what_replaced_it():
    assert "evaluate.baseline=compare" in problem("evaluate.lambada.reference_path=/r.json")
    assert "did you mean" not in problem("evaluate.lambada.url=x")


def test_key_in_the_wrong_section_is_found():
    text = problem("export.pipeline_model_parallel_size=2")
    assert "did you mean export.triton_deployment.pipeline_model_parallel_size?" in text


def test_wrong_type_names_the_expected_one():
    assert problem("export.model.processes=many") == (
        "export.model.processes=many: expected a whole number from 1 to 4096 (processes that "
        "convert in parallel)."
    )


def test_wrong_choice_lists_the_choices():
    assert problem("export.model.weight_data_type=fp61") == (
        "export.model.weight_data_type=fp61 (did you mean fp16?): expected one of fp32, fp16, bf16 "
        "(stored type of the weights)."
    )


def test_too_small_number_names_the_limit():
    assert "from 1 to 4096" in problem("export.model.processes=0")


def test_an_empty_text_is_not_the_default():
    assert problem("deploy.executable=").startswith("deploy.executable=: is empty; leave it out")


def test_empty_path_is_not_the_current_folder():
    assert problem("base_results_dir=").startswith("base_results_dir=: is empty")


@pytest.mark.parametrize("choice", ["gpt3/samplo", "sample"])
def test_unknown_file_lists_the_files(choice):
    text = problem(f"export={choice}")
    assert "did you mean gpt3/sample?" in text
    assert "gpt3/export_gpt3" in text


@pytest.mark.parametrize("word", ["export=gpt3/samplo", "exprt=gpt3/sample"])
def test_without_the_file_that_was_meant_there_is_no_configuration(word):
    composition = compose(word, "export.model.processes=many")
    assert composition.config is None
    assert [text.partition(":")[0] for text in composition.problems] == [
        word, "export.model.processes=many",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "entries"),
    [
        ("stages", "export", "export"),
        ("stages", "'convert,export'", "convert,export"),
        ("evaluate.latency.batch_sizes", "8", "8"),
        ("container_mounts", "/a:/b", "/a:/b"),
    ],
)
def test_list_without_brackets_is_shown_with_them(key, value, entries):
    assert f"; write '{key}=[{entries}]'" in problem(f"{key}={value}")
    assert not compose(f"{key}=[{entries}]").problems


def test_fraction_for_a_whole_number_is_refused():
    """Folders are named by references to the text, which is another than that of 2."""
    assert "=2.0: expected a whole number" in problem("export.model.tensor_model_parallel_size=2.0")


def test_settings_of_hydra_are_refused_with_the_remedy():
    for word in ("hydra.run.dir=/x", "hydra/launcher=basic"):
        assert "--config-dir adds a folder of files" in problem(word)


def test_alternatives_are_refused_with_the_remedy():
    text = problem("export.model.tensor_model_parallel_size=1,2")
    assert text.endswith("=1,2 lists alternatives, which needs --multirun.")
    assert "; a list is written 'stages=[convert,export]'" in problem("stages=convert,export")
    assert "; a text with commas is written 'cluster.nodelist=\"a,b\"'" in problem(
        "cluster.nodelist=a,b"
    )
    assert "needs --multirun" in problem("export=gpt3/sample,gpt3/export_gpt3")


def test_the_text_of_a_choice_is_that_choice():
    config = compose("export.triton_deployment.int8_mode='1'").config
    assert config is not None
    assert config.export.triton_deployment.int8_mode == 1


def test_section_as_value_lists_its_keys():
    assert "export.model.processes" in problem("export.model=3")


@pytest.mark.parametrize(
    ("word", "reported"),
    [
        ("dry-run", "'dry-run' is not of the form key=value (did you mean dry_run=<value>?)."),
        ("convert", "'convert' is a stage; write 'stages=[convert]'."),
        ("zzz", "'zzz' is not of the form key=value."),
        ("=", "'=' has no key; write key=value, without spaces around the =."),
    ],
)
def test_word_without_a_value_is_answered_with_the_remedy(word, reported):
    assert problem(word) == reported


def test_unknown_key_with_a_plus_is_refused_too():
    assert "unknown key foo" in problem("+foo=1")


@pytest.mark.parametrize(
    ("word", "reported"),
    [
        ("+export.run.time_limit=5", "export.run.time_limit exists already; leave the + out"),
        ("+export=gpt3/sample", "export exists already; leave the + out: export=gpt3/sample"),
        ("~export", "export cannot be removed"),
        ("~export.run.time_limit", "export.run.time_limit cannot be removed"),
        ("export=null", "export=null: unknown configuration"),
        ("export=[]", "export=[]: unknown configuration"),
        (f"export={'x' * 5000}", f"export={'x' * 60}...{'x' * 20}: unknown configuration"),
        ("deploy=[default]", "deploy=[default]: unknown configuration"),
        ("export.run=null", "export.run=null: export.run is a section; set one of its keys"),
        ("cluster=null", "cluster=null: unknown configuration"),
        ("cluster=slrum", "cluster=slrum: unknown configuration (did you mean slurm?); use one of"),
        ("cluster.setup=null", "expected a list such as [a,b]"),
        ("stages=[convert", "'stages=[convert' cannot be read as key=value"),
        ("stages=[[convert]]", "stages=[[convert]]: expected a text"),
        ("cluster.kubernetes.node_selector={gpu:true}", "{gpu: true}: gpu: expected a text"),
        ("stages=", "stages=: expected a list such as [a,b]"),
        ("~env_vars.NCCL_DEBUGG", "~env_vars.NCCL_DEBUGG: env_vars has no NCCL_DEBUGG"),
        ("export@model=gpt3/sample", "@ is not supported; leave @model out"),
        ("cluster.comment=[a", "other values with [, { or spaces 'key=\"[a b]\"'"),
        ("cluster.gpus_per_node=0", "expected a whole number from 1 to 64 or null"),
        ("deploy.drain_s=nan", "expected a number from 0 to 2592000"),
        ("deploy.drain_s=inf", "expected a number from 0 to 2592000"),
        ("evaluate.boolq.prompt.task_id=-1", "expected a whole number from 0 to 2147483647"),
    ],
)
def test_strange_overrides_are_answered_with_the_remedy(word, reported):
    assert reported in problem(word)


def test_reference_that_leads_nowhere_is_named_with_its_key():
    text = problem("export.run.results_dir=${nope}")
    assert text.startswith("export.run.results_dir=${nope}: Interpolation key 'nope' not found; ")


def test_signs_that_change_nothing_are_understood():
    config = compose(
        "++export.run.time_limit=9", "+env_vars.A=1", "~env_vars.HF_HUB_OFFLINE"
    ).config
    assert config is not None
    assert config.export.run.time_limit == 9
    assert config.env_vars["A"] == 1
    assert "HF_HUB_OFFLINE" not in config.env_vars


@pytest.mark.parametrize(
    "word", ["++env_vars.A=1", "++evaluate.gate.x.min=1", "++convert.given.y=2"]
)
def test_free_names_are_no_problem_next_to_one(word):
    composition = compose(word, "export.model.processes=many")
    assert [text.partition("=")[0] for text in composition.problems] == ["export.model.processes"]


def test_all_problems_come_together_and_the_rest_is_composed():
    composition = compose(
        "export=gpt3/sample",
        "export.model.processes=many",
        "export.modl.processes=1",
        "export.model.tensor_model_parallel_size=4",
    )
    assert len(composition.problems) == 2
    assert composition.config is not None
    assert composition.config.export.model.tensor_model_parallel_size == 4


def test_files_may_be_chosen_after_keys_are_set():
    config = compose("export.model.processes=1", "export=gpt3/sample").config
    assert config is not None
    assert config.export.model.processes == 1


def test_relative_paths_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose("base_results_dir=./out", "export.model.checkpoint_path=a.nemo").config
    assert config is not None
    assert config.base_results_dir == tmp_path / "out"
    assert config.export.run.results_dir.is_relative_to(tmp_path / "out")
    assert config.export.model.checkpoint_path == tmp_path / "a.nemo"


def test_home_and_variables_in_paths_are_replaced(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("SCRATCH", "/scratch")
    config = compose("data_dir=~/data", "base_results_dir=$SCRATCH/r").config
    assert config is not None
    assert (config.data_dir, config.base_results_dir) == (Path("/h/data"), Path("/scratch/r"))


@pytest.mark.parametrize(
    ("path", "reported"),
    [("$NOWHERE/r", "$NOWHERE is not set"), ("~nobody7/r", "the user does not exist")],
)
def test_paths_that_lead_nowhere_are_refused(path, reported):
    text = problem(f"base_results_dir={path}")
    assert text.startswith(f"base_results_dir={path}: {reported}; give the path")


def test_a_folder_has_one_name_however_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose("base_results_dir=runs/../runs").config
    assert config is not None
    assert config.base_results_dir == tmp_path / "runs"


def test_bounds_are_given_by_name():
    config = compose("evaluate.gate.lambada_last_word.min=0.5").config
    assert config is not None
    assert config.evaluate.gate["lambada_last_word"] == {"min": 0.5}


@pytest.mark.parametrize(
    "word",
    [
        "evaluate.gate={lambada_last_word: {min: 0.5, max: 0.9}}",
        "evaluate.gate={lambada_last_word:{min:0.5,max:0.9}}",
        "evaluate.gate.lambada_last_word={min: 0.5, max: 0.9}",
    ],
)
def test_bounds_are_given_as_a_mapping(word):
    found = compose(*read_arguments([word]).overrides, "++evaluate.gate.other.max=1")
    assert not found.problems
    assert found.config is not None
    assert found.config.evaluate.gate == {
        "lambada_last_word": {"min": 0.5, "max": 0.9},
        "other": {"max": 1},
    }


def test_saved_configuration_composes_to_itself(tmp_path):
    first = compose("export=gpt3/sample", "base_results_dir=/r")
    assert first.config is not None
    (tmp_path / "saved.yaml").write_text(repeatable(first.config))
    again = compose_config(["deploy.drain_s=5"], ConfigRoot(tmp_path, "saved.yaml"))
    assert not again.problems
    assert again.config is not None
    assert again.config.deploy.drain_s == 5
    assert dataclasses.replace(again.config, deploy=first.config.deploy) == first.config


def test_launcher_resolvers_are_registered():
    compose()
    made = OmegaConf.create(
        {"a": "${multiply:3,4}", "b": "${divide_ceil:9,8}", "c": "${divide_floor:9,8}"}
    )
    assert dict(made) == {"a": 12, "b": 2, "c": 1}


def test_the_evaluator_takes_the_schema_of_the_section():
    config = compose("evaluate.boolq.prompt.append_ids=[3]", "evaluate.limit=7").config
    assert config is not None
    options = EvaluationOptions(**vars(config.evaluate), data_dir=Path("data"))
    assert (options.limit, options.boolq.prompt.append_ids) == (7, [3])
    own = {each.name for each in dataclasses.fields(EvaluateSection)}
    assert set(TEXT_TASKS) <= own


@pytest.mark.parametrize(
    ("request_type", "names"),
    [(ConversionRequest, convert.KEYS), (RepositoryRequest, export.KEYS)],
)
def test_every_field_of_a_request_can_be_configured(request_type, names):
    known = set(KEYS)
    fields = {each.name for each in dataclasses.fields(request_type) if each.compare}
    assert fields == set(names)
    assert set(names.values()) <= known


def test_every_key_has_a_text():
    assert all(key.text for key in KEYS.values())


def test_every_configuration_file_describes_itself():
    for path in CONFIG_DIR.rglob("*.yaml"):
        assert path.read_text().startswith("# "), path


def test_wrong_keys_and_values_of_a_file_are_named_with_those_of_the_command(
    tmp_path,
):
    (tmp_path / "saved.yaml").write_text(
        "export: {modl: {}, model: {processes: many, weight_data_type: fp61}}\ndeploy: 3\n"
    )
    found = compose_config(["dry_run=2"], ConfigRoot(tmp_path, "saved"))
    for text in (
        "dry_run=2: expected true or false",
        "export.modl (in a configuration file): unknown key export.modl",
        "deploy (in a configuration file): deploy is a section",
        "export.model.processes=many: expected a whole number from 1 to 4096",
        "export.model.weight_data_type=fp61 (did you mean fp16?)",
    ):
        assert len([each for each in found.problems if each.startswith(text)]) == 1, text


def test_the_server_takes_the_section_with_one_range_for_each_option():
    config = compose("deploy.max_request_mb=1024", "deploy.openai.tokenizer=/t").config
    assert config is not None
    assert config.deploy.openai.tokenizer == Path("/t")
    server = server_config(config)
    assert {name: getattr(server, name) for name in vars(config.deploy)} == vars(config.deploy)
    assert server.access.max_request_bytes == 1 << 30
    assert "expected a whole number from 1 to 1024" in problem("deploy.max_request_mb=1025")
