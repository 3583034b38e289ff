"""A source and a converted folder: pair each tensor of the folder with its value in the source.

The source is planned as for a conversion, and the folder's own mapping turns the plan into the
tensors that the folder should hold, whichever program wrote it. Models of an unknown family are
compared by tensor name, if both sides are Hugging Face folders.
"""

import contextlib
import dataclasses
import filecmp
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    WidePiece,
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
from export_scripts.families.mapping.text_models import is_vision_language
from export_scripts.ft.tokenizer_files import makes_tokenizer
from export_scripts.numeric.arrays import to_float32
from foundations.errors import CheckpointMismatchError
from inference.certify.findings import DIFFERS, NOT_COMPUTED, UP_TO, Remark
from inference.certify.options import CertifySection, source_request

# Settings that a conversion takes from the tokenizer. A NeMo or Megatron source may lack the files
# of its tokenizer, so the folder's values are used.
_TOKEN_IDS = ("start_id", "end_id", "decoder_start_token_id", "eos_token_id", "pad_id")
_PLACEHOLDER_TOKENS = (("start_id", "0"), ("end_id", "0"))
TIE = "tie_word_embeddings"
OTHER_FILE = "another file"  # kind of a remark
# Patterns of weight files that libraries load: adapters, then all of them.
_ADAPTERS = ("adapter_model*.safetensors", "adapter_model*.bin", "adapter_model*.pt")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", *_ADAPTERS[1:], "*.gguf", "consolidated*.pt*")
# Vocabularies that only some libraries read, none of those with which texts are compared.
_VOCABULARIES = ("*.tiktoken", "tiktoken.model", "tekken.json", "*.spm")
# Files that do not affect a loaded model.
_IRRELEVANT_FILES = (
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


def keys_read(items: Iterable[TensorPlan]) -> Iterator[str]:
    """Yield the names of the source's tensors that some items of a plan read."""
    for item in items:
        yield from (key for key, _ in item.reads)


def pieces_of(reader: CheckpointReader) -> Iterator[Piece]:
    """Yield every piece of a checkpoint; a tensor has one for each rank that holds a part."""
    return itertools.chain.from_iterable(reader.tensors.values())


def stored_type(piece: Piece) -> str:
    """Return the stored type of a tensor; for packed integers "int" and the number of bits."""
    values = piece.stored[0]
    if len(piece.stored) == 1 or values.dtype == "fp8":
        return values.dtype
    return f"int{round(8 * values.span_bytes / math.prod(piece.shape))}"


@dataclass(frozen=True)
class Folder:
    """The folder that is certified.

    Attributes:
        facts: its tensors, with quantised ones widened, and its configuration.
        mapping: how its family stores tensors; None if the family is unknown.
        config: the family's view of its configuration; None if the family cannot read it.
        quantised: its quantisation settings; None if it states none.
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
        """The folder itself; for a model in the Hugging Face cache, its snapshot."""
        return Path(self.reader.path)

    @property
    def is_shards(self) -> bool:
        """Whether it is a folder of shards, not a Hugging Face folder."""
        return isinstance(self.reader, FTFolder)

    def with_stored_name(self, tensor: WrittenTensor) -> WrittenTensor:
        """Return a tensor under the name stored here, with or without the family's prefix."""
        prefix = "" if self.mapping is None else self.mapping.prefix
        names = (self.facts.resolve(tensor.key), self.facts.resolve(prefix + tensor.key))
        return dataclasses.replace(tensor, key=names[0] or names[1] or tensor.key)

    @property
    def is_undecoded(self) -> bool:
        """Whether it states a quantisation, but none of its tensors could be widened."""
        return self.quantised is not None and not any(
            piece.stored[1:] for piece in pieces_of(self.reader)
        )

    def missing_tensors(self) -> Iterator[str]:
        """Yield the tensors that its own configuration requires and that it does not hold."""
        if self.mapping is None or self.config is None or self.is_shards:
            return
        table = self.mapping.sources(self.facts, self.config)
        for spec, index, tensor in self.mapping.family.expand(self.config):
            if source := table.get(tensor.name) or table.get(spec.name):
                reads = TensorPlan(tensor, source, index).reads
                yield from (key for key, _ in reads if not self.facts.has(key))

    @property
    def data_type(self) -> str:
        """The floating-point type of most of its bytes."""
        pieces = [*pieces_of(self.reader)]
        kinds = {piece.dtype for piece in pieces if piece.dtype in FLOATING_TYPES} or {"fp32"}
        return max(kinds, key=lambda kind: sum(p.span_bytes for p in pieces if p.dtype == kind))


@dataclass(frozen=True)
class Pair:
    """A source and a folder.

    Attributes:
        plan: the source's conversion plan; None if its family is unknown.
        facts: the source's tensors and configuration.
        tensors: the tensors that the folder should hold.
        findings: content of the source that the folder cannot hold.
    """

    folder: Folder
    plan: ConversionPlan | None
    facts: Facts
    tensors: tuple[WrittenTensor, ...]
    findings: tuple[Remark, ...]

    @property
    def config(self) -> FTConfig | None:
        """The family's view of the source's configuration."""
        return None if self.plan is None else self.plan.config

    @property
    def files(self) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """The files of the source and of the folder, including those of their tokenizers."""
        return tuple(  # type: ignore[return-value]
            tuple(dict.fromkeys((*facts.reader.files, *(r.path for r in facts.tokenizer.values()))))
            for facts in (self.facts, self.folder.facts)
        )


def open_folder(path: Path) -> Folder:
    """Open a folder of shards or a Hugging Face folder; defects of its files become findings.

    Raises:
        ValueError: it is neither, or has no weights.
    """
    if is_ft_folder(path):
        reader: CheckpointReader = open_ft_folder(path)
        problems: list[Remark] = []
    elif is_huggingface(path := snapshot_folder(path)):
        reader, found = index_huggingface(path)
        problems = [Remark(DIFFERS, "files", path.name, each) for each in found]
        problems += _index_mismatches(path, reader)
    else:
        raise ValueError(
            f"{path} holds neither config.json nor config.ini. FOLDER is a Hugging Face folder or "
            "a folder of shards: name a checkpoint of another format as SOURCE, and the folder "
            "that it was made from as FOLDER; merge an adapter into its model before"
        )
    quantised, unknown, stored = quantization(reader), list[str](), reader.tensors.keys()

    def record_unknown(name: str) -> bool:
        unknown.append(name)
        return True

    try:
        reader = with_plain_weights(reader, record_unknown)
        is_plain = reader.tensors.keys() == stored and not isinstance(reader, FTFolder)
        if quantised is not None and is_plain:
            detail = "no tensor is quantised, and some libraries would quantise them"
            problems.append(Remark(DIFFERS, "quantisation", QUANTIZATION, detail))
        problems += _ignored(reader, quantised or {})
    except CheckpointMismatchError as error:
        problems += [
            Remark(DIFFERS if " is missing" in p else NOT_COMPUTED, "quantisation", path.name, p)
            for p in error.problems
        ]
    problems += [
        Remark(NOT_COMPUTED, "quantisation", QUANTIZATION, f"{name} may change what is computed")
        for name in unknown
    ]
    facts = Facts(reader, 1, "fp32", tokenizer=reader.tokenizer)
    mapping, config = None, None
    with contextlib.suppress(CheckpointMismatchError):
        mapping, facts = find_mapping(facts)
        ranks = max(map(len, reader.tensors.values()), default=1)
        facts = dataclasses.replace(facts, tp_size=ranks)
    try:
        config = None if mapping is None else mapping.config(facts)
    except CheckpointMismatchError as error:
        assert mapping is not None
        try:  # token ids may be the cause; `compare_generation` compares them
            facts = dataclasses.replace(facts, given=dict(_PLACEHOLDER_TOKENS))
            config = mapping.config(facts)
        except CheckpointMismatchError:
            problems += [Remark(DIFFERS, "config.json", path.name, p) for p in error.problems]
    return Folder(facts, mapping, config, quantised, tuple(problems))


def _ignored(reader: CheckpointReader, quantised: Mapping[str, Any]) -> Iterator[Remark]:
    """Yield quantised matrices that the settings leave out, which libraries load without scales."""
    stated = (quantised.get(name) or () for name in ("ignore", "modules_to_not_convert"))
    names = [name.strip(".") for name in itertools.chain.from_iterable(stated)]
    for key, (piece, *_) in reader.tensors.items():
        module = f".{key.removesuffix('weight')}"
        if isinstance(piece, WidePiece) and any(f".{name}." in module for name in names):
            yield Remark(DIFFERS, "quantised", key, f"{QUANTIZATION} leaves it out")


def _index_mismatches(path: Path, reader: CheckpointReader) -> Iterator[Remark]:
    """Yield tensors that an index lists and no file stores, and tensors that it does not list."""
    for index in path.glob("*.index.json"):
        table = json_file(index).get("weight_map")
        if not isinstance(table, dict):
            continue
        if {path / str(name) for name in table.values()}.isdisjoint(reader.files):
            yield Remark(UP_TO, OTHER_FILE, index.name, "it names files that were not read")
            continue
        for key in sorted(table.keys() - reader.stored_names):
            status = UP_TO if key.endswith(TIED_TABLES) else DIFFERS
            yield Remark(status, "listed and not stored", key, f"{index.name} names it")
        for key in sorted(reader.stored_names - table.keys()):
            detail = f"{index.name}, by which some libraries load, lacks it"
            yield Remark(UP_TO, "stored and not listed", key, detail)


def _unread_files(
    reader: CheckpointReader, source: Path, weights: Sequence[str]
) -> Iterator[Remark]:
    """Yield the files of one side that no part compares, except copies of the source's.

    Some libraries load files that match the patterns `weights`, or vocabularies; some may read the
    others.
    """
    read = {*reader.files, *(region.path for region in reader.tokenizer.values())}
    for file in sorted(filter(Path.is_file, Path(reader.path).iterdir())):
        original = source / file.name
        if file in read or any(map(file.match, _IRRELEVANT_FILES)):
            continue
        if any(map(file.match, weights)):
            detail = "weights next to those that were compared; some libraries load them"
            yield Remark(NOT_COMPUTED, "not compared", file.name, detail)
        elif original.is_file() and filecmp.cmp(original, file, shallow=False):
            continue
        elif any(map(file.match, _VOCABULARIES)):
            detail = "a vocabulary that some libraries read, and it is not the source's"
            yield Remark(NOT_COMPUTED, "not compared", file.name, detail)
        else:
            yield Remark(UP_TO, OTHER_FILE, file.name, "some libraries may read it")
    for pattern in () if makes_tokenizer(reader.tokenizer) else _VOCABULARIES:
        for file in source.glob(pattern):
            if not Path(reader.path, file.name).exists():
                yield Remark(DIFFERS, "missing", file.name, "the source's vocabulary")


def _scales(source: Path, folder: Path) -> Iterator[Remark]:
    """Yield scales of activations and caches that are not, or may not be, the source's.

    A scale that the source lacks cannot be compared; it is wrong if no calibration gives its value.
    """
    stored, originals = (
        index_huggingface(side)[0].tensors if is_huggingface(side) else {}
        for side in (folder, source)
    )
    maps = FileMaps()
    for key in filter(lambda name: name.endswith(SCALES_OF_ACTIVATIONS), stored):
        if key not in originals:
            values = to_float32(stored[key][0].load(maps))
            is_scale = np.isfinite(values).all() and (values > 0).all()
            if is_scale or key.endswith("zero_point"):
                shown = " to ".join(f"{end:.3g}" for end in sorted({values.min(), values.max()}))
                detail = f"{shown}, and the source has no such scale"
                yield Remark(NOT_COMPUTED, "not compared", key, detail)
            else:
                yield Remark(DIFFERS, "changed", key, "a scale is a finite number above 0")
        elif not same_values(stored[key], originals[key], maps):
            yield Remark(DIFFERS, "changed", key, "it is not the source's")


def open_pair(
    folder: Path, options: CertifySection, given: Sequence[tuple[str, str]], *, scratch_dir: Path
) -> Pair:
    """Open both sides.

    `given` are (config.ini key, value) pairs that the source does not state, as for a conversion.
    Gzip archives are unpacked in `scratch_dir`, which has to outlive the pair.

    Raises:
        CheckpointMismatchError: the source cannot be read, or cannot become a model of the
            folder's family; every reason is listed.
        ValueError: a path is not a checkpoint.
    """
    opened, source = open_folder(folder), snapshot_folder(Path(str(options.source)))
    findings = [*opened.findings]
    if opened.quantised is not None:
        findings += _scales(source, opened.path)
    if not opened.is_shards:
        findings += _unread_files(opened.reader, source, _WEIGHTS)
    if is_huggingface(source) and source not in map(Path, options.lora):
        findings += _unread_files(index_huggingface(source)[0], source, _ADAPTERS)
    opened = dataclasses.replace(opened, findings=tuple(findings))
    are_both_huggingface = is_huggingface(source) and not opened.is_shards
    if opened.mapping is not None:
        try:
            return _pair_by_plan(opened, options, given, scratch_dir)
        except CheckpointMismatchError:  # two models of one type can be paired by tensor name
            if not are_both_huggingface or _model_type(source) != _model_type(opened.path):
                raise
    elif not are_both_huggingface:
        raise CheckpointMismatchError(
            f"{folder} is a model of no known family ({opened.reader.config.get('model_type')}), "
            "which can only be compared with a Hugging Face folder that has the same tensor names"
        )
    return _pair_by_name(opened, options, scratch_dir)


def _model_type(folder: Path) -> Any:
    return json_file(folder / CONFIG_NAME).get("model_type")


def _pair_by_plan(
    folder: Folder, options: CertifySection, given: Sequence[tuple[str, str]], scratch_dir: Path
) -> Pair:
    assert folder.mapping is not None
    request = source_request(
        options,
        (*_token_settings(Path(str(options.source)), folder), *given),
        output_dir=scratch_dir,
        tp_size=folder.facts.tp_size,
        weight_data_type=folder.data_type if folder.data_type != "fp64" else "fp32",
        model_type=folder.mapping.family.name,
        output_format="huggingface",
        names={**OPTION_NAMES, "model_type": f"the family of {folder.path}"},
    )
    plan = plan_conversion(request, scratch_dir=scratch_dir)
    facts = plan.facts
    # Two Hugging Face folders of one model type store most tensors under the same name.
    is_same_type = not folder.is_shards and (
        facts.reader.config.get("model_type") == folder.reader.config.get("model_type")
    )
    stored = folder.reader.tensors if is_same_type else ()
    shared = dict.fromkeys(key for key in stored if key in facts.reader.tensors)
    findings = [
        Remark(DIFFERS, "not in the folder", key, "the source holds it")
        for key in _unused_tensors(plan)
        if key not in shared
    ]
    findings += [*_untied(plan), *_images(facts.reader, folder.reader)]
    if folder.is_shards:
        tensors = tuple(WrittenTensor(item.tensor.name, ((item, None),)) for item in plan.tensors)
        return Pair(folder, plan, facts, tensors, tuple(findings))
    views, reasons, unplaced = written_views(
        plan, folder.mapping, folder.facts, has_tied_head(plan)
    )
    sides = (facts.reader, folder.reader)
    has_head = any(key.endswith(TIED_TABLES[5:]) for side in sides for key in side.tensors)
    is_tied = has_head and [each.config.get(TIE) is True for each in sides] == [False, True]
    if not has_tied_head(plan) and (reasons or is_tied):
        detail = "the folder says that embedding and head are one, and the source has two"
        findings.append(Remark(DIFFERS, "ties", TIE, detail))
    if len(shared) < len(facts.reader.tensors):
        findings += [Remark(DIFFERS, "has no place in the folder", name) for name in unplaced]
        try:
            views += carried_tensors(plan, folder.mapping)
        except CheckpointMismatchError as error:
            findings += [Remark(NOT_COMPUTED, "other tensors", "folder", p) for p in error.problems]
    expected = {tensor.key: tensor for tensor in map(folder.with_stored_name, views)}
    found = (tensor for key, tensor in expected.items() if key in folder.reader.tensors)
    stored_items = {item for tensor in found for item in tensor.items}
    reads = keys_read(item for item in plan.tensors if item not in stored_items)
    lost = (key for key in reads if is_same_type and key not in expected)
    for key in (*lost, *shared):
        expected[key] = copied_tensor(key, facts.pieces(key)[0].shape)
    return Pair(folder, plan, facts, tuple(expected.values()), tuple(findings))


def _images(source: CheckpointReader, folder: CheckpointReader) -> Iterator[Remark]:
    """Yield a remark if a side is a vision-language model, whose text model alone is compared."""
    names = [
        name
        for name, side in (("source", source), ("folder", folder))
        if side.format == "huggingface"
        and is_vision_language(json_file(Path(side.path, CONFIG_NAME)))
    ]
    if names:
        status = NOT_COMPUTED if "folder" in names else UP_TO
        detail = "only the text model is compared, without tensors and settings of images"
        yield Remark(status, "not compared", "images", f"{' and '.join(names)}: {detail}")


def _token_settings(source: Path, folder: Folder) -> list[tuple[str, str]]:
    """Return token ids as config.ini settings, for a source that may lack its tokenizer."""
    if is_huggingface(snapshot_folder(source)) or is_ft_folder(source):
        return [*folder.facts.given.items()]
    if folder.config is None:
        return list(_PLACEHOLDER_TOKENS)
    fields = {field.name for field in dataclasses.fields(folder.config)}
    return [(name, str(getattr(folder.config, name))) for name in _TOKEN_IDS if name in fields]


def _unused_tensors(plan: ConversionPlan) -> Iterator[str]:
    """Yield the source's tensors that no tensor of the plan reads."""
    facts, mapping = plan.facts, plan.mapping
    read = (*keys_read(plan.tensors), *mapping.copies(facts, plan.config))
    used = {*map(facts.resolve, read)}
    for key in facts.keys():  # noqa: SIM118 - not a mapping
        if key not in used and not mapping.is_ignored(key):
            yield key


def _untied(plan: ConversionPlan) -> Iterator[Remark]:
    """Yield a remark for each head of a source that is stored, is said to be tied, and differs."""
    facts = plan.facts
    items = (item for item in plan.tensors if item.tensor.name in ("model.wte", "shared.weight_T"))
    tables = [*keys_read(items)]
    for key in plan.mapping.copies(facts, plan.config):
        for table in tables:
            if key.endswith(TIED_TABLES) and facts.has(key) and not facts.same_values(key, table):
                detail = (
                    "the source ties it to its embedding, but its values differ: libraries may "
                    "load either one"
                )
                yield Remark(DIFFERS, "ties", key, detail)


def _pair_by_name(folder: Folder, options: CertifySection, scratch_dir: Path) -> Pair:
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
