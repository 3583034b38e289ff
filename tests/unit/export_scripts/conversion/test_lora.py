"""Adapters merged by a conversion: PEFT's against PEFT itself; those of NeMo that are refused."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save

from export_scripts.checkpoints.quantized import known_settings
from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.conversion.lora import peft_problems
from foundations.errors import CheckpointMismatchError
from tests.conversions import folder_of, refusal
from tests.json_files import read_json, write_json
from tests.looks import mentions
from tests.tiny import (
    rank_folder,
    torch_bytes,
    write_tar,
)
from tests.tiny_distributed import write_distributed
from tests.tiny_huggingface import copy_of, read_tensors, renamed
from tests.tiny_megatron_core import CORE, core_state, write_core
from tests.tiny_transformers import write_model
from tests.unit.export_scripts.checkpoints.test_bridge import MODEL, run_config, write_bridge
from tests.unit.export_scripts.checkpoints.test_sharded_huggingface import (
    TUNE,
    turned_rows,
)

Tensors = dict[str, torch.Tensor]
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shards(source: Path, out: Path, *lora: Path, kind: str = "fp32", tp_size: int = 2) -> Any:
    folder = folder_of(source, out, tp_size=tp_size, weight_data_type=kind, lora_checkpoints=lora)
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def assert_same(found: Any, expected: Any, kind: str = "fp32") -> None:
    """Compare shards; products summed in another order differ in the last bit."""
    assert found.keys() == expected.keys()
    dtype = KINDS[kind]
    for name, data in found.items():
        mine, theirs = (
            torch.frombuffer(bytearray(each), dtype=dtype) for each in (data, expected[name])
        )
        rtol = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-6)


def refused(source: Path, folder: Path, *lora: Path) -> str:
    return refusal(source, folder, tp_size=2, lora_checkpoints=lora)


def write_peft(folder: Path, base: Path, **settings: Any) -> Path:
    """Train nothing, but give every new parameter of an adapter a value; save it as PEFT does."""
    torch.manual_seed(len(folder.name))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                # Few bits: sums of products are exact in whatever order a library adds them.
                parameter.copy_(torch.randn_like(parameter).mul_(13).round_() / 64)
    adapted.save_pretrained(str(folder))
    return folder


@pytest.fixture
def base(tmp_path) -> Path:
    """Return a Llama."""
    return write_model("llama", tmp_path / "base")


@pytest.fixture
def adapter(base, tmp_path) -> Path:
    """Return an adapter of it."""
    return write_peft(tmp_path / "adapter", base, r=4, target_modules=["q_proj"])


def merge_by_peft(base: Path, folder: Path, *adapters: Path) -> Path:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for adapter in adapters:
        model = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.save_pretrained(folder)
    return folder


ALL_LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_each_setting_of_the_installed_peft_is_known_or_refused():
    usual = peft.LoraConfig().to_dict()
    assert peft_problems(usual, Path("adapter_config.json")) == []
    for name in usual.keys() - known_settings("peft"):
        changed = usual | {name: {"of": "next year"}}
        (problem,) = peft_problems(changed, Path("adapter_config.json"))
        assert f": {name} = " in problem


def tuned_in_place(base: Path, adapter: Path) -> Tensors:
    """Return the tensors of a model with its adapter, as PEFT wraps it while it trains."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    whole = peft.PeftModel.from_pretrained(model, adapter).state_dict()
    return {name: tensor.clone() for name, tensor in whole.items()}


