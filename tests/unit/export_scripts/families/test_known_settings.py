"""Every setting of another library is computed with, has no effect, or is refused by name."""

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from export_scripts.checkpoints.base import CheckpointReader
from export_scripts.conversion.convert import convert
from export_scripts.families.mapping.huggingface import setting_table
from export_scripts.families.mapping.known_settings import (
    RELEASE,
    eleuther_obstacles,
    huggingface_obstacles,
    huggingface_table,
    library_table,
    megatron_obstacles,
)
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.families.table import SOURCE_MAPPINGS
from export_scripts.ft.validation import read_manifest
from foundations.errors import CheckpointMismatchError
from tests.conversions import folder_of, request_of
from tests.library_settings import huggingface_settings, megatron_settings
from tests.tiny_megatron_core import core_state, write_core


def test_every_setting_of_the_installed_megatron_core_is_known():
    release = importlib.metadata.distribution("megatron-core")
    found, table = megatron_settings(Path(str(release.locate_file("")))), library_table("megatron")
    assert len(found) > 200, f"megatron-core {release.version} keeps its settings elsewhere"
    assert not found.keys() - table.keys(), (
        f"megatron-core {release.version}: run python -m tests.library_settings"
    )
    changed = {
        name: values
        for name, values in found.items()
        if table[name].use in ("off", "dense", "t5", "experts-off", "mixture")
        and not any(each in table[name].values for each in (None, *values))
    }
    assert not changed, "a default of the library would be refused"


def test_every_setting_of_the_installed_transformers_is_known():
    table = huggingface_table()
    elsewhere = [
        f"{kind}: {name}"
        for kind, name in huggingface_settings()
        if name not in table[kind] and name not in table["*"]
    ]
    assert not elsewhere, "run python -m tests.library_settings huggingface"
    assert _release(transformers.__version__) <= RELEASE, "raise known_settings.RELEASE"


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


@pytest.mark.parametrize("version", [None, "4.57.6", "5.24.1", "5.25.0.dev0", "6.0"])
def test_another_type_s_setting_is_refused_of_a_release_that_is_not_known(version):
    config = {"model_type": "llama", "logits_scaling": 3.0, "transformers_version": version}
    reader = CheckpointReader("huggingface", Path("x"), config, {}, ())
    is_known = version is None or _release(version) <= RELEASE
    found = huggingface_obstacles(Facts(reader, 1, "fp32"))
    assert found.keys() == (set() if is_known else {"logits_scaling"})


