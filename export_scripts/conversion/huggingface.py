"""The plan of a Hugging Face folder: whatever the source, by the inverse of its family's mapping.

The source becomes tensors of the family as for a folder of one rank. A candidate configuration of
each Hugging Face mapping of the family is read back by that mapping: the first that describes
the same architecture and the same tensors holds, and what none can express is thereby named.
"""

import dataclasses
import fnmatch
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence

from export_scripts.checkpoints.base import (
    FLOATING_TYPES,
    CheckpointReader,
    StoredTensor,
)
from export_scripts.conversion.ft_source import FT_FORMAT
from export_scripts.conversion.plan import FREE, ConversionPlan, differing_fields
from export_scripts.conversion.tensor_plan import (
    TensorPlan,
    WrittenFile,
    WrittenTensor,
    plan_tensors,
)
from export_scripts.families.layout.decoder import PROMPT_TABLE
from export_scripts.families.layout.spec import FTTensor
from export_scripts.families.mapping.source_mapping import ENTRY, Facts, SourceMapping
from export_scripts.families.mapping.sources import Compute, Copy, Flat, View, same
from export_scripts.families.table import SOURCE_MAPPINGS
from export_scripts.numeric.dtypes import SOURCE_TYPES, Shape, item_size
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.json_content import Fields, Table, json_bytes

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_GENERATION = "generation_config.json"
_TARGET = "Hugging Face"
# safetensors' names of the types written.
_TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "fp8": "F8_E4M3"}
_HEADS = ("model.lm_head.weight", "lm_head.weight")
_EMBEDDINGS = ("model.wte", "shared.weight_T")
# Keys of a source's config.json that do not hold for the new folder.
_NOT_KEPT = ("_name_or_path", "auto_map", "dtype", "quantization_config", "transformers_version")
# Those that are the new folder's in any case. A tied head is a matter of values, and in a T5 of
# transformers 4 of scaling; an OPT's narrow embedding is written in its full width.
_NEW = ("architectures", "tie_word_embeddings", "torch_dtype", "word_embed_proj_dim")
# Fields of an architecture that decide where a head is stored, not what it computes; and one of
# tasks, which are left out.
_OF_A_HEAD = ("untied_head", "ia3_num_tasks")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# Spellings of the longest sequence in sources whose family's config does not record it.
_POSITIONS = ("max-position-embeddings", "seq-length", "seq")
_LONGEST = "max_position_embeddings"
_USUAL_POSITIONS = 2048
_IA3 = ".ia3.weight"
# Names in rope_parameters -> those next to it before transformers 5.
_OLDER_ROTARY = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
}
# Models of which transformers 4 does not compute every rotary scaling, and what it does with it.
_NOT_IN_4 = {"nemotron": "ignores", "olmo2": "refuses", "phi3": "refuses"}


def plan_huggingface(source: ConversionPlan) -> ConversionPlan:
    """Return the plan of the Hugging Face folder that a planned source becomes.

    The tokenizer's files are the source's, which `with_tokenizer` replaces.

    Raises:
        CheckpointMismatchError: Hugging Face has no model like it; every reason is listed.
    """
    mapping, config, tensors = chosen_form(source, _TARGET, _configurations)
    tensors += carried_tensors(source, mapping)
    files, remarks = _other_files(source, mapping, config)
    plan = dataclasses.replace(source, extra_files=files, remarks=(*source.remarks, *remarks))
    return with_weights(plan, tensors)


def with_weights(plan: ConversionPlan, tensors: Sequence[WrittenTensor]) -> ConversionPlan:
    """Return a plan with the files of its folder's weights."""
    shards = _shards(tensors, plan.config.weight_data_type, plan.request.max_shard_bytes)
    index = {}
    if len(shards) > 1:
        places = {tensor.key: shard.name for shard in shards for tensor in shard.tensors}
        size = sum(shard.size_bytes - len(shard.header) for shard in shards)
        index[INDEX_NAME] = json_bytes({"metadata": {"total_size": size}, "weight_map": places})
    others = {name: data for name, data in plan.extra_files.items() if name != INDEX_NAME}
    return dataclasses.replace(
        plan, files=tuple((shard,) for shard in shards), extra_files={**others, **index}
    )


