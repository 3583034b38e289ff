"""A source and a folder made of it: what each tensor of the folder should hold.

The source is planned as for a conversion, and the plan is turned into the tensors of the folder by
the folder's own mapping: whoever wrote it, each stored tensor has its counterpart. Models of no
known family are compared by name, where both sides are Hugging Face folders.
"""

import contextlib
import dataclasses
import filecmp
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from export_scripts.checkpoints import open_checkpoint
from export_scripts.checkpoints.base import (
    FLOATING_TYPES,
    CheckpointReader,
    FileMaps,
    Piece,
    json_file,
    same_values,
)
from export_scripts.checkpoints.huggingface import (
    TIED_TABLES,
    index_huggingface,
    is_huggingface,
    snapshot_folder,
)
from export_scripts.checkpoints.quantized import (
    QUANTIZATION,
    SCALES_OF_ACTIVATIONS,
    quantization,
    with_plain_weights,
)
from export_scripts.checkpoints.sharded_huggingface import CONFIG_NAME
from export_scripts.conversion.ft_source import FTFolder, is_ft_folder, open_ft_folder
from export_scripts.conversion.huggingface import (
    carried_tensors,
    copied_tensor,
    has_tied_head,
    written_views,
)
from export_scripts.conversion.lora import with_adapters
from export_scripts.conversion.plan import ConversionPlan, find_mapping, plan_conversion
from export_scripts.conversion.request import OPTION_NAMES
from export_scripts.conversion.tensor_plan import TensorPlan, WrittenTensor
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.text_models import has_images
from export_scripts.numeric.arrays import to_float32
from foundations.errors import CheckpointMismatchError
from inference.certify.findings import DIFFERS, NOT_COMPUTED, UP_TO, Remark
from inference.certify.options import CertifySection, source_request

# From the tokenizer of a NeMo or Megatron source, whose files may be missing: the folder's values
# are used.
_TOKEN_IDS = ("start_id", "end_id", "decoder_start_token_id", "eos_token_id", "pad_id")
_USUAL_TOKENS = (("start_id", "0"), ("end_id", "0"))
TIE = "tie_word_embeddings"
UNREAD = "another file"
# Files of weights that libraries load, and of those the ones that they add to a model.
_ADAPTERS = ("adapter_model*.safetensors", "adapter_model*.bin")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", _ADAPTERS[1], "*.gguf", "consolidated*.pt*")
_FOR_PEOPLE = (
    ".*",
    "*.md",
    "mergekit_config.yml",
    "recipe.yaml",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    "*.png",
    "*.index.json",
)


def stored_type(piece: Piece) -> str:
    """Return the type of a tensor's values as stored; of packed integers, int and their bits."""
    values = piece.stored[0]
    if len(piece.stored) == 1 or values.dtype == "fp8":
        return values.dtype
    return f"int{round(8 * values.span_bytes / math.prod(piece.shape))}"


@dataclass(frozen=True)
class Folder:
    """The folder that is certified.

    Attributes:
        facts: its tensors, quantised ones widened, and its configuration.
        mapping: how its family stores them; None where no family is known.
        config: as its family reads it; None where it cannot be read.
        quantised: what it states of its quantisation.
        findings: problems of its files and its configuration.
    """

    facts: Facts
    mapping: SourceMapping | None
    config: FTConfig | None
    quantised: Mapping[str, Any] | None
    findings: tuple[Remark, ...]

    @property
    def reader(self) -> CheckpointReader:
        """Its tensors."""
        return self.facts.reader

    @property
    def path(self) -> Path:
        """The folder itself, of a model in a cache the snapshot."""
        return Path(self.reader.path)

    @property
    def is_shards(self) -> bool:
        """Whether it is a folder of shards, not a Hugging Face folder."""
        return isinstance(self.reader, FTFolder)

    def own_name(self, tensor: WrittenTensor) -> WrittenTensor:
        """Return a tensor under its name here, with or without the prefix of the family."""
        prefix = "" if self.mapping is None else self.mapping.prefix
        names = (self.facts.resolve(tensor.key), self.facts.resolve(prefix + tensor.key))
        return dataclasses.replace(tensor, key=names[0] or names[1] or tensor.key)

    @property
    def is_unread(self) -> bool:
        """Whether it states a quantisation, and none of its tensors is widened."""
        pieces = (each for several in self.reader.tensors.values() for each in several)
        return self.quantised is not None and not any(each.stored[1:] for each in pieces)

    def lacking(self) -> Iterator[str]:
        """Yield the tensors that its own configuration asks for, and that it does not hold."""
        if self.mapping is None or self.config is None or self.is_shards:
            return
        table = self.mapping.sources(self.facts, self.config)
        for spec, index, tensor in self.mapping.family.expand(self.config):
            if source := table.get(tensor.name) or table.get(spec.name):
                reads = TensorPlan(tensor, source, index).reads
                yield from (key for key, _ in reads if not self.facts.has(key))

    @property
    def data_type(self) -> str:
        """The floating type that most of its values have."""
        pieces = [each for several in self.reader.tensors.values() for each in several]
        kinds = {each.dtype for each in pieces if each.dtype in FLOATING_TYPES} or {"fp32"}
        return max(kinds, key=lambda kind: sum(p.span_bytes for p in pieces if p.dtype == kind))