PUBLISHED: dict[str, dict[str, Any]] = {
    "apertus": {"post_norm": False, "qk_norm": True},
    "hunyuan_v1_dense": {
        "cla_share_factor": 2, "org_vocab_size": 128167, "use_cla": False,
        "im_end_id": 5, "anyres_pooling_size": 2,
    },
    "ernie4_5": {"fuse_rms_norm": 1, "weight_share_add_bias": 1},
    "granitemoehybrid": {"normalization_function": "rmsnorm"},
    "mpt": {"init_config": {"name": "kaiming_normal_"}, "verbose": 0},
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_what_publishers_state_is_known_of_their_model_alone(kind):
    def refused(**settings: Any) -> set[str]:
        reader = CheckpointReader("huggingface", Path("x"), settings, {}, ())
        return set(huggingface_obstacles(Facts(reader, 1, "fp32")))

    own = PUBLISHED[kind]
    assert not refused(model_type=kind, **own)
    assert refused(model_type="llama", **own) == own.keys()
    turned = {name: not value for name, value in own.items() if type(value) is bool}
    assert refused(model_type=kind, **turned) == turned.keys()


def test_what_trainers_add_to_megatron_s_arguments_is_known():
    own = {
        "rollout_batch_size": 128,
        "sglang_mem_fraction_static": 0.7,
        "advantage_estimator": "grpo",
    }
    assert megatron_obstacles(own | {"router_policy": "cache_aware"}) == {}
    found = megatron_obstacles({"custom_model_provider_path": "mine.model", "sglangx": 1})
    assert found.keys() == {"custom_model_provider_path", "sglangx"}


def test_each_setting_has_a_use():
    core = list(library_table("megatron").values())
    uses = {known.use for known in core}
    assert uses == {"read", "none", "off", "dense", "t5", "experts", "experts-off", "mixture"}
    theirs = [known for settings in huggingface_table().values() for known in settings.values()]
    assert {known.use for known in theirs} == {"read", "none", "off"}
    assert all(
        known.reason for known in (*core, *theirs) if known.use.endswith(("off", "dense", "t5"))
    )


@pytest.mark.parametrize("kind", sorted(huggingface_table().keys() - {"*", "bert", "t5", "mt5"}))
def test_an_absent_setting_has_the_default_of_transformers(kind):
    whole = CONFIG_MAPPING[kind]().to_dict()
    rows = [row for row in setting_table("decoder") if row.kind in ("size", "count")]
    stated = {"model_type", *(name for row in rows for name in row.names.split())}
    if kind == "cohere":  # releases have another one
        stated.add("rope_parameters")
    missing: dict[str, dict[str, Any]] = {
        "glm4_moe": {"head_dim": 128},
        "deepseek_v2": {"num_experts_per_tok": 6},
        "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["attention"] * 32},
        "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2},
    }
    without_default: dict[str, Any] = dict(missing.get(kind, {}))
    if whole["bos_token_id"] is whole["eos_token_id"] is None:
        without_default["bos_token_id"] = 1
    whole |= without_default
    stated |= without_default.keys()
    bare = {name: value for name, value in whole.items() if name in stated}
    assert len(bare) < len(whole)
    configs = []
    for settings in (whole, bare):
        facts = Facts(CheckpointReader("huggingface", Path("x"), settings, {}, ()), 1, "fp32")
        mapping = next(each for each in SOURCE_MAPPINGS if each.matches(facts))
        configs.append(mapping.config(facts))
    assert configs[0] == configs[1]


@pytest.mark.parametrize("kind", sorted(huggingface_table().keys() - {"*"}))
def test_a_model_of_each_type_is_refused_for_one_setting_alone(kind):
    found = huggingface_settings().items()
    own = {name: values[0] for (each, name), values in found if each == kind and values}
    config = {**own, "model_type": kind, "is_causal": False, "of_next_year": 1, "use_cache": False}
    reader = CheckpointReader("huggingface", Path("x"), config, {}, ())
    assert huggingface_obstacles(Facts(reader, 1, "fp32")).keys() == {"is_causal", "of_next_year"}


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"qk_l2_norm": True, "hidden_dropout": 0.7, "fp8": "hybrid"}, {"qk_l2_norm"}),
        ({"a_setting_of_next_year": 1, "another": None}, {"a_setting_of_next_year"}),
        ({"a_setting_of_next_year": False}, {"a_setting_of_next_year"}),
        # Megatron Bridge 0.6, HybridModelProvider
        ({"mamba_chunk_size": 128, "mamba_num_groups": 8, "keep_mtp_spec_in_bf16": False}, set()),
        ({"softmax_type": "vanilla", "normalize_attention_scores": True}, set()),
        ({"moe_latent_size": 8, "use_mup": True}, {"use_mup"}),
    ],
)
def test_a_setting_is_known_or_refused(settings, refused):
    assert megatron_obstacles(settings).keys() == refused


@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
def test_a_parameter_of_rotary_positions_is_known_or_refused(table):
    given = {"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2], "finetuned": True}
    for nested, path in ((given, table), ({"full_attention": given}, f"{table}.full_attention")):
        config = {"model_type": "llama", table: nested}
        facts = Facts(CheckpointReader("huggingface", Path("x"), config, {}, ()), 1, "fp32")
        assert huggingface_obstacles(facts).keys() == {f"{path}.mrope_section"}


def test_what_stands_in_the_way_depends_on_the_layout():
    settings = {"window_size": [4, 0], "moe_latent_size": 8, "moe_router_topk": 4}
    assert megatron_obstacles(settings).keys() == {"window_size"}
    assert megatron_obstacles(settings, "dense") == {}
    assert megatron_obstacles(settings, "dense", "mixture").keys() == {"moe_latent_size"}


def test_a_setting_that_the_user_passes_is_remembered(tmp_path):
    source = write_core(tmp_path / "a.nemo", core_state(), of_next_year=3, and_another=True)
    with pytest.raises(CheckpointMismatchError) as caught:
        folder_of(source, tmp_path, allow_setting=("and_*",))
    (problem,) = caught.value.problems
    assert "of_next_year = 3" in problem
    assert "--allow-setting of_next_year" in problem
    assert not list(tmp_path.glob("*-gpu"))
    done = convert(request_of(source, tmp_path, allow_setting=("of_*", "and_another")))
    assert read_manifest(done.ft_dir)["allow_setting"] == ["of_*", "and_another"]
    assert sum("passed by --allow-setting" in remark for remark in done.remarks) == 2


@pytest.mark.parametrize("setting", ["use-mup", "sliding-window-width", "geglu", "of-next-year"])
def test_a_setting_of_gpt_neox_is_known_or_refused(setting):
    config = {setting: 8, "pos-emb": "rotary", "hidden-dropout": 0.1, "lr": 0.1}
    reader = CheckpointReader("eleuther", Path("x"), config, {}, ())
    assert eleuther_obstacles(Facts(reader, 1, "fp32")).keys() == {setting}
