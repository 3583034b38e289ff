"""The plan of a conversion: source mapping, config, and the source of each tensor.

Every problem that names and shapes show is collected and reported before a value is read; numpy is
not imported.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from export_scripts.checkpoints import open_checkpoint
from export_scripts.checkpoints.base import CheckpointReader, Files, Remarks, json_table, read_small
from export_scripts.checkpoints.pt_archive import read_torch_table
from export_scripts.checkpoints.quantized import with_plain_weights
from export_scripts.checkpoints.tokenizers import check_outside_files, given_files
from export_scripts.conversion.ft_source import FTFolder, is_ft_folder, open_ft_folder
from export_scripts.conversion.lora import with_adapters, with_own_adapter
from export_scripts.conversion.request import MODEL_TYPES, ConversionRequest
from export_scripts.conversion.tensor_plan import (
    TensorPlan,
    WrittenFile,
    WrittenTensor,
    plan_tensors,
)
from export_scripts.conversion.tiktoken import with_tiktoken
from export_scripts.conversion.vocabulary import with_vocabulary
from export_scripts.families.layout.config import FTConfig, ini_fields, parse_value
from export_scripts.families.mapping.prompts import added_tensors
from export_scripts.families.mapping.settings import generation_file, source_warnings
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.text_models import text_model
from export_scripts.families.table import SOURCE_MAPPINGS
from export_scripts.ft.config_ini import CONFIG_NAME, config_text
from export_scripts.ft.tokenizer_files import TOKENIZER_CHOICES, is_replaced, makes_tokenizer
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.json_content import Fields, Table

# Fields of a config that the request sets, or that config.json does not describe.
FREE = (
    "model_name", "name_or_path", "tensor_para_size", "weight_data_type", "tasks",
    "prompt_learning_start_id", "prompt_learning_type", "ia3_num_tasks",
)  # fmt: skip
# Matches the names of tensors of NeMo's and Megatron Bridge's adapters.
_ADAPTER = re.compile(r"\.adapter(_layer)?\.")
# Advice for a Hugging Face folder that cannot be converted.
_OTHER_ENGINES = "; another engine may serve it as it is (deploy.engine=vllm)"
# Keys of config.ini that the request sets.
_REQUESTED = {"tensor_para_size": "tp_size", "weight_data_type": "weight_data_type"}

# Special tokens of a config -> the consequence of an ID outside the vocabulary.
_NO_START = "generation needs a prompt to start from"
_NO_END = "every answer runs to its length limit"
_SPECIAL_TOKENS = {
    "start_id": _NO_START,
    "decoder_start_token_id": _NO_START,
    "end_id": _NO_END,
    "eos_token_id": _NO_END,
}


Contents = dict[str, bytes]  # by file name


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion, with everything but the values checked."""

    request: ConversionRequest
    mapping: SourceMapping
    facts: Facts
    config: FTConfig
    tensors: tuple[TensorPlan, ...]  # the family's tensors
    files: tuple[tuple[WrittenFile, ...], ...]  # files of weights; a tensor's files are one group
    extra_files: Contents  # name -> content of every other file
    remarks: Remarks  # warnings to report


def _shards(item: TensorPlan, config: FTConfig) -> tuple[WrittenFile, ...]:
    """Return the files of a tensor: one for each rank, or one for all if they share it."""
    tensor, tp_size = item.tensor, config.tensor_para_size
    kind = tensor.dtype or config.weight_data_type
    written = WrittenTensor(tensor.name, ((item, None),))
    size = tensor.file_bytes(tp_size, kind)
    return tuple(
        WrittenFile(name, (written,), kind, size, tp_rank=rank)
        for rank, name in enumerate(tensor.file_names(tp_size))
    )


