"""Compute both sides, each by the library that it is made for, and compare layer by layer."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from export_scripts.checkpoints.base import CheckpointReader
from export_scripts.conversion.convert import convert
from export_scripts.conversion.ft_source import is_ft_folder
from export_scripts.conversion.plan import ConversionPlan, plan_conversion
from export_scripts.conversion.request import ConversionRequest
from export_scripts.families.gpt.megatron import is_core
from export_scripts.ft.reader import FTReader
from inference.certify.activations import (
    TOKENS,
    ActivationDifference,
    Activations,
    ModelInputs,
    NoLibraryError,
    Place,
    Source,
    compare_activations,
    spread_ids,
)
from inference.certify.findings import DIFFERS, NOT_COMPUTED, Part, Remark
from inference.certify.huggingface import ANSWER_TOKENS, load_huggingface
from inference.certify.megatron import load_megatron
from inference.certify.mesh_transformer import load_mesh_transformer
from inference.certify.pair import Pair
from inference.certify.shards import run_shards
from inference.certify.tolerances import tolerance_of

NAME = "layers"
_COMPUTED_BYTES = 4  # of a weight: both sides are computed in fp32, one after the other
_LOGITS = Place("logits")
# Who computes the formats whose library is not run here.
_OTHERS: Mapping[str, str] = {
    "nemo": "NVIDIA's nemo_toolkit",
    "megatron": "Megatron-LM",
    "eleuther": "EleutherAI's gpt-neox",
}


@dataclasses.dataclass(frozen=True)
class Original:
    """The source, computed.

    Attributes:
        source: loaded by its library; None where shards made of it are computed.
        title: library and class.
    """

    title: str
    activations: Activations
    inputs: ModelInputs
    source: Source | None


def compare_layers(
    pair: Pair,
    *,
    data_type: str,
    tolerance: float | None,
    prompt_ids: tuple[int, ...],
    scratch_dir: Path,
) -> tuple[Part, Original | None]:
    """Compute both sides and compare every layer; also return the source, if it was computed.

    A folder of shards is computed in `data_type` by the code that serves it, everything else in
    fp32. A source whose library is not run here is converted in `scratch_dir`, and then computed.
    """
    if problem := _memory_problem(pair):
        return _failed("both", problem), None
    try:
        original = _original(pair, prompt_ids, scratch_dir)
    except (ValueError, OSError) as error:
        return _failed("source", str(error)), None
    try:
        title, found = _computed_folder(pair, original, data_type)
    except (ValueError, OSError) as error:
        return _failed("folder", str(error)), original
    if tolerance is None:
        kinds = [data_type, pair.folder.data_type, *["int8"] * (pair.folder.quantised is not None)]
        tolerance = tolerance_of(kinds)
    expected, found = _same_tokens(original.activations, found)
    try:
        rows = compare_activations(expected, found, tolerance=tolerance)
    except ValueError as error:
        return _failed("both", str(error)), original
    compared = f"{len(rows)} places of {original.title} and {title}"
    findings = tuple(_findings(rows))
    largest = max(row.relative for row in rows)
    up_to = (f"errors of layers up to {largest:.1e} of their largest value",) if largest else ()
    return Part(NAME, compared, findings, up_to, [_row(row) for row in rows]), original


def _failed(where: str, why: str) -> Part:
    return Part(NAME, "", (Remark(NOT_COMPUTED, "not computed", where, why),))


def _row(row: ActivationDifference) -> dict[str, object]:
    values = {"place": str(row.place), "max_abs": row.max_abs, "mean_abs": row.mean_abs}
    return {**values, "relative": row.relative, "deviates": row.deviates}


def _findings(rows: Sequence[ActivationDifference]) -> list[Remark]:
    """Return the first place that deviates, with the number of those behind it."""
    bad = [row for row in rows if row.deviates]
    return [
        Remark(
            DIFFERS,
            "first layer that differs",
            str(row.place),
            f"error {row.relative:.2e} of its largest value, {row.tolerance:.0e} is allowed; "
            f"{len(bad)} of {len(rows)} places differ",
        )
        for row in bad[:1]
    ]


def _memory_problem(pair: Pair) -> str:
    """Return that a model in fp32 is larger than the free memory."""
    readers: tuple[CheckpointReader, ...] = (pair.facts.reader, pair.folder.reader)
    needed = max(
        sum(math.prod(piece.shape) for pieces in reader.tensors.values() for piece in pieces)
        for reader in readers
    )
    free = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text("ascii").splitlines()
        if line.startswith("MemAvailable")
    )
    if (size := needed * _COMPUTED_BYTES) < free:
        return ""
    return f"a model in fp32 takes {size >> 30} GiB, and {free >> 30} GiB of memory are free"


def _original(pair: Pair, prompt_ids: tuple[int, ...], scratch_dir: Path) -> Original:
    """Compute the source.

    Raises:
        ValueError: neither its library nor shards of it can compute it.
    """
    try:
        source = load_source(pair)
    except NoLibraryError as error:
        if pair.plan is None:
            raise
        return _from_shards(pair, prompt_ids, scratch_dir, str(error))
    source = dataclasses.replace(source, vocab_size=_tokens(pair, source.vocab_size))
    inputs = source.default_inputs(prompt_ids)
    return Original(source.title, source.run(inputs), inputs, source)


def _tokens(pair: Pair, most: int) -> int:
    """Return how many tokens both sides know: one of them may be padded."""
    sizes = (vars(each or object).get("vocab_size") for each in (pair.config, pair.folder.config))
    return min(most, *(size for size in sizes if isinstance(size, int)), most)


def load_source(pair: Pair) -> Source:
    """Load a source by its own library, in fp32.

    Raises:
        NoLibraryError: The library is not installed, or is none of those that are run here.
        ValueError: The library cannot load the source.
    """
    plan, kind = pair.plan, pair.facts.reader.format
    if kind == "huggingface":
        return load_huggingface(pair.facts.reader.path, plan)
    assert plan is not None
    if kind == "jax":
        return load_mesh_transformer(plan)
    if not is_core(plan.facts):
        library = _OTHERS.get(kind, "its own library")
        raise NoLibraryError(f"{library}, which computes this {kind} checkpoint, is not run here")
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise NoLibraryError(
            "megatron-core, which computes this checkpoint, is not installed (pip install "
            "'megatron-core>=0.12')"
        )
    return load_megatron(plan)


def _from_shards(
    pair: Pair, prompt_ids: tuple[int, ...], scratch_dir: Path, reason: str
) -> Original:
    """Compute shards of the source by the code that serves them."""
    if pair.folder.is_shards and not is_ft_folder(pair.source):
        raise NoLibraryError(f"{reason}: the folder's shards have nothing to be compared with")
    shards = pair.source
    assert pair.plan is not None
    if not is_ft_folder(shards):
        request = dataclasses.replace(
            pair.plan.request, output_dir=scratch_dir, tp_size=1, output_format="fastertransformer"
        )
        shards = convert(dataclasses.replace(request, weight_data_type="fp32")).ft_dir
    reader = FTReader(shards)
    architecture = reader.config.architecture()
    most = getattr(architecture, "vocab_size", None)
    if most is None:
        raise NoLibraryError(f"{reason}: an encoder without embeddings cannot be computed alone")
    ids = prompt_ids or spread_ids(TOKENS, _tokens(pair, most))
    has_decoder = bool(getattr(architecture, "decoder_num_layer", 0))
    inputs = ModelInputs(ids, ids[:ANSWER_TOKENS] if has_decoder else ())
    found = run_shards(reader, inputs, data_type="fp32")
    return Original(f"Slipway's engine ({reason})", found, inputs, None)


def _computed_folder(pair: Pair, original: Original, data_type: str) -> tuple[str, Activations]:
    folder = pair.folder
    if folder.is_shards:
        states = original.activations.get(Place("embedding"))
        found = run_shards(
            FTReader(folder.path), original.inputs, data_type=data_type, states=states
        )
        return f"Slipway's engine in {data_type}", found
    loaded = load_huggingface(folder.path, _own_plan(pair))
    return loaded.title, loaded.run(original.inputs)


def _own_plan(pair: Pair) -> ConversionPlan | None:
    """Return how the folder's family reads it; None where it is not known."""
    if pair.plan is None or pair.folder.mapping is None:
        return None
    request = ConversionRequest(
        pair.folder.path,
        pair.folder.path.parent,
        1,
        "fp32",
        allow=("*",),
        allow_setting=("*",),
        model_type=pair.folder.mapping.family.name,
        output_format="huggingface",
    )
    return plan_conversion(request)


def _same_tokens(mine: Activations, theirs: Activations) -> tuple[Activations, Activations]:
    """Return both without the logits of padding, which one of them may have."""
    if _LOGITS not in mine or _LOGITS not in theirs:
        return mine, theirs
    count = min(each[_LOGITS].shape[1] for each in (mine, theirs))
    return tuple({**each, _LOGITS: each[_LOGITS][:, :count]} for each in (mine, theirs))  # type: ignore[return-value]