def _tuning_reasons(source: ConversionPlan, target: str) -> list[str]:
    """Return what was tuned on top of a model, which a target cannot hold, and is not passed."""
    names = [f"prompt:{task.task_name}" for task in source.config.tasks]
    names += [f"ia3:{number}" for number in range(getattr(source.config, "ia3_num_tasks", 0))]
    return [
        f"{source.facts.reader.path}: {name} has no place in a {target} folder: serve it from "
        f"shards, or leave it out (--allow '{name}')"
        for name in names
        if not source.request.allows(name)
    ]


# Mappings with configurations to try, and whether each is the source's own.
Candidates = Sequence[tuple[SourceMapping, Fields, bool]]


def chosen_form(
    source: ConversionPlan, target: str, candidates: Callable[[ConversionPlan, bool], Candidates]
) -> tuple[SourceMapping, Fields, tuple[WrittenTensor, ...]]:
    """Return the first configuration that holds, after its mapping and before its tensors.

    `candidates` are asked with whether the head is the embedding.

    Raises:
        CheckpointMismatchError: None holds; the reasons of the nearest are listed.
    """
    refuse(_tuning_reasons(source, target))
    tried: list[tuple[bool, str, list[str]]] = []
    is_tied = has_tied_head(source)
    for mapping, config, is_own in candidates(source, is_tied):
        tensors, reasons, is_read = _tried(source, mapping, config, is_tied, is_own=is_own)
        if not reasons:
            return mapping, config, tensors
        if not is_own:
            tried.append((not is_read, config.get("model_type", "decoder"), reasons))
    # The nearest one's; the others differ in as much, or in what no setting says.
    _, kind, reasons = min(tried, key=lambda each: (each[0], len(each[2])))
    path, has_shards = source.facts.reader.path, source.mapping.family.has_shards
    is_last = target != _TARGET or not has_shards
    remedy = "" if is_last else ": convert it to shards, which express it"
    raise CheckpointMismatchError(
        [
            *(f"{path} as a {target} {kind}: {reason}" for reason in reasons),
            f"{path} has no equal in {target}, of which {kind} is nearest{remedy}",
        ]
    )


def kept_settings(plan: ConversionPlan) -> Table:
    """Return the settings that a new folder has of its source's config.json, or of one before."""
    reader = plan.facts.reader
    own = reader.settings or reader.config
    if reader.settings or reader.format in ("huggingface", FT_FORMAT):
        return {key: value for key, value in own.items() if key not in _NOT_KEPT}
    stated = next((own[name] for name in _POSITIONS if isinstance(own.get(name), int)), None)
    return {} if stated is None else {_LONGEST: stated}


def written_mappings(source: ConversionPlan, form: str) -> list[SourceMapping]:
    """Return the mappings by which a source's family is written in a format."""
    return [
        mapping
        for mapping in SOURCE_MAPPINGS
        if mapping.family is source.mapping.family and mapping.written and mapping.format == form
    ]


def _configurations(source: ConversionPlan, is_tied: bool) -> Candidates:
    """Return every configuration to try, after its mapping and before whether it is the source's.

    The source's own comes first, as it is but for settings that it leaves open: releases of
    transformers differ in defaults and spellings. Next comes one with only the source's settings
    that have no effect on what is computed here, then one without any: a manifest can hold those
    of another model.
    """
    reader, every = source.facts.reader, kept_settings(source)
    origin = reader.origin or source.mapping.name
    found = []
    for mapping in written_mappings(source, "huggingface"):
        assert mapping.written
        for written in mapping.written(source.config, is_tied):
            whole = {
                key: value
                for key, value in written.items()
                if value is not None or key in mapping.nulls
            }
            whole["torch_dtype"] = SOURCE_TYPES[source.config.weight_data_type][1]
            is_kind = mapping.name == origin and every.get("model_type") == whole["model_type"]
            if is_kind:
                kept = _without_obstacles(source, mapping, every)
                new = {key: whole[key] for key in _NEW if key in whole}
                found.append((0, mapping, {**whole, **_older_spelling(kept, whole), **kept, **new}))
                # Its meaning stands in the older spelling, which both releases read.
                kept.pop("rope_parameters", None)
                found.append((1, mapping, {**kept, **whole}))
            found.append((1 if mapping.name == origin else 2, mapping, whole))
    found.sort(key=lambda each: each[0])
    return [(mapping, written, order == 0) for order, mapping, written in found]


def _without_obstacles(source: ConversionPlan, mapping: SourceMapping, kept: Table) -> Fields:
    """Return settings without those that may change what is computed, unless they are passed."""
    reader = CheckpointReader("huggingface", source.request.folder, kept, {}, ())
    found = mapping.obstacles(Facts(reader, 1, source.config.weight_data_type))
    allows = source.request.allows_setting
    return {key: value for key, value in kept.items() if key not in found or allows(key)}