def plan_conversion(
    request: ConversionRequest,
    *,
    scratch_dir: Path | None = None,
    reader: CheckpointReader | None = None,
) -> ConversionPlan:
    """Return the plan of a conversion whose request has no `request_problems`.

    Gzip archives are unpacked in `scratch_dir` while the plan is in use; `reader` is the
    checkpoint, if it is already open.

    Raises:
        CheckpointMismatchError: The checkpoint cannot be converted; every reason is listed.
        ValueError: The path is not a known checkpoint.
    """
    facts = _open(request, scratch_dir, reader)
    mapping, facts = find_mapping(facts, request.model_type)
    stated, problems = _stated_values(mapping.family.config, request)
    if request.keep_fp8:
        stated["fp8_group_size"] = facts.reader.fp8_group
    allowed, refused = mapping.judged_obstacles(facts, request.allows_setting)
    if problems := [*_refused(request, facts, mapping), *problems]:
        refuse([*problems, *facts.with_paths(refused)])
    config = dataclasses.replace(mapping.checked_config(facts, request.allows_setting), **stated)
    problems = _divisibility_problems(mapping, config, request)
    # If a size is not divisible, that is reported once, not for every tensor.
    tensors, tensor_problems = plan_tensors(
        mapping, facts, config, request, tp_size=1 if problems else request.tp_size
    )
    problems += tensor_problems
    extra_files = {name: read_small(file) for name, file in facts.tokenizer.items()}
    extra_files |= generation_file(facts, config)
    try:
        config.architecture()
        if request.has_shards:
            extra_files[CONFIG_NAME] = config_text(config).encode()
    except ValueError as error:
        problems += str(error).split("\n")
    problems += _tokenizer_problems(request, facts)
    refuse(problems)
    readers = (facts.reader, *facts.prompts, *facts.ia3, *facts.adapters)
    shards = tuple(_shards(item, config) for item in tensors) if request.has_shards else ()
    return ConversionPlan(
        request=request,
        mapping=mapping,
        facts=facts,
        config=config,
        tensors=tensors,
        files=shards,
        extra_files=extra_files,
        remarks=(
            *(note for reader in readers for note in reader.remarks),
            *allowed,
            *mapping.warnings(facts, config),
            *source_warnings(facts, config),
            *_special_token_warnings(config, request),
        ),
    )


def source_config(path: Path, given: Sequence[tuple[str, str]] = ()) -> FTConfig:
    """Return the config that a converted checkpoint would have.

    `given` are config.ini values that the checkpoint lacks.

    Raises:
        CheckpointMismatchError: The checkpoint cannot be converted.
        ValueError: The path is not a known checkpoint.
    """
    request = ConversionRequest(path, path.parent, 1, "fp32", given=tuple(given))
    mapping, facts = find_mapping(_open(request, None))
    refuse(mapping.reasons(facts))
    return mapping.checked_config(facts, lambda _: True)


def _special_token_warnings(config: FTConfig, request: ConversionRequest) -> list[str]:
    """Return a warning for each special token outside of the model's vocabulary."""
    fields = vars(config)
    size = fields.get("vocab_size", 0)
    return [
        f"{name} = {token} is outside the vocabulary of {size}: {consequence}; if it is not the "
        f"model's, state {request.names['given']} {name}=.."
        for name, consequence in _SPECIAL_TOKENS.items()
        if (token := fields.get(name)) is not None and not 0 <= token < size
    ]


def _tokenizer_problems(request: ConversionRequest, facts: Facts) -> list[str]:
    """Return a problem if the folder would lack the tokenizer that text models need."""
    names = request.names
    # The user may have added one to an existing folder.
    existing = request.folder.glob("*")
    if (
        not request.for_text
        or makes_tokenizer(facts.tokenizer)
        or makes_tokenizer(path.name for path in existing)
    ):
        return []
    return [
        f"{facts.reader.path} has no tokenizer ({TOKENIZER_CHOICES}), which text "
        f"models need; name its files in {names['vocab_path']} and {names['merges_path']}, or "
        f"do without these models: {names['for_text']}=false"
    ]


def _open(
    request: ConversionRequest, scratch_dir: Path | None, reader: CheckpointReader | None = None
) -> Facts:
    path, settings = request.checkpoint_path, request.model_config
    if is_ft_folder(path):
        if settings is not None or request.vocabulary is not None:
            raise ValueError(
                f"{path} holds shards: leave --model-config and --vocabulary out, or name the "
                "original checkpoint"
            )
        reader = open_ft_folder(path)
    else:
        reader = reader or open_checkpoint(
            path, scratch_dir=scratch_dir, name=request.checkpoint_name, settings=settings
        )
        reader = with_plain_weights(reader, request.allows_setting, keeps_fp8=request.keep_fp8)
        lora = request.lora_checkpoints
        reader = with_adapters(with_own_adapter(reader), lora, scratch_dir, request.allows_setting)

    def opened(paths: Sequence[Path]) -> tuple[Any, ...]:
        return tuple(open_checkpoint(path, base=reader, scratch_dir=scratch_dir) for path in paths)

    added = (request.prompt_checkpoints, request.ia3_checkpoints, request.adapter_checkpoints)
    prompts, ia3, adapters = map(opened, added)
    tokenizer = _tokenizer(request, reader)
    reader = with_vocabulary(reader, request.vocabulary, tokenizer)
    return Facts(
        reader=reader,
        tp_size=request.tp_size,
        weight_data_type=request.weight_data_type,
        given=dict(request.given),
        tokenizer=tokenizer,
        prompts=prompts,
        ia3=ia3,
        ia3_in_place=request.ia3_in_place,
        adapters=adapters,
        activation_ranges=_read_ranges(request.activation_ranges),
        extra=added_tensors(prompts, ia3, adapters),
    )


