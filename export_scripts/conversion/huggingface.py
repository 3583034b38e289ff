"""The plan of a Hugging Face folder from any source, by the inverse of a Hugging Face mapping.

The source is planned as an FT folder of one rank. Each Hugging Face mapping of the family proposes
configurations, and reads them back: the first that describes the same architecture and the same
tensors is written. If there is none, the differences say what Hugging Face cannot express.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence

from export_scripts.checkpoints.base import (
    FLOATING_TYPES,
    CheckpointReader,
    Remarks,
    StoredTensor,
)
from export_scripts.conversion.ft_source import FT_FORMAT
from export_scripts.conversion.plan import FREE, Contents, ConversionPlan, differing_fields
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
from foundations.suggest import matches_any

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_GENERATION = "generation_config.json"
_TARGET = "Hugging Face"
# safetensors' names of types.
_TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "fp8": "F8_E4M3"}
_HEADS = ("model.lm_head.weight", "lm_head.weight")
_EMBEDDINGS = ("model.wte", "shared.weight_T")
# Keys of a source's config.json that are wrong for the new folder.
_NOT_KEPT = ("_name_or_path", "auto_map", "dtype", "quantization_config", "transformers_version")
# Keys whose new values always win. Whether a head is tied depends on values (in transformers 4, a
# T5's scaling depends on it); an OPT's narrow embedding is written in its full width.
_NEW = ("architectures", "tie_word_embeddings", "torch_dtype", "word_embed_proj_dim")
# Fields of an architecture that may differ: where the head is stored, and the number of tasks,
# which are left out.
_MAY_DIFFER = ("untied_head", "ia3_num_tasks")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# Keys of the longest sequence in sources whose family's config does not record it.
_POSITIONS = ("max-position-embeddings", "seq-length", "seq")
_LONGEST = "max_position_embeddings"
_USUAL_POSITIONS = 2048
_IA3 = ".ia3.weight"
# Keys in rope_parameters -> top-level keys before transformers 5.
_OLDER_ROTARY = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
}
# Models whose rotary scaling transformers 4 does not always compute -> what it does instead.
_NOT_IN_4 = {"nemotron": "ignores", "olmo2": "refuses", "phi3": "refuses"}


def plan_huggingface(source: ConversionPlan) -> ConversionPlan:
    """Return the plan of a Hugging Face folder from the plan of its source.

    The tokenizer's files are the source's, which `with_tokenizer` replaces.

    Raises:
        CheckpointMismatchError: Hugging Face has no equal model; every reason is listed.
    """
    mapping, config, tensors = choose_candidate(source, _TARGET, _configurations)
    tensors += carried_tensors(source, mapping)
    files, remarks = _other_files(source, mapping, config)
    plan = dataclasses.replace(source, extra_files=files, remarks=(*source.remarks, *remarks))
    return with_weights(plan, tensors)


def with_weights(plan: ConversionPlan, tensors: Sequence[WrittenTensor]) -> ConversionPlan:
    """Return the plan of a folder with these tensors, in shards with an index if need be."""
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
    """Return a problem for each prompt table and IA3 task, unless the user allows to omit it."""
    names = [f"prompt:{task.task_name}" for task in source.config.tasks]
    names += [f"ia3:{number}" for number in range(getattr(source.config, "ia3_num_tasks", 0))]
    return [
        f"{source.facts.reader.path}: {name} has no place in a {target} folder: serve it from "
        f"shards, or leave it out (--allow '{name}')"
        for name in names
        if not source.request.allows(name)
    ]


# (mapping, configuration to try, whether it is the source's own)
Candidates = Sequence[tuple[SourceMapping, Fields, bool]]


def choose_candidate(
    source: ConversionPlan, target: str, candidates: Callable[[ConversionPlan, bool], Candidates]
) -> tuple[SourceMapping, Fields, tuple[WrittenTensor, ...]]:
    """Return the mapping, configuration and tensors of the first candidate that fits a source.

    `candidates` takes the source, and whether its head is tied to the embedding.

    Raises:
        CheckpointMismatchError: None fits; the reasons against the nearest are listed.
    """
    refuse(_tuning_reasons(source, target))
    tried = []
    is_tied = has_tied_head(source)
    for mapping, config, is_own in candidates(source, is_tied):
        tensors, reasons, is_read = _try(source, mapping, config, is_tied, is_own=is_own)
        if not reasons:
            return mapping, config, tensors
        if not is_own:
            tried.append((not is_read, config.get("model_type", "decoder"), reasons))
    # The nearest candidate was read back, with the fewest differences.
    _, kind, reasons = min(tried, key=lambda each: (each[0], len(each[2])))
    path, has_shards = source.facts.reader.path, source.mapping.family.has_shards
    is_last = target != _TARGET or not has_shards
    remedy = "" if is_last else ": convert it to shards, which express it"
    raise CheckpointMismatchError(
        [
            *(f"{path} as a {target} {kind}: {reason}" for reason in reasons),
            f"{path} has no equal in {target}; the nearest is {kind}{remedy}",
        ]
    )


def inherited_settings(plan: ConversionPlan) -> Table:
    """Return the settings of the source's config.json, or of its origin's, for the new folder."""
    reader = plan.facts.reader
    own = reader.settings or reader.config
    if reader.settings or reader.format in ("huggingface", FT_FORMAT):
        return {key: value for key, value in own.items() if key not in _NOT_KEPT}
    stated = next((own[name] for name in _POSITIONS if isinstance(own.get(name), int)), None)
    return {} if stated is None else {_LONGEST: stated}


def written_mappings(source: ConversionPlan, form: str) -> list[SourceMapping]:
    """Return the mappings that write a source's family in a format."""
    return [
        mapping
        for mapping in SOURCE_MAPPINGS
        if mapping.family is source.mapping.family and mapping.written and mapping.format == form
    ]