@pytest.mark.parametrize("form", ["one file", "distributed"])
def test_an_adapter_beside_the_weights_is_merged(form, base, tmp_path):
    adapter = write_peft(
        tmp_path / "adapter", base, r=4, lora_alpha=7, use_rslora=True,
        target_modules=ALL_LLAMA[:4], modules_to_save=["lm_head"],
    )  # fmt: skip
    state = {"model": tuned_in_place(base, adapter), "optimizer": {"step": torch.tensor(3)}}
    run = tmp_path / "run"
    run.mkdir()
    if form == "one file":
        torch.save(state, run / "last.pt")
    else:
        save(state, checkpoint_id=run, no_dist=True)
    source = run / "last.pt" if form == "one file" else run

    def converted(name: str) -> Any:
        folder = folder_of(source, tmp_path / name, tp_size=2, model_config=base)
        return {path.name: path.read_bytes() for path in folder.glob("*.bin")}

    with pytest.raises(CheckpointMismatchError, match=r"no adapter_config\.json, which states"):
        converted("refused")
    shutil.copy(adapter / "adapter_config.json", run)
    merged = merge_by_peft(base, tmp_path / "merged", adapter)
    assert_same(converted("out"), shards(merged, tmp_path / "expected"))


def test_an_adapter_without_its_model_is_named_as_an_adapter(base, tmp_path):
    """As verl saves it with save_lora_only."""
    adapter = write_peft(
        tmp_path / "adapter", base, r=4, lora_alpha=7, target_modules=ALL_LLAMA[:4]
    )
    run = tmp_path / "actor"
    (run / "huggingface").mkdir(parents=True)
    shutil.copy(base / "config.json", run / "huggingface")
    whole = shutil.copytree(run, tmp_path / "whole")
    state = {name: each for name, each in tuned_in_place(base, adapter).items() if "lora_" in name}
    torch.save(state, run / "model_world_size_1_rank_0.pt")
    assert "is an adapter without its model" in refused(run, tmp_path)
    assert "no adapter_config.json, which states" in refused(base, tmp_path, run)
    (run / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 7}')
    torch.save({"model.norm.weight": torch.ones(3)}, whole / "model_world_size_1_rank_0.pt")
    assert "holds norm.weight, no factors of LoRA" in refused(base, tmp_path, whole)
    merged = merge_by_peft(base, tmp_path / "merged", adapter)
    assert_same(shards(base, tmp_path / "out", run), shards(merged, tmp_path / "expected"))