def _read_ranges(path: Path | None) -> Table | None:
    if path is None:
        return None
    if path.suffix == ".json":
        return json_table(path.read_bytes(), path)
    return read_torch_table(path, "a table of activation ranges")


def _tokenizer(request: ConversionRequest, reader: CheckpointReader) -> Files:
    given = given_files(request.vocab_path, request.merges_path)
    found = reader.tokenizer.items()
    kept = {name: file for name, file in found if not is_replaced(name, list(given))}
    check_outside_files(kept, reader.home)
    return with_tiktoken({**given, **kept}, reader.config)


def find_mapping(facts: Facts, model_type: str | None = None) -> tuple[SourceMapping, Facts]:
    """Return the source mapping of a checkpoint, and the facts for it.

    If a source can become several families, `model_type` is the one that the user expects.

    Raises:
        CheckpointMismatchError: No mapping matches the checkpoint.
    """
    if isinstance(facts.reader, FTFolder):
        return facts.reader.mapping, facts
    if facts.reader.settings and not facts.config:
        return _described_by_huggingface(facts)
    for key in ("model_type", "target"):
        if not isinstance(value := facts.config.get(key), str | None):
            raise CheckpointMismatchError(
                f"{facts.reader.path}: {key} = {value!r:.100} of its configuration is not a text"
            )
    facts = text_model(facts)
    candidates = [mapping for mapping in SOURCE_MAPPINGS if mapping.format == facts.reader.format]
    try:
        fitting = [
            mapping
            for mapping in candidates
            if mapping.matches(dataclasses.replace(facts, prefix=mapping.prefix))
        ]
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(facts.with_paths(error.problems)) from error
    kinds = MODEL_TYPES.get(model_type or "", (model_type,))
    wanted = [mapping for mapping in fitting if mapping.family.name in kinds]
    if fitting:
        mapping = (wanted or fitting)[0]
        return mapping, dataclasses.replace(facts, prefix=mapping.prefix)
    if adapter := next((key for key in facts.reader.tensors if _ADAPTER.search(key)), None):
        raise CheckpointMismatchError(
            f"{facts.reader.path} is an adapter (it holds {adapter}): expected its model, with a "
            "LoRA adapter in --lora (convert.lora_checkpoints)"
        )
    kind = facts.config.get("model_type") or facts.config.get("target") or "unknown"
    names = sorted(facts.reader.tensors)[:3]
    raise CheckpointMismatchError(
        f"{facts.reader.path} is a {facts.reader.format} checkpoint of an unknown architecture "
        f"(model type {kind}; tensors such as {', '.join(names) or 'none'}); known: "
        + "; ".join(mapping.title for mapping in candidates)
        + _OTHER_ENGINES * (facts.reader.format == "huggingface")
    )


def _described_by_huggingface(facts: Facts) -> tuple[SourceMapping, Facts]:
    """Return the source mapping and the facts of a Megatron model that a config.json describes.

    Its arguments are those with which Megatron-LM would build the model of config.json.

    Raises:
        CheckpointMismatchError: Megatron-LM has no such model, or the tensors are another model's.
    """
    reader = facts.reader
    described = dataclasses.replace(
        reader, format="huggingface", config=reader.settings, settings={}, tensors={}
    )
    origin, own = find_mapping(dataclasses.replace(facts, reader=described))
    refuse(origin.reasons(own))
    try:
        config = origin.config(own)
        candidates = [
            (mapping, args)
            for mapping in SOURCE_MAPPINGS
            if mapping.family is origin.family and mapping.format == reader.format
            if mapping.written
            for args in mapping.written(config, getattr(config, "tie_word_embeddings", False))
        ]
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(facts.with_paths(error.problems)) from error
    tokens = {name: str(getattr(config, name)) for name in ("start_id", "end_id")}
    problems = [f"{reader.path}: Megatron-LM has no model that computes what {origin.title} does"]
    for mapping, args in candidates:
        found = dataclasses.replace(
            facts,
            reader=dataclasses.replace(reader, config=args, origin=origin.name),
            given={**tokens, **facts.given},
            prefix=mapping.prefix,
        )
        theirs = vars(mapping.config(found))
        problems = [
            f"{reader.path}: {name} is {value} by config.json, and {theirs[name]} by the tensors: "
            "name the config.json of this model (--model-config, convert.model_config)"
            for name, value in differing_fields(vars(config), theirs).items()
            if name not in (*FREE, "vocab_size")
        ]
        if not problems:
            return dataclasses.replace(mapping, obstacles=lambda _: origin.obstacles(own)), found
    raise CheckpointMismatchError(problems)