def _older_spelling(kept: Table, whole: Table) -> Fields:
    """Return the numbers in a config.json's rope_parameters by the names before transformers 5."""
    rotary = kept.get("rope_parameters")
    if not isinstance(rotary, Mapping):
        return {}
    return {
        older: rotary[name]
        for name, spellings in _OLDER_ROTARY.items()
        for older in spellings
        if older in whole and name in rotary
    }


def has_tied_head(source: ConversionPlan) -> bool:
    """Return whether the head has the values of the embedding."""
    items = {item.tensor.name: item for item in source.tensors}
    head, embedding = (
        next((items[name] for name in names if name in items), None)
        for names in (_HEADS, _EMBEDDINGS)
    )
    if head is None or embedding is None:
        return head is None
    if not (isinstance(head.source, Copy) and isinstance(embedding.source, Copy)):
        return False
    keys = head.source.key, embedding.source.key
    return keys[0] == keys[1] or source.facts.same_values(*keys)


def _tried(
    source: ConversionPlan, mapping: SourceMapping, config: Fields, is_tied: bool, *, is_own: bool
) -> tuple[tuple[WrittenTensor, ...], list[str], bool]:
    """Return a configuration's tensors, where it is another model, and whether it can be read.

    The source's own has to read back as the same in every field.
    """
    folder, kind = source.request.folder, source.config.weight_data_type
    # Weights are named as in a folder that states its configuration and holds no tensor.
    empty = CheckpointReader(mapping.format, folder, config, {}, (), is_distributed=True)
    tokens = {name: str(getattr(source.config, name, 0)) for name in ("start_id", "end_id")}
    facts = Facts(
        empty,
        tp_size=1,
        weight_data_type=kind,
        given=tokens if mapping.format != "huggingface" else {},
        prefix=mapping.prefix,
        tokenizer=source.facts.tokenizer,
    )
    tensors, reasons, homeless = written_views(source, mapping, facts, is_tied)
    pieces = {t.key: (StoredTensor(folder, 0, kind, t.shape),) for t in tensors}
    facts = dataclasses.replace(facts, reader=dataclasses.replace(empty, tensors=pieces))
    try:
        reasons = [*mapping.unsupported(facts), *reasons]
        back = mapping.config(facts)
        both = source.config, back
        mine, theirs = (vars(c) if is_own else dataclasses.asdict(c.architecture()) for c in both)
    except CheckpointMismatchError as error:
        return tensors, [*error.problems, *reasons], False
    reasons += [
        f"{name} is {value} in the model, and can only be {theirs[name]}"
        for name, value in differing_fields(mine, theirs).items()
        if name not in (FREE if is_own else _OF_A_HEAD)
    ]
    if homeless and not reasons:
        reasons = [f"it has no tensor for {', '.join(homeless)}"]
    if not reasons:
        _, problems = plan_tensors(mapping, facts, back, source.request, tp_size=1)
        reasons = [problem.removeprefix(f"{folder}: ") for problem in problems]
    return tensors, reasons, True


def written_views(
    source: ConversionPlan, mapping: SourceMapping, facts: Facts, is_tied: bool
) -> tuple[tuple[WrittenTensor, ...], list[str], tuple[str, ...]]:
    """Return the tensors as the mapping names them, reasons against it, and names without one."""
    table = mapping.sources(facts, source.config)
    # Tensors carried along keep their names, before which transformers' prefix may lack.
    own = source.facts if mapping is source.mapping and mapping.carried else None
    written: dict[str, dict[tuple[int, int], tuple[TensorPlan, View]]] = {}
    homeless: dict[str, None] = {}
    entries: dict[str, int] = {}
    reasons = []
    for (spec, index, tensor), item in zip(
        mapping.family.expand(source.config), source.tensors, strict=True
    ):
        assert tensor == item.tensor
        if spec.name == PROMPT_TABLE or spec.name.endswith(_IA3):  # which is left out
            continue
        origin = table.get(spec.name)
        views = origin.views(tensor.shape, source.config) if origin else []
        if not views and not isinstance(origin, Compute):
            homeless[spec.name] = None
        for pattern, view in views:
            key, _, entry = pattern.format(**index).partition(ENTRY)
            key = (own.resolve(key) or key) if own else key
            place = int(entry or 0), view.place
            if entry:  # One of those that follow each other in a tensor.
                view = dataclasses.replace(view, shape=(1, *view.shape))
                entries[key] = int(entry) + 1
            pieces = written.setdefault(key, {})
            if place in pieces and not is_tied:
                reasons.append(f"{key} would also stand for {tensor.name}, whose values differ")
            pieces.setdefault(place, (item, view))
    tensors = (
        WrittenTensor(key, tuple(parts), parts[0][0].tensor.dtype, entries=entries.get(key, 0))
        for key, pieces in written.items()
        for parts in [[pieces[place] for place in sorted(pieces)]]
    )
    return tuple(tensors), reasons, tuple(homeless)