@dataclass(frozen=True)
class Pair:
    """A source and a folder.

    Attributes:
        plan: of the source, as for a conversion; None where it has no family.
        facts: of the source.
        tensors: what the folder should hold.
        findings: what the source holds and the folder cannot.
    """

    folder: Folder
    plan: ConversionPlan | None
    facts: Facts
    tensors: tuple[WrittenTensor, ...]
    findings: tuple[Remark, ...]

    @property
    def config(self) -> FTConfig | None:
        """The source's configuration, as its family reads it."""
        return None if self.plan is None else self.plan.config

    @property
    def files(self) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """The files of both sides, with those of their tokenizers."""
        return tuple(  # type: ignore[return-value]
            tuple(dict.fromkeys((*facts.reader.files, *(r.path for r in facts.tokenizer.values()))))
            for facts in (self.facts, self.folder.facts)
        )


def open_folder(path: Path) -> Folder:
    """Open a folder of shards, or a Hugging Face folder whatever is wrong with its files.

    Raises:
        ValueError: it is neither, or has no weights.
    """
    if is_ft_folder(path):
        reader: CheckpointReader = open_ft_folder(path)
        problems: list[Remark] = []
    elif is_huggingface(path := snapshot_folder(path)):
        reader, found = index_huggingface(path)
        problems = [Remark(DIFFERS, "files", path.name, each) for each in found]
        problems += _ghosts(path, reader)
    else:
        raise ValueError(
            f"{path} holds neither config.json nor config.ini. FOLDER is a Hugging Face folder or "
            "one of shards: name a checkpoint of another format as SOURCE and the folder that it "
            "was made of as FOLDER; merge an adapter into its model before"
        )
    quantised, passed, stored = quantization(reader), list[str](), reader.tensors.keys()

    def is_noted(name: str) -> bool:
        passed.append(name)
        return True

    try:
        reader = with_plain_weights(reader, is_noted)
        is_plain = reader.tensors.keys() == stored and not isinstance(reader, FTFolder)
        if quantised is not None and is_plain:
            detail = "no tensor is quantised, and some libraries would quantise them"
            problems.append(Remark(DIFFERS, "quantisation", QUANTIZATION, detail))
    except CheckpointMismatchError as error:
        problems += [
            Remark(DIFFERS if " is missing" in p else NOT_COMPUTED, "quantisation", path.name, p)
            for p in error.problems
        ]
    problems += [
        Remark(NOT_COMPUTED, "quantisation", QUANTIZATION, f"{name} may change what is computed")
        for name in passed
    ]
    facts = Facts(reader, 1, "fp32", tokenizer=reader.tokenizer)
    mapping, config = None, None
    with contextlib.suppress(CheckpointMismatchError):
        mapping, facts = find_mapping(facts)
        facts = dataclasses.replace(facts, tp_size=_ranks(reader))
    try:
        config = None if mapping is None else mapping.config(facts)
    except CheckpointMismatchError as error:
        assert mapping is not None
        try:  # tokens, which are compared by themselves
            facts = dataclasses.replace(facts, given=dict(_USUAL_TOKENS))
            config = mapping.config(facts)
        except CheckpointMismatchError:
            problems += [Remark(DIFFERS, "config.json", path.name, p) for p in error.problems]
    return Folder(facts, mapping, config, quantised, tuple(problems))


def _ranks(reader: CheckpointReader) -> int:
    return max(map(len, reader.tensors.values()), default=1)


def _ghosts(path: Path, reader: CheckpointReader) -> Iterator[Remark]:
    """Yield the tensors that an index lists and no file holds, and the other way round."""
    for index in path.glob("*.index.json"):
        table = json_file(index).get("weight_map")
        if not isinstance(table, dict):
            continue
        for key in table:
            if key not in reader.tensors:
                status = UP_TO if key.endswith(TIED_TABLES) else DIFFERS
                yield Remark(status, "listed and not stored", key, f"{index.name} names it")
        if {path / str(name) for name in table.values()}.isdisjoint(reader.files):
            continue  # the index of other files
        for key in reader.tensors:
            if key not in table:
                detail = f"{index.name} lacks it, by which some libraries load"
                yield Remark(UP_TO, "stored and not listed", key, detail)