def differing_fields(mine: Table, theirs: Table) -> Fields:
    """Return the values of `mine` that differ in `theirs`, floats by more than rounding."""
    return {
        name: value
        for name, value in mine.items()
        if not (
            math.isclose(value, theirs[name], rel_tol=1e-11)
            if isinstance(value, float) and isinstance(theirs[name], float)
            else value == theirs[name]
        )
    }


def _refused(request: ConversionRequest, facts: Facts, mapping: SourceMapping) -> list[str]:
    names, path = request.names, facts.reader.path
    problems = mapping.reasons(facts)
    if isinstance(facts.reader, FTFolder) and request.has_shards:
        problems.append(
            f"{path} is a folder of shards, which cannot be converted to other shards: convert its "
            "checkpoint, or a Hugging Face folder made from the shards"
        )
    if isinstance(facts.reader, FTFolder) and request.lora_checkpoints:
        problems.append(
            f"{path} is a folder of shards, whose names do not match a LoRA adapter's: write it as "
            "a Hugging Face folder first, and merge the adapters into that"
        )
    if request.has_shards and not mapping.family.has_shards:
        problems.append(
            f"{path} is a {mapping.family.name}, which has no folder of shards: write it as a "
            f"Hugging Face folder ({names['output_format']}=huggingface) and serve that with vLLM "
            "(deploy.engine=vllm)"
        )
    if request.keep_fp8:
        reasons = {
            "LoRA adapters are merged into wider weights": bool(request.lora_checkpoints),
            "only shards can hold them": not request.has_shards,
            "the checkpoint has none, or of several forms": not facts.reader.fp8,
            f"{mapping.family.name} folders cannot hold them": "fp8_group_size"
            not in get_type_hints(mapping.family.config),
        }
        problems += [
            f"{names['keep_fp8']}: weights in FP8 cannot be kept: {reason}; leave it out"
            for reason, holds in reasons.items()
            if holds
        ]
    added = {
        "prompt": request.prompt_checkpoints,
        "ia3": request.ia3_checkpoints,
        "adapter": request.adapter_checkpoints,
        "activation_ranges": request.activation_ranges,
    }
    problems += [
        f"{mapping.title} does not support {kind.replace('_', ' ')} add-ons in its "
        f"{mapping.family.name} folders"
        for kind, value in added.items()
        if value and kind not in mapping.accepts
    ]
    kinds = MODEL_TYPES.get(request.model_type or "", (request.model_type,))
    if request.model_type is not None and mapping.family.name not in kinds:
        problems.append(
            f"{names['model_type']}={request.model_type}, but {path} is a {mapping.family.name} "
            "model"
        )
    return problems


def _stated_values(config: type[FTConfig], request: ConversionRequest) -> tuple[Fields, list[str]]:
    """Return the config.ini values that the user states, and their problems."""
    names = request.names
    hints = get_type_hints(config)
    fields = {field.name for field in ini_fields(config)}
    values = {}
    problems = []
    for key, text in request.given:
        if key in _REQUESTED:
            problems.append(f"{names['given']} {key}={text}: use {names[_REQUESTED[key]]}")
        elif key not in fields:
            known = ", ".join(sorted(fields - set(_REQUESTED)))
            problems.append(
                f"{names['given']} {key}={text}: not a key of this model's config.ini; known: "
                f"{known}"
            )
        else:
            try:
                values[key] = parse_value(text, hints[key])
            except ValueError as error:
                problems.append(f"{names['given']} {key}={text}: {error}")
    return values, problems


def _divisibility_problems(
    mapping: SourceMapping, config: FTConfig, request: ConversionRequest
) -> list[str]:
    """Return a problem for each size that the parallel sizes do not divide."""
    problems = []
    names, tp_size, pp_size = request.names, request.tp_size, request.pp_size
    model = f"{mapping.family.name} model {request.checkpoint_path.name}"
    # Stored sizes count: a folder may repeat heads so that ranks divide them.
    sizes = {
        name.removeprefix("stored_"): config.dim(name, {}) for name in mapping.family.divisible
    }
    odd = [f"{name}={size}" for name, size in sizes.items() if size % tp_size]
    if odd:
        problems.append(
            f"{names['tp_size']}={tp_size} does not divide {_listing(odd, 'and')} of {model}; "
            f"use {_listing(mapping.family.tp_sizes(config), 'or')}"
        )
    for placeholder, name in config.INDICES.items():
        size = len(config.index_values(placeholder))
        if size % pp_size:
            problems.append(
                f"{names['pp_size']}={pp_size} does not divide {name}={size} of {model}; "
                f"use {_listing([n for n in range(1, size + 1) if size % n == 0], 'or')}"
            )
    return problems


def _listing(items: Sequence[object], conjunction: str) -> str:
    found = [str(item) for item in items]
    return f" {conjunction} ".join(filter(None, (", ".join(found[:-1]), found[-1])))