def _configurations(source: ConversionPlan, is_tied: bool) -> Candidates:
    """Return every configuration to try.

    The first is the source's own, completed by the settings that it leaves to defaults, as releases
    of transformers differ in defaults and spellings. Next comes a new one with the source's other
    settings added, then a new one alone: a manifest can hold the settings of another model.
    """
    reader, inherited = source.facts.reader, inherited_settings(source)
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
            if mapping.name == origin and inherited.get("model_type") == whole["model_type"]:
                kept = _without_obstacles(source, mapping, inherited)
                new = {key: whole[key] for key in _NEW if key in whole}
                found.append((0, mapping, {**whole, **_older_spelling(kept, whole), **kept, **new}))
                # `whole` has it in the older spelling, which both releases read.
                kept.pop("rope_parameters", None)
                found.append((1, mapping, {**kept, **whole}))
            found.append((1 if mapping.name == origin else 2, mapping, whole))
    found.sort(key=lambda each: each[0])
    return [(mapping, written, order == 0) for order, mapping, written in found]


def _without_obstacles(source: ConversionPlan, mapping: SourceMapping, kept: Table) -> Fields:
    """Return settings without those that may change what is computed, unless allowed."""
    reader = CheckpointReader("huggingface", source.request.folder, kept, {}, ())
    found = mapping.obstacles(Facts(reader, 1, source.config.weight_data_type))
    allows = source.request.allows_setting
    return {key: value for key, value in kept.items() if key not in found or allows(key)}


def _older_spelling(kept: Table, whole: Table) -> Fields:
    """Return the numbers of a config.json's rope_parameters by their keys before transformers 5."""
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
    """Return whether the head has the embedding's values, or is missing."""
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


def _try(
    source: ConversionPlan, mapping: SourceMapping, config: Fields, is_tied: bool, *, is_own: bool
) -> tuple[tuple[WrittenTensor, ...], list[str], bool]:
    """Return a candidate's tensors, the reasons against it, and whether it could be read back.

    The source's own configuration must be the same in every field, others in the architecture.
    """
    folder, kind = source.request.folder, source.config.weight_data_type
    # Stands for a folder with the candidate's configuration; its tensors follow.
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
    tensors, reasons, unplaced = written_views(source, mapping, facts, is_tied)
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
        if name not in (FREE if is_own else _MAY_DIFFER)
    ]
    if unplaced and not reasons:
        reasons = [f"it has no tensor for {', '.join(unplaced)}"]
    if not reasons:
        _, problems = plan_tensors(mapping, facts, back, source.request, tp_size=1)
        reasons = [problem.removeprefix(f"{folder}: ") for problem in problems]
    return tensors, reasons, True


