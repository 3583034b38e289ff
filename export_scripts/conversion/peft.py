"""Prompt tables and IA3 scalers of a source as PEFT adapters, each in a folder of its own.

Layout: peft, tuners/prompt_tuning/config.py, tuners/ia3/layer.py and utils/save_and_load.py.
"""

from collections.abc import Iterator
from typing import Any

from export_scripts.conversion.plan import ConversionPlan
from export_scripts.conversion.tensor_plan import TensorPlan, WrittenTensor
from export_scripts.families.layout.decoder import PROMPT_TABLE
from export_scripts.families.mapping.sources import View, same
from export_scripts.files.json_content import Fields

ADAPTERS = "adapters"
IA3 = ".ia3.weight"
_TASK_TYPES = {"t5": "SEQ_2_SEQ_LM", "t5_encoder": "FEATURE_EXTRACTION"}

# Its folder in that of the model, its adapter_config.json, and its tensors.
PeftAdapter = tuple[str, Fields, tuple[WrittenTensor, ...]]


def prompt_reasons(source: ConversionPlan) -> list[str]:
    """Return why prompts of a source have no form in PEFT, which puts a table before the text."""
    path = source.facts.reader.path
    if getattr(source.config, "has_prefix_prompts", False):
        return [
            f"{path}: its prompts are keys and values of every layer, which have no form in PEFT: "
            "serve them from shards"
        ]
    return [
        f"{archive.path}: task {template.get('taskname')!r} has its virtual tokens in "
        f"{parts} places of the prompt, and PEFT has them before it; serve it from shards, or "
        f"leave it out (--allow 'prompt:{template.get('taskname')}')"
        for archive in source.facts.prompts
        for template in archive.config.get("task_templates", ())
        if (parts := sum(map(bool, template.get("virtual_token_splits") or ()))) > 1
        and not source.request.allows(f"prompt:{template.get('taskname')}")
    ]


def peft_adapters(source: ConversionPlan) -> Iterator[PeftAdapter]:
    """Yield the adapters of a source: one for each prompt table and each IA3 task."""
    config: Any = source.config
    shared = {
        "task_type": _TASK_TYPES.get(source.mapping.family.name, "CAUSAL_LM"),
        "base_model_name_or_path": str(source.request.folder),
        "inference_mode": True,
    }
    items = {item.tensor.name: item for item in source.tensors}
    for name in (task.task_name for task in config.tasks):
        if source.request.allows(f"prompt:{name}"):
            continue
        table = items[PROMPT_TABLE.format(task=name)]
        rows, width = table.tensor.shape
        settings = {
            "peft_type": "PROMPT_TUNING",
            **shared,
            "num_virtual_tokens": rows,
            "token_dim": width,
            # The table comes before the encoder's text of a T5, and before no answer.
            "num_transformer_submodules": 1,
            "prompt_tuning_init": "RANDOM",
        }
        tensor = WrittenTensor("prompt_embeddings", ((table, same((rows, width))),))
        yield f"{ADAPTERS}/{name}", settings, (tensor,)
    modules = {"target_modules": ["k", "v", "wo"], "feedforward_modules": ["wo"]}
    for task in range(getattr(config, "ia3_num_tasks", 0)):
        tensors = tuple(_scaler(item, task) for name, item in items.items() if name.endswith(IA3))
        yield f"{ADAPTERS}/ia3_{task}", {"peft_type": "IA3", **shared, **modules}, tensors


def _scaler(item: TensorPlan, task: int) -> WrittenTensor:
    """Return the row of a task, (1, in) for an MLP and (out, 1) for keys and values."""
    module = item.tensor.name.removesuffix(IA3)
    width = item.tensor.shape[1]
    # That of an MLP acts on the input of its second matrix.
    end, shape = (".wo", (1, width)) if module.endswith("DenseReluDense") else ("", (width, 1))
    view = View(item.tensor.shape, (1,), shape, task)
    return WrittenTensor(f"base_model.model.{module}{end}.ia3_l", ((item, view),))