def _unread_files(
    reader: CheckpointReader, source: Path, weights: Sequence[str]
) -> Iterator[Remark]:
    """Yield files next to a side's that no part compares, but those copied from the source.

    Some libraries load those whose names fit the patterns of `weights`, and may read the others.
    """
    read = {*reader.files, *(region.path for region in reader.tokenizer.values())}
    for file in sorted(each for each in Path(reader.path).iterdir() if each.is_file()):
        own = source / file.name
        if file in read or any(map(file.match, _FOR_PEOPLE)):
            continue
        if any(map(file.match, weights)):
            detail = "weights next to those that were compared; some libraries load them"
            yield Remark(NOT_COMPUTED, "not compared", file.name, detail)
        elif not (own.is_file() and filecmp.cmp(own, file, shallow=False)):
            yield Remark(UP_TO, UNREAD, file.name, "some libraries may read it")


def _scales(source: Path, folder: Path) -> Iterator[Remark]:
    """Yield the scales of activations and caches, which are compared with a source's own alone.

    Without those, only values that no calibration gives are known to be wrong.
    """
    own, theirs = (
        index_huggingface(each)[0].tensors if is_huggingface(each) else {}
        for each in (folder, source)
    )
    maps = FileMaps()
    for key in filter(lambda name: name.endswith(SCALES_OF_ACTIVATIONS), own):
        if key not in theirs:
            values = to_float32(own[key][0].load(maps))
            is_scale = np.isfinite(values).all() and (values > 0).all()
            if is_scale or key.endswith("zero_point"):
                shown = " to ".join(f"{each:.3g}" for each in sorted({values.min(), values.max()}))
                detail = f"{shown}, and the source has no such scale"
                yield Remark(NOT_COMPUTED, "not compared", key, detail)
            else:
                yield Remark(DIFFERS, "changed", key, "a scale is a finite number above 0")
        elif not same_values(own[key], theirs[key], maps):
            yield Remark(DIFFERS, "changed", key, "it is not the source's")


def open_pair(
    folder: Path, options: CertifySection, given: Sequence[tuple[str, str]], *, scratch_dir: Path
) -> Pair:
    """Open both sides; gzip archives are unpacked in `scratch_dir` while the pair is in use.

    `given` are (config.ini key, value) pairs that the source does not state, as for a conversion.

    Raises:
        CheckpointMismatchError: the source cannot be read, or cannot become a model of the
            folder's family; every reason is listed.
        ValueError: a path is not a checkpoint.
    """
    own, original = open_folder(folder), snapshot_folder(Path(str(options.source)))
    findings = [*own.findings]
    if own.quantised is not None:
        findings += _scales(original, own.path)
    if not own.is_shards:
        findings += _unread_files(own.reader, original, _WEIGHTS)
    if is_huggingface(original) and original not in map(Path, options.lora):
        findings += _unread_files(index_huggingface(original)[0], original, _ADAPTERS)
    own = dataclasses.replace(own, findings=tuple(findings))
    are_both_huggingface = is_huggingface(original) and not own.is_shards
    if own.mapping is not None:
        try:
            return _planned(own, options, given, scratch_dir)
        except CheckpointMismatchError:  # of the same model, tensors are known by their names
            if not are_both_huggingface or _kind(original) != _kind(own.path):
                raise
    elif not are_both_huggingface:
        raise CheckpointMismatchError(
            f"{folder} is a model of no known family ({own.reader.config.get('model_type')}), "
            "which is compared with Hugging Face folders of the same names alone"
        )
    return _by_name(own, options, scratch_dir)


def _kind(folder: Path) -> Any:
    return json_file(folder / CONFIG_NAME).get("model_type")