PEFT_CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "attention": ("llama", {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}),
    "every matrix": ("llama", {"r": 4, "lora_alpha": 7, "target_modules": ALL_LLAMA}),
    "rank-stabilised": (
        "qwen2", {"r": 3, "lora_alpha": 7, "use_rslora": True, "target_modules": ALL_LLAMA},
    ),
    "ranks of modules": (
        "mistral",
        {"r": 4, "lora_alpha": 8, "target_modules": ALL_LLAMA,
         "rank_pattern": {"model.layers.0.self_attn.q_proj": 2, "down_proj": 6},
         "alpha_pattern": {r"layers\.1\.mlp\.(up|gate)_proj": 3, "down_proj": 12}},
    ),
    "layers stored as (in, out)": (
        "gpt2", {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
    "trained biases": ("gpt2", {"r": 2, "target_modules": ["c_attn"], "bias": "all"}),
    "an embedding": ("llama", {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "a head saved whole": (
        "llama", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "magnitudes": (
        "llama",
        {"r": 4, "lora_alpha": 7, "target_modules": [*ALL_LLAMA, "embed_tokens"], "use_dora": True},
    ),
    "magnitudes of (in, out)": (
        "gpt2", {"r": 4, "target_modules": ["c_attn", "c_proj"], "use_dora": True},
    ),
    "fused heads": (
        "gptneox-parallel", {"r": 4, "target_modules": ["query_key_value", "dense_4h_to_h"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PEFT_CASES)
def test_a_folder_of_peft_is_merged_as_peft_merges_it(case, tmp_path):
    name, settings = PEFT_CASES[case]
    base = write_model(name, tmp_path / "base")
    adapter = write_peft(tmp_path / "adapter", base, **settings)
    merged = merge_by_peft(base, tmp_path / "merged", adapter)
    for kind in KINDS:
        out = tmp_path / kind
        found = shards(base, out / "f", adapter, kind=kind)
        assert_same(found, shards(merged, out / "e", kind=kind), kind)
        assert found != shards(base, out / "g", kind=kind)


def test_several_adapters_are_merged_in_order(base, tmp_path):
    one = write_peft(tmp_path / "one", base, r=4, target_modules=["q_proj", "up_proj"])
    head = write_peft(
        tmp_path / "another", base, r=8, target_modules=["q_proj"], modules_to_save=["lm_head"]
    )
    expected = shards(merge_by_peft(base, tmp_path / "merged", one, head), tmp_path / "e")
    assert_same(shards(base, tmp_path / "f", one, head), expected)


def test_stored_types_of_model_and_adapter_may_differ(base, tmp_path):
    adapter = write_peft(tmp_path / "adapter", base, r=4, target_modules=ALL_LLAMA)
    for folder, file in ((base, "model.safetensors"), (adapter, "adapter_model.safetensors")):
        narrow = {name: tensor.bfloat16() for name, tensor in load_file(folder / file).items()}
        save_file(narrow, folder / file, metadata={"format": "pt"})
    whole = merge_by_peft(base, tmp_path / "merged", adapter)
    expected = shards(whole, tmp_path / "e", kind="bf16")
    assert_same(shards(base, tmp_path / "f", adapter, kind="bf16"), expected, "bf16")


def test_torch_files_of_peft_are_read(base, adapter, tmp_path):
    expected = shards(base, tmp_path / "e", adapter)
    file = adapter / "adapter_model.safetensors"
    torch.save(load_file(file), adapter / "adapter_model.bin")
    file.unlink()
    assert shards(base, tmp_path / "f", adapter) == expected


def test_the_manifest_and_the_identity_know_the_adapters(base, adapter, tmp_path):
    request = ConversionRequest(base, tmp_path / "f", 2, "fp32", lora_checkpoints=(adapter,))
    done = convert(request)
    assert mentions(done.remarks, "took 2 low-rank updates")
    manifest = read_json(tmp_path / "f" / "2-gpu.manifest.json")
    assert [each["path"] for each in manifest["lora"]] == [str(adapter)]
    assert convert(request).already_done
    with pytest.raises(CheckpointMismatchError, match="another conversion"):
        shards(base, tmp_path / "f")
    file = adapter / "adapter_model.safetensors"
    save_file({name: 2 * t for name, t in load_file(file).items()}, file)
    with pytest.raises(CheckpointMismatchError, match="another conversion"):
        convert(request)


def edit(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    write_json(path, read_json(path) | changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "expected each of A, B, magnitude_vector"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication"),
        ({"of_next_year": {"a": 1}}, "of_next_year"),
        ({"r": 16}, "are of rank 4"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"rank_pattern": {"(a+)+$": 4}}, "not a pattern of modules"),
        ({"rank_pattern": {".*" * 30: 4}}, "not a pattern of modules"),
        ({"rank_pattern": {"(?i)Q_PROJ": 4}}, "not a pattern of modules"),
        ({"alpha_pattern": {"a?" * 30 + "a" * 30: 4}}, "not a pattern of modules"),
        ({"alpha_pattern": {"(a|a)" * 30: 4}}, "not a pattern of modules"),
        ({"rank_pattern": [4]}, "rank_pattern is not a table"),
        ({"lora_alpha": 10**400}, "is not a number"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(changes, named, base, adapter, tmp_path):
    edit(adapter, **changes)
    assert named in refused(base, tmp_path, adapter)


def test_adapters_of_other_models_are_refused_all_at_once(base, tmp_path):
    wide = write_model("llama", tmp_path / "wide", intermediate_size=48)
    other = write_model("gpt2", tmp_path / "other")
    first = write_peft(tmp_path / "first", wide, r=4, target_modules=["up_proj"])
    second = write_peft(tmp_path / "second", other, r=4, target_modules=["c_attn"])
    dora = write_peft(tmp_path / "dora", wide, r=4, target_modules=["up_proj"], use_dora=True)
    text = refused(base, tmp_path, first, second, dora)
    assert f"{dora}: model.layers.0.mlp.up_proj.weight is [56, 24]" in text
    assert "up_proj.weight is [56, 24], the adapter's factors are [4, 24] and [48, 4]" in text
    assert "c_attn.weight" in text
    assert "which the model does not have" in text


def test_factors_that_are_damaged_are_refused(base, adapter, tmp_path):
    file = adapter / "adapter_model.safetensors"
    whole = load_file(file)
    name = next(key for key in whole if key.endswith("lora_A.weight"))
    save_file({key: tensor for key, tensor in whole.items() if key != name}, file)
    assert "expected each of A, B" in refused(base, tmp_path, adapter)
    save_file(whole | {name: torch.full_like(whole[name], float("nan"))}, file)
    assert "not a number" in refused(base, tmp_path, adapter)
    file.write_bytes(file.read_bytes()[:-7])
    assert "truncated" in refused(base, tmp_path, adapter)
    file.unlink()
    assert "has no weights" in refused(base, tmp_path, adapter)
    torch.save(whole, adapter / "adapter_model.bin")
    (adapter / "mixlora_model.safetensors").touch()
    assert "a mixture of LoRA experts" in refused(base, tmp_path, adapter)


@pytest.mark.parametrize(
    ("kind", "use_dora"), [("llama", True), ("mistral", False), ("qwen2", False)]
)
def test_torchtune_s_own_adapter_is_merged_and_not_what_it_writes_as_peft_s(
    kind, use_dora, tmp_path
):
    """Torchtune's conversion changes the order of a Qwen2's rows, and leaves out use_dora."""
    base = write_model(kind, tmp_path / "base")
    adapter = write_peft(
        tmp_path / "adapter", base, r=4, target_modules=[*ALL_LLAMA, "lm_head"], use_dora=use_dora
    )
    expected = shards(merge_by_peft(base, tmp_path / "merged", adapter), tmp_path / "expected")
    heads = {} if kind == "qwen2" else {"q": 4, "k": 2}
    ours = load_file(adapter / "adapter_model.safetensors")
    own = {}
    for name, tensor in ours.items():
        turned = {} if "lora_A" in name else heads
        ((_, rows),) = turned_rows({name: tensor.reshape(len(tensor), -1)}, turned)
        own[name.removeprefix("base_model.model.")] = rows.reshape(tensor.shape)
    names = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "magnitude"}
    torch.save(renamed(own, TUNE | names), adapter / "adapter_model.pt")
    plain = {name: tensor.flip(0) for name, tensor in ours.items()}
    save_file(plain, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ALL_LLAMA}
    write_json(adapter / "adapter_config.json", settings)
    # AutoModel's folder has an adapter in model/.
    (tmp_path / "epoch_0").mkdir()
    adapter.rename(tmp_path / "epoch_0" / "model")
    assert_same(shards(base, tmp_path / "out", tmp_path / "epoch_0"), expected)
    adapter = tmp_path / "epoch_0" / "model"
    (adapter / "adapter_model.pt").unlink()
    if use_dora or kind == "qwen2":
        assert "copy its adapter_model.pt" in refused(base, tmp_path / "refused", adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"lacks adapter_config\.json, which states"):
        shards(base, tmp_path / "refused", adapter)


def test_trained_tables_saved_with_their_originals_are_merged(base, tmp_path):
    trained = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    adapter = write_peft(tmp_path / "adapter", base, r=4, **trained)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    saved = tmp_path / "saved"
    peft.PeftModel.from_pretrained(model, adapter).save_pretrained(
        str(saved), save_embedding_layers=True
    )
    assert mentions(load_file(saved / "adapter_model.safetensors"), ".original_module.")
    merged = merge_by_peft(base, tmp_path / "merged", saved)
    assert_same(shards(base, tmp_path / "out", saved), shards(merged, tmp_path / "expected"))


def test_no_change_of_a_matrix_is_lost_to_another_of_the_same_adapter(base, adapter, tmp_path):
    file = adapter / "adapter_model.safetensors"
    whole = load_file(file)
    wrapped = {
        key.replace("base_model.model.", "base_model.model.draft."): tensor * 2
        for key, tensor in whole.items()
    }
    save_file(whole | wrapped, file)
    text = refused(base, tmp_path, adapter)
    assert "changes model.layers.0.self_attn.q_proj.weight twice" in text
    assert "changes model.layers.1.self_attn.q_proj.weight twice" in text
    name = next(key for key in whole if key.endswith("lora_A.weight"))
    again = name.replace("lora_A.weight", "lora_A.default.weight")
    save_file(whole | {again: whole[name] * 2}, file)
    text = refused(base, tmp_path, adapter)
    assert str(file) in text
    assert f"{again} and {name}" in text or f"{name} and {again}" in text


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["c_attn"], "modules_to_save": ["wte"]},
        {"target_modules": ["wte"]},
        {"target_modules": ["lm_head"]},
    ],
)
def test_half_of_a_shared_table_is_changed_alone_where_the_head_is_apart(settings, tmp_path):
    base = write_model("gpt2", tmp_path / "base")
    adapter = write_peft(tmp_path / "adapter", base, r=4, **settings)
    assert "save the model with a separate head" in refused(base, tmp_path, adapter)
    head = read_tensors(base)["transformer.wte.weight"]
    config, tensors = {"tie_word_embeddings": False}, {"lm_head.weight": head}
    apart = copy_of(base, tmp_path / "apart", config=config, tensors=tensors)
    request = ConversionRequest(
        apart, tmp_path, 1, "fp32", output_format="huggingface", lora_checkpoints=(adapter,)
    )
    logits = []
    for folder, own in ((convert(request).ft_dir, None), (base, adapter)):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(model, own) if own else model
        with torch.no_grad():
            logits.append(model.eval()(torch.arange(3, 20)[None]).logits)
    torch.testing.assert_close(*logits)


# NeMo's layers by the ends of their names -> the adapter, the axis on which ranks cut its first
# factor, rows of its second one, columns of its first one (sizes of CORE).
CORE_LAYERS = {
    "self_attention.linear_qkv": ("self_attention.adapter_layer.lora_kqv_adapter", 0, 64, 24),
    "self_attention.linear_proj": (
        "self_attention.adapter_layer.lora_dense_attention_adapter", 1, 24, 32,
    ),
    "mlp.linear_fc1": ("mlp.adapter_layer.lora_hto4h_adapter", 0, 112, 24),
    "mlp.linear_fc2": ("mlp.adapter_layer.lora_4htoh_adapter", 1, 24, 56),
}  # fmt: skip
RANK, ALPHA = 4, 6


def core_factors(layer: str) -> tuple[torch.Tensor, torch.Tensor]:
    _, _, rows, columns = CORE_LAYERS[layer]
    return torch.randn(RANK, columns), torch.randn(rows, RANK)


def all_factors(prefix: str = "model.") -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(5)
    return {
        f"{prefix}decoder.layers.{i}.{layer}.weight": core_factors(layer)
        for i in range(2)
        for layer in CORE_LAYERS
    }


def write_nemo_adapter(
    path: Path,
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    *,
    tp: int,
    pp: int,
    **tuning: Any,
) -> Path:
    """Write NeMo 1's archive of an adapter, cut over ranks as its layers are."""
    members: dict[str, bytes] = {}
    settings = {"adapter_dim": RANK, "alpha": ALPHA} | tuning
    members["model_config.yaml"] = json.dumps(
        CORE
        | {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        | {"peft": {"peft_scheme": "lora", "lora_tuning": settings}}
    ).encode()
    for t in range(tp):
        for p in range(pp):
            state: Tensors = {}
            for name, (down, up) in factors.items():
                prefix, _, rest = name.removesuffix(".weight").partition("layers.")
                number, _, layer = rest.partition(".")
                if int(number) * pp // 2 != p:
                    continue
                adapter, axis, _, _ = CORE_LAYERS[layer]
                key = f"{prefix}layers.{int(number) % (2 // pp)}.{adapter}."
                halves = up.reshape(2, -1, RANK) if layer == "mlp.linear_fc1" else up[None]
                cut = halves.chunk(tp, 1)[t].reshape(-1, RANK)
                state[f"{key}linear_in.weight"] = down.chunk(tp, axis)[t].clone()
                state[f"{key}linear_out.weight"] = cut.clone()
            folder = rank_folder(t, p, tp=tp, pp=pp)
            members[f"{folder}/model_weights.ckpt".lstrip("/")] = torch_bytes(state)
    return write_tar(path, members)


def core_adapter(folder: Path, factors: Mapping[str, Any]) -> Path:
    """Write the distributed checkpoint of an adapter: layers stacked, the gate's halves apart."""
    tensors: Tensors = {}
    for layer in CORE_LAYERS:
        for side, end in enumerate(("linear_in", "linear_out")):
            parts = [factors[f"decoder.layers.{i}.{layer}.weight"][side] for i in range(2)]
            name = f"decoder.layers.{layer}.adapter.{end}.weight"
            if (layer, end) == ("mlp.linear_fc1", "linear_out"):
                for half, each in zip("wv", torch.stack(parts).chunk(2, 1), strict=True):
                    tensors[f"{name}_{half}"] = each
            else:
                tensors[name] = torch.stack(parts)
    return write_distributed(folder, tensors, common={"iteration": 3})


def bridge_adapter(folder: Path, factors: Mapping[str, Any], **changes: Any) -> Path:
    core_adapter(folder, factors)
    settings = {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": RANK, "alpha": ALPHA}
    (folder / "run_config.yaml").write_text(run_config(MODEL, peft=settings | changes))
    return folder


def nemo2_adapter(folder: Path, factors: Mapping[str, Any], **changes: Any) -> Path:
    core_adapter(folder / "weights", factors)
    (folder / "context").mkdir()
    settings = {"_target_": "nemo.collections.llm.peft.lora.LoRA", "dim": RANK, "alpha": ALPHA}
    model = {"_target_": "LlamaModel", "config": {"num_layers": 2}}
    text = yaml.safe_dump(model | {"model_transform": settings | changes})
    (folder / "context" / "model.yaml").write_text(text)
    return folder


@pytest.mark.parametrize("write", [bridge_adapter, nemo2_adapter])
def test_distributed_adapters_of_other_kinds_are_refused(write, tmp_path):
    state = {name.removeprefix("model."): tensor for name, tensor in core_state().items()}
    factors = all_factors("")
    base = write_bridge(tmp_path / "base", state)
    adapter = write(tmp_path / "iter_0000003", factors)
    assert "is an adapter" in refused(adapter, tmp_path)
    odd = write(tmp_path / "odd", factors, _target_="megatron.bridge.peft.dora.DoRA", alpha="x")
    text = refused(base, tmp_path, odd)
    assert "is trained with DoRA" in text
    assert "alpha = 'x' is not a number" in text


def test_nemo_s_other_schemes_are_refused(tmp_path):
    base = write_core(tmp_path / "base.nemo", core_state())
    adapter = write_nemo_adapter(
        tmp_path / "lora.nemo", all_factors(), tp=1, pp=1, weight_tying=True
    )
    assert "weight_tying" in refused(base, tmp_path, adapter)
    assert "no factors of LoRA" in refused(base, tmp_path, base)