def carried_tensors(source: ConversionPlan, mapping: SourceMapping) -> tuple[WrittenTensor, ...]:
    """Return the tensors that belong to the model and not to the family's layout."""
    patterns = mapping.carried
    if not patterns:
        return ()
    if mapping is not source.mapping:
        absent = patterns[0].strip("*.")
        if source.request.allows(absent):
            return ()
        raise CheckpointMismatchError(
            f"{source.facts.reader.path} has the layers of a {mapping.family.name} alone, "
            f"without its {absent}: convert the original checkpoint, or write the layers without "
            f"the rest (--allow {absent})"
        )
    facts = source.facts
    return tuple(
        copied_tensor(key, piece.shape)
        for key in facts.reader.tensors
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
        for piece in facts.pieces(key)[:1]
        if piece.dtype in FLOATING_TYPES
    )


def copied_tensor(key: str, shape: Shape) -> WrittenTensor:
    """Return a tensor that is written as the source has it."""
    source = Copy(key) if shape else Flat(key)
    return WrittenTensor(key, ((TensorPlan(FTTensor(key, shape), source, {}), same(shape)),))


def grouped(
    tensors: Sequence[WrittenTensor], kind: str, max_bytes: int
) -> list[list[WrittenTensor]]:
    """Return the tensors of each file; one that is larger than a file has its own."""
    groups: list[list[WrittenTensor]] = [[]]
    size = 0
    for tensor in tensors:
        own = math.prod(tensor.shape) * item_size(tensor.data_type or kind)
        if groups[-1] and size + own > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += own
    return groups


def _shards(
    tensors: Sequence[WrittenTensor], kind: str, max_shard_bytes: int
) -> tuple[WrittenFile, ...]:
    groups = grouped(tensors, kind, max_shard_bytes)
    names = [WEIGHTS_NAME]
    if (count := len(groups)) > 1:
        names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    return tuple(weights_file(name, group, kind) for name, group in zip(names, groups, strict=True))


def weights_file(name: str, tensors: Sequence[WrittenTensor], kind: str) -> WrittenFile:
    """Return a file: 8 bytes with the length of a JSON table, the table, the tensors.

    The widest types come first: readers need each value at a multiple of its size.
    """
    table: Fields = {"__metadata__": {"format": "pt"}}
    end = 0
    tensors = sorted(tensors, key=lambda tensor: -item_size(tensor.data_type or kind))
    for tensor in tensors:
        own = tensor.data_type or kind
        begin, end = end, end + math.prod(tensor.shape) * item_size(own)
        table[tensor.key] = {
            "dtype": _TYPES[own],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return WrittenFile(name, tuple(tensors), kind, len(header) + end, header)


def _other_files(
    source: ConversionPlan, mapping: SourceMapping, config: Fields
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the files next to the weights, and remarks about them."""
    remarks = []
    key = mapping.positions
    if key is not None and key not in config:
        kept = kept_settings(source)
        config[key] = kept.get(key, kept.get(_LONGEST))
        if not isinstance(config[key], int):
            config[key] = _USUAL_POSITIONS
            remarks.append(
                f"the source does not record its longest sequence: {key} of config.json is "
                f"{_USUAL_POSITIONS}; change it there if the model was trained for another"
            )
    scaling, kind = config.get("rope_scaling") or {}, config["model_type"]
    # The short form of the others is what it reads.
    if kind in _NOT_IN_4 and scaling and (kind == "nemotron" or "rope_type" in scaling):
        remarks.append(
            f"transformers 4 {_NOT_IN_4[kind]} the rope_scaling of this {kind}: load the folder "
            "with transformers 5"
        )
    files = {"config.json": json_bytes(config), **source.extra_files}
    tokens = {name: config[name] for name in _TOKENS if name in config}
    if tokens and _GENERATION not in files:
        files[_GENERATION] = json_bytes({"_from_model_config": True, **tokens})
    return files, tuple(remarks)