def _planned(
    folder: Folder, options: CertifySection, given: Sequence[tuple[str, str]], scratch_dir: Path
) -> Pair:
    assert folder.mapping is not None
    request = source_request(
        options,
        (*_stated_tokens(Path(str(options.source)), folder), *given),
        output_dir=scratch_dir,
        tp_size=folder.facts.tp_size,
        weight_data_type=folder.data_type if folder.data_type != "fp64" else "fp32",
        model_type=folder.mapping.family.name,
        output_format="huggingface",
        names={**OPTION_NAMES, "model_type": f"the family of {folder.path}"},
    )
    plan = plan_conversion(request, scratch_dir=scratch_dir)
    facts = plan.facts
    # Two folders of one model of a library have most tensors under the same name.
    is_kin = not folder.is_shards and (
        facts.reader.config.get("model_type") == folder.reader.config.get("model_type")
    )
    shared = (key for key in folder.reader.tensors if is_kin and key in facts.reader.tensors)
    named = dict.fromkeys(shared)
    findings = [
        Remark(DIFFERS, "not in the folder", key, "the source holds it")
        for key in _unread(plan)
        if key not in named
    ]
    findings += [*_untied(plan), *_images(facts.reader, folder.reader)]
    if folder.is_shards:
        tensors = tuple(WrittenTensor(item.tensor.name, ((item, None),)) for item in plan.tensors)
        return Pair(folder, plan, facts, tensors, tuple(findings))
    views, reasons, homeless = written_views(
        plan, folder.mapping, folder.facts, has_tied_head(plan)
    )
    sides = (facts.reader, folder.reader)
    has_head = any(key.endswith(TIED_TABLES[5:]) for side in sides for key in side.tensors)
    is_tied = has_head and [each.config.get(TIE) is True for each in sides] == [False, True]
    if not has_tied_head(plan) and (reasons or is_tied):
        detail = "the folder says that embedding and head are one, and the source has two"
        findings.append(Remark(DIFFERS, "ties", TIE, detail))
    if len(named) < len(facts.reader.tensors):
        findings += [Remark(DIFFERS, "has no place in the folder", name) for name in homeless]
        try:
            views += carried_tensors(plan, folder.mapping)
        except CheckpointMismatchError as error:
            findings += [Remark(NOT_COMPUTED, "other tensors", "folder", p) for p in error.problems]
    expected = {each.key: each for each in map(folder.own_name, views)}
    found = (each for each in expected.values() if each.key in folder.reader.tensors)
    seen = {item for each in found for item in each.items}
    reads = (key for item in plan.tensors if item not in seen for key, _ in item.reads)
    lost = (key for key in reads if is_kin and key not in expected)
    for key in (*lost, *named):
        expected[key] = copied_tensor(key, facts.pieces(key)[0].shape)
    return Pair(folder, plan, facts, tuple(expected.values()), tuple(findings))


def _images(source: CheckpointReader, folder: CheckpointReader) -> Iterator[Remark]:
    """Yield that a side is a model of images and texts, of which the text model is compared."""
    names = [
        name
        for name, side in (("source", source), ("folder", folder))
        if side.format == "huggingface" and has_images(json_file(Path(side.path, CONFIG_NAME)))
    ]
    if names:
        status = NOT_COMPUTED if "folder" in names else UP_TO
        detail = "only the text model is compared, without tensors and settings of images"
        yield Remark(status, "not compared", "images", f"{' and '.join(names)}: {detail}")


def _stated_tokens(source: Path, folder: Folder) -> list[tuple[str, str]]:
    if is_huggingface(snapshot_folder(source)) or is_ft_folder(source):
        return [*folder.facts.given.items()]
    if folder.config is None:
        return list(_USUAL_TOKENS)
    fields = {field.name for field in dataclasses.fields(folder.config)}
    return [(name, str(getattr(folder.config, name))) for name in _TOKEN_IDS if name in fields]


def _unread(plan: ConversionPlan) -> Iterator[str]:
    """Yield the source's tensors of which a folder holds nothing."""
    facts, mapping = plan.facts, plan.mapping
    read = {key for item in plan.tensors for key, _ in item.reads}
    used = {facts.resolve(key) for key in (*read, *mapping.copies(facts, plan.config))}
    for key in facts.keys():  # noqa: SIM118 - not a mapping
        if key not in used and not mapping.is_ignored(key):
            yield key


def _untied(plan: ConversionPlan) -> Iterator[Remark]:
    """Yield that a source has two tables of tokens, and says that they are one."""
    facts = plan.facts
    items = (item for item in plan.tensors if item.tensor.name in ("model.wte", "shared.weight_T"))
    tables = [key for item in items for key, _ in item.reads]
    for key in plan.mapping.copies(facts, plan.config):
        for table in tables:
            if key.endswith(TIED_TABLES) and facts.has(key) and not facts.same_values(key, table):
                detail = "the source ties it to its embedding, from which it differs: which of "
                yield Remark(DIFFERS, "ties", key, f"{detail}them a library takes is its choice")


def _by_name(folder: Folder, options: CertifySection, scratch_dir: Path) -> Pair:
    reader = with_plain_weights(open_checkpoint(Path(str(options.source))), lambda _: True)
    reader = with_adapters(reader, [*map(Path, options.lora)], scratch_dir, lambda _: True)
    facts = Facts(reader, 1, "fp32", tokenizer=reader.tokenizer)
    tied = all(side.config.get(TIE) is True for side in (folder.reader, reader))
    tied = tied and any(key.endswith(TIED_TABLES) for key in folder.reader.tensors)
    tensors = tuple(
        copied_tensor(key, pieces[0].shape)
        for key, pieces in reader.tensors.items()
        if key in folder.reader.tensors or not (tied and key.endswith(TIED_TABLES))
    )
    return Pair(folder, None, facts, tensors, ())