def written_views(
    source: ConversionPlan, mapping: SourceMapping, facts: Facts, is_tied: bool
) -> tuple[tuple[WrittenTensor, ...], list[str], tuple[str, ...]]:
    """Return a mapping's tensors, reasons against it, and the family's tensors without a place."""
    table = mapping.sources(facts, source.config)
    # If tensors are copied, all keep the source's names, which may lack transformers' prefix.
    own = source.facts if mapping is source.mapping and mapping.carried else None
    written: dict[str, dict[tuple[int, int], tuple[TensorPlan, View]]] = {}
    unplaced: dict[str, None] = {}
    entries = {}
    reasons = []
    for (spec, index, tensor), item in zip(
        mapping.family.expand(source.config), source.tensors, strict=True
    ):
        assert tensor == item.tensor
        if spec.name == PROMPT_TABLE or spec.name.endswith(_IA3):  # left out
            continue
        origin = table.get(spec.name)
        views = origin.views(tensor.shape, source.config) if origin else []
        if not views and not isinstance(origin, Compute):
            unplaced[spec.name] = None
        for pattern, view in views:
            key, _, entry = pattern.format(**index).partition(ENTRY)
            key = (own.resolve(key) or key) if own else key
            place = int(entry or 0), view.place
            if entry:  # one of a tensor's entries along its first axis
                view = dataclasses.replace(view, shape=(1, *view.shape))
                entries[key] = int(entry) + 1
            pieces = written.setdefault(key, {})
            if place in pieces and not is_tied:
                reasons.append(f"{key} would also hold {tensor.name}, whose values differ")
            pieces.setdefault(place, (item, view))
    tensors = (
        WrittenTensor(key, tuple(parts), parts[0][0].tensor.dtype, entries=entries.get(key, 0))
        for key, pieces in written.items()
        for parts in [[pieces[place] for place in sorted(pieces)]]
    )
    return tuple(tensors), reasons, tuple(unplaced)


def carried_tensors(source: ConversionPlan, mapping: SourceMapping) -> tuple[WrittenTensor, ...]:
    """Return the model's tensors outside of the family's layout, which are copied."""
    patterns = mapping.carried
    if not patterns:
        return ()
    if mapping is not source.mapping:
        absent = patterns[0].strip("*.")
        if source.request.allows(absent):
            return ()
        raise CheckpointMismatchError(
            f"{source.facts.reader.path} has only the layers of a {mapping.family.name}, without "
            f"its {absent}: convert the original checkpoint, or write the layers without the rest "
            f"(--allow {absent})"
        )
    facts = source.facts
    return tuple(
        copied_tensor(key, piece.shape)
        for key in facts.reader.tensors
        if matches_any(key, patterns)
        for piece in facts.pieces(key)[:1]
        if piece.dtype in FLOATING_TYPES
    )


def copied_tensor(key: str, shape: Shape) -> WrittenTensor:
    """Return the plan of a tensor that is copied from the source."""
    source = Copy(key) if shape else Flat(key)
    return WrittenTensor(key, ((TensorPlan(FTTensor(key, shape), source, {}), same(shape)),))


def grouped(
    tensors: Sequence[WrittenTensor], kind: str, max_bytes: int
) -> list[list[WrittenTensor]]:
    """Return the tensors of each file; a tensor larger than `max_bytes` gets a file alone."""
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
    """Return the plan of a safetensors file: the length of a JSON table (8 bytes), it, the tensors.

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
) -> tuple[Contents, Remarks]:
    """Return the files next to the weights, and remarks about them."""
    remarks = []
    key = mapping.positions
    if key is not None and key not in config:
        inherited = inherited_settings(source)
        config[key] = inherited.get(key, inherited.get(_LONGEST))
        if not isinstance(config[key], int):
            config[key] = _USUAL_POSITIONS
            remarks.append(
                f"the source does not record its longest sequence: {key} of config.json is "
                f"{_USUAL_POSITIONS}; change it there if the model was trained for another"
            )
    scaling, kind = config.get("rope_scaling") or {}, config["model_type"]
    # transformers 4 reads the short form (`type`) of the other models.
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
