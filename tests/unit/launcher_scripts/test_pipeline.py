"""Plans of a run: stages to run, finished ones, and problems; with the bundled model."""

import os
from pathlib import Path

import pytest

from launcher_scripts.configuration.arguments import read_arguments
from launcher_scripts.configuration.compose import compose_config
from launcher_scripts.configuration.evaluation_config import Context, known_facts
from launcher_scripts.configuration.server_config import server_config
from launcher_scripts.configuration.settings import CHECKOUT
from launcher_scripts.main import main
from launcher_scripts.pipeline import Plan, plan_pipeline, read_stages
from launcher_scripts.stage_table import STAGE_TABLE
from stages import STAGES
from stages.convert import ConvertStage, find_checkpoint
from stages.deploy import DeployStage
from tests.tiny_text_gpt2 import write_tiny_gpt2

SAMPLE = CHECKOUT / "examples" / "gpt_books_5m" / "gpt_books_5m.nemo"


def plan(results: Path, *words: str) -> Plan:
    given = ["export=gpt3/sample", f"base_results_dir={results}", *words]
    composition = compose_config(read_arguments(given).overrides)
    assert not composition.problems
    assert composition.config is not None
    return plan_pipeline(composition.config, Context())


def names(made: Plan) -> list[str]:
    return [each.name for each in made.to_run]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A results folder in which convert and export have been done."""
    results = tmp_path_factory.mktemp("finished")
    for each in plan(results, "stages=[convert,export]").to_run:
        each.stage()
    return results


def test_stages_come_in_pipeline_order_under_either_name():
    config = compose_config(["stages=[evaluation,conversion,export]"]).config
    assert config is not None
    assert read_stages(config.stages) == (["convert", "export", "evaluate"], [])


def test_launcher_knows_every_stage():
    assert list(STAGE_TABLE) == list(STAGES)


@pytest.mark.parametrize(
    ("words", "planned"),
    [
        ("stages=[export]", "convert export"),
        ("stages=[evaluate]", "convert export evaluate"),  # with a server of its own
        ("stages=[certify,export,deploy]", "convert certify export deploy"),
        ("stages=[certify] certify.serve=true", "convert export certify"),
        ("stages=[certify,deploy] certify.serve=true", "convert export certify deploy"),
        ("stages=[deploy] deploy.repository=s3://bucket/sample", "convert export deploy"),
        ("stages=[evaluate] evaluate.server=host:8001", "evaluate"),
        ("stages=[export] export.accuracy.enabled=true", "convert export evaluate"),
    ],
)
def test_missing_prerequisites_run_first(tmp_path, words, planned):
    assert names(plan(tmp_path, *words.split())) == planned.split()


def test_a_stage_that_was_not_asked_for_is_explained(tmp_path):
    made = plan(tmp_path, "stages=[export]")
    assert not made.problems
    (note,) = made.notes
    assert note.endswith("1/2-gpu, which is missing: convert runs first")


@pytest.mark.parametrize(
    ("words", "planned"),
    [
        ("stages=[certify,export]", "certify"),  # it changes nothing
        ("stages=[convert,export]", ""),
        ("stages=[convert,export] export.model.processes=1", ""),  # without effect on the bytes
        ("stages=[deploy]", "deploy"),
        ("stages=[export] export.triton_deployment.max_batch_size=8 overwrite=true", "export"),
    ],
)
def test_finished_work_is_not_done_again(finished, words, planned):
    made = plan(finished, *words.split())
    assert names(made) == planned.split()
    assert not any("differs from" in text for text in made.problems)
    assert all(each.reason.startswith("finished at ") for each in made.stages if not each.runs)


def test_another_configuration_stops_the_run_and_names_key_and_place(finished):
    folder = f"{finished}/gpt_books_5m/export_tp2_pp1_fp16_fp32"
    made = plan(
        finished,
        "stages=[export]",
        f"export.run.results_dir={folder}",
        "export.triton_deployment.max_batch_size=8",
    )
    text = "\n".join(made.problems)
    assert "export.triton_deployment.max_batch_size=8 differs from 64" in text
    assert f"{folder}/model_repo/fastertransformer/config.pbtxt" in text
    assert "overwrite=true" in text


def test_damaged_shards_are_not_taken_for_finished(tmp_path):
    stage = plan(tmp_path, "stages=[convert]").to_run[0].stage
    assert isinstance(stage, ConvertStage)
    stage()
    with (stage.request.folder / "model.wpe.bin").open("r+b") as file:
        file.truncate(100)
    (problem,) = plan(tmp_path, "stages=[export]").problems
    assert "model.wpe.bin has 100 bytes" in problem
    assert "overwrite=true" in problem


def test_each_setting_that_differs_from_converted_shards_is_reported_once(finished):
    shards = f"{finished}/gpt_books_5m/export_tp2_pp1_fp16_fp32/model_repo/fastertransformer"
    (problem,) = plan(
        finished,
        "stages=[convert]",
        "export.model.weight_data_type=fp32",
        f"export.triton_deployment.triton_model_dir={shards}",
    ).problems
    assert "export.model.weight_data_type=fp32 differs from fp16" in problem


def test_changed_checkpoint_is_noticed(tmp_path):
    source = tmp_path / "model.nemo"
    source.write_bytes(SAMPLE.read_bytes())
    words = ("stages=[convert]", f"export.model.checkpoint_path={source}")
    plan(tmp_path, *words).to_run[0].stage()
    assert names(plan(tmp_path, *words)) == []
    os.utime(source, (0, 0))
    made = plan(tmp_path, *words)
    assert any(f"{source} has changed since" in text for text in made.problems)


def test_problems_of_all_stages_come_together(tmp_path):
    made = plan(
        tmp_path,
        "export.model.tensor_model_parallel_size=3",
        "export.triton_deployment.triton_model_dir=/r/ensemble",
        "deploy.grpc_port=8000",
        "evaluate.lambada.data_path=/nowhere.jsonl",
    )
    text = "\n".join(made.problems)
    assert "tensor_model_parallel_size=3 does not divide head_num=8" in text
    assert "use 1, 2, 4 or 8" in text
    assert "ensemble" in text
    assert "the ports must differ" in text


def test_an_unreadable_time_limit_hides_no_other_problem(tmp_path, capsys):
    words = [
        "export=gpt3/sample",
        f"base_results_dir={tmp_path}",
        "export.run.time_limit=abc",
        "export.model.checkpoint_path=/nowhere.nemo",
        "deploy.time_limit=0",
        *(f"deploy.{each}_port=0" for each in ("http", "grpc", "metrics")),  # others may be in use
    ]
    assert main(words) == 2
    text = capsys.readouterr().err
    assert "export.run.time_limit=abc: not a time limit" in text
    assert "export.model.checkpoint_path=/nowhere.nemo does not exist" in text
    assert "deploy.time_limit=0: expected a minute to ten years" in text
    assert text.count("\n  - ") == 3  # and no further one of the limits that were not given


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("stages=[]", "stages is empty"),
        (
            "stages=[export,evauate]",
            "stages names 'evauate', which is not a stage (did you mean evaluate?); known stages: "
            "convert, certify, export, deploy, evaluate.",
        ),
        ("stages=[evaluate] evaluate.server=http://host:8000", "is not an address; write host:"),
        ("evaluate.lambada.data_path=/nowhere.jsonl", "/nowhere.jsonl is not a file"),
        ("export.model.checkpoint_path=/none.nemo", "export.model.checkpoint_path=/none.nemo does"),
        (
            "export.triton_deployment.pipeline_model_parallel_size=3",
            "pipeline_model_parallel_size=3 does not divide num_layer=4",
        ),
        ("deploy.engine=vllm convert.format=huggingface", "stages=[convert,deploy,evaluate]"),
        ("deploy.engine=vllm stages=[export]", "leave deploy.engine out."),
    ],
)
def test_what_cannot_run_is_named(tmp_path, words, named):
    assert any(named in text for text in plan(tmp_path, *words.split()).problems)


LORA = ("convert.format=peft", "convert.lora_checkpoints=[/a]", "deploy.engine=vllm")


def test_an_adapter_is_served_with_its_model(tmp_path):
    base = f"deploy.repository={tmp_path}"
    made = plan(tmp_path, *LORA, base, "stages=[deploy]")
    assert [each.name for each in made.stages] == ["convert", "deploy"]
    deploy = made.stages[1].stage
    assert isinstance(deploy, DeployStage)
    words = " ".join(deploy.config.command_line)
    folder = made.stages[0].stage.outputs()[0]
    assert folder.name == "peft"
    assert f"--enable-lora --lora-modules {deploy.config.model_name}={folder}" in words
    assert f"--served-model-name {deploy.config.model_name}-base" in words
    unranked = deploy.config.command_line
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 24}')
    assert deploy.config.command_line == [*unranked, "--max-lora-rank", "32"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("deploy.repository=/x", "+deploy.vllm.lora-modules=[a]"), "deploy.vllm.lora_modules"),
        (("export.model.tensor_model_parallel_size=2", "deploy.repository=/x"), "/x"),
    ],
)
def test_what_serves_no_adapter_is_refused(tmp_path, words, named):
    made = plan(tmp_path, *LORA, *words, "stages=[convert,deploy,evaluate]")
    assert [problem for problem in made.problems if named in problem]


def test_all_bounds_that_are_wrong_are_reported_at_once(tmp_path):
    made = plan(
        tmp_path,
        "++evaluate.gate={lambada_last_word: {max: x, min: nan, piared: 1}, lambada_perplexity: 7, "
        "typo: {min: 3}, lambada_last_token: {min: 2, max: 1}}",
    )
    assert [text for text in made.problems if text.startswith("evaluate.gate")] == [
        "evaluate.gate.lambada_last_word.max=x: expected a number.",
        "evaluate.gate.lambada_last_word.min=nan: expected a number.",
        "evaluate.gate.lambada_last_word.piared: there is no such bound (did you mean paired?); "
        "use min, max, paired.",
        "evaluate.gate.lambada_perplexity=7 is not a bound; write "
        "evaluate.gate.lambada_perplexity='no drop of more than 1 point at 95 %', "
        "evaluate.gate.lambada_perplexity.min=7, or .max.",
        "evaluate.gate.typo bounds a metric that is not measured; metrics of this run: "
        "lambada_last_word, lambada_last_token, lambada_perplexity, lambada_token_perplexity.",
        "evaluate.gate.lambada_last_token.min=2 is above evaluate.gate.lambada_last_token.max=1.",
    ]


@pytest.mark.parametrize(
    ("there", "asked"),
    [("results/checkpoints", "checkpoints"), ("checkpoints", "results/checkpoints")],
)
def test_both_habitual_checkpoint_folders_are_looked_into(tmp_path, there, asked):
    (tmp_path / there).mkdir(parents=True)
    assert find_checkpoint(tmp_path / asked) == tmp_path / there


def test_a_checkpoint_that_is_nowhere_keeps_its_name(tmp_path):
    assert find_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints"


@pytest.mark.parametrize("neighbour", ["last.ckpt", "mp_rank_00/", "model_config.yaml", "b.nemo"])
def test_folder_stands_for_the_only_archive_in_it(tmp_path, neighbour):
    folder = tmp_path / "results" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "a.nemo").touch()
    (folder / "notes.txt").touch()
    assert find_checkpoint(folder) == folder / "a.nemo"
    assert find_checkpoint(tmp_path / "checkpoints") == folder / "a.nemo"
    if neighbour.endswith("/"):
        (folder / neighbour).mkdir()
    else:
        (folder / neighbour).touch()
    assert find_checkpoint(folder) == folder


@pytest.fixture(scope="module")
def textless(tmp_path_factory) -> Path:
    """A checkpoint without its tokenizer, which lies in `files` next to it."""
    folder = write_tiny_gpt2(tmp_path_factory.mktemp("textless") / "model")
    files = folder.parent / "files"
    files.mkdir()
    for name in ("vocab.json", "merges.txt"):
        (folder / name).rename(files / name)
    return folder


def words_for(checkpoint: Path) -> tuple[str, ...]:
    return (f"export.model.checkpoint_path={checkpoint}", "stages=[export]")


def test_text_models_without_a_tokenizer_are_refused_with_the_keys_that_help(tmp_path, textless):
    (problem,) = plan(tmp_path, *words_for(textless)).problems
    assert f"{textless} has no tokenizer" in problem
    assert "convert.vocab_path and convert.merges_path" in problem
    assert "export.triton_deployment.ensemble=false" in problem


@pytest.mark.parametrize(
    "words",
    [
        ("export.triton_deployment.ensemble=false",),
        ("stages=[convert]",),
        ("convert.vocab_path={files}/vocab.json", "convert.merges_path={files}/merges.txt"),
    ],
)
def test_checkpoint_without_a_tokenizer_is_taken_where_none_is_needed_or_one_is_given(
    tmp_path, textless, words
):
    given = [word.format(files=textless.parent / "files") for word in words]
    kept = [word for word in words_for(textless) if not word.startswith(given[0].split("=")[0])]
    assert not plan(tmp_path, *kept, *given).problems


def test_tokenizer_may_be_put_among_converted_shards(tmp_path, textless):
    words = words_for(textless)
    stage = plan(tmp_path, words[0], "stages=[convert]").to_run[0].stage
    assert isinstance(stage, ConvertStage)
    stage()
    (problem,) = plan(tmp_path, *words).problems
    assert f"{stage.request.folder} holds no tokenizer" in problem
    for file in (textless.parent / "files").iterdir():
        (stage.request.folder / file.name).write_bytes(file.read_bytes())
    made = plan(tmp_path, *words)
    assert (made.problems, names(made)) == ([], ["export"])


def test_root_of_a_hugging_face_cache_stands_for_its_snapshot(tmp_path, textless):
    root = tmp_path / "models--org--name"
    (root / "snapshots").mkdir(parents=True)
    (root / "snapshots" / "abc").symlink_to(textless)
    made = plan(tmp_path / "results", f"export.model.checkpoint_path={root}", "stages=[convert]")
    assert not made.problems
    assert any(f"using {root}/snapshots/abc" in note for note in made.notes)


INT8 = "export.triton_deployment.int8_mode=1"
FOLDER = "convert.format=huggingface"


@pytest.mark.parametrize(
    ("words", "known"),
    [
        ([], ("TP 2 x PP 1", "fp16", "fp32", "pytorch")),
        ([INT8], ("TP 2 x PP 1", "int8, rounded from fp16", "fp32", "pytorch")),
        (["deploy.engine=vllm", FOLDER], ("TP 2 x PP 1", "fp16", "fp32", "vllm")),
        (
            ["deploy.engine=vllm", FOLDER, "+deploy.vllm.dtype=bfloat16"],
            ("TP 2 x PP 1", "fp16", "", "vllm"),
        ),
        (["deploy.engine=vllm", "deploy.repository=/models/x"], ("TP 2 x PP 1", "", "", "vllm")),
        (["deploy.engine=openai", FOLDER], ("", "", "", "openai")),
        (
            ["deploy.engine=vllm", FOLDER, "convert.fp8=channel"],
            ("TP 2 x PP 1", "fp8 by channel, fp16", "fp32", "vllm"),
        ),
        (["evaluate.server=node1:8001"], ("", "", "", "")),
    ],
)
def test_a_report_states_what_is_known_of_the_server(words, known):
    config = compose_config(["export=gpt3/sample", *words]).config
    assert config is not None
    facts = known_facts(config, server_config(config), Context())
    assert (facts.parallelism, facts.weights, facts.data_type, facts.engine) == known
    assert bool(facts.server) == any(word.startswith("evaluate.server") for word in words)
