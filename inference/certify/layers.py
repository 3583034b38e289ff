"""Compute both sides, each by the library that it is made for, and compare layer by layer."""

import dataclasses
import math
from collections.abc import Sequence
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
    ActivationDifference,
    Activations,
    ModelInputs,
    Place,
    Source,
    compare_activations,
    spread_ids,
)
from inference.certify.findings import DIFFERS, NOT_COMPUTED, Part, Remark
from inference.certify.huggingface import load_huggingface
from inference.certify.megatron import load_megatron
from inference.certify.pair import Pair
from inference.certify.served import ScoredRow, scored
from inference.certify.shards import run_shards
from inference.certify.tolerances import tolerance_of

NAME = "layers"
_COMPUTED_BYTES = 4  # of a weight: both sides are computed in fp32, one after the other
_LOGITS = Place("logits")


@dataclasses.dataclass(frozen=True)
class Original:
    """The source, computed.

    Attributes:
        title: library and class.
        rows: tokens with their log probabilities, for an endpoint to be compared with.
    """

    title: str
    activations: Activations
    inputs: ModelInputs
    rows: tuple[ScoredRow, ...]


def compute_original(
    pair: Pair, *, prompt_ids: tuple[int, ...], rows: int, scratch_dir: Path
) -> Original | Part:
    """Compute the source in fp32, by its own library or that of the folder made of it.

    A source whose library is not run here is written as a Hugging Face folder in `scratch_dir`. The
    part says why nothing could compute it.
    """
    if problem := _memory_problem(pair):
        return _failed("both", problem)
    try:
        source = load_source(pair.plan, pair.facts.reader.path, scratch_dir)
        source = dataclasses.replace(source, vocab_size=_tokens(pair, source.vocab_size))
        inputs = source.default_inputs(prompt_ids)
        activations = source.run(inputs)
        count = len(source.default_inputs().ids)
        several = [spread_ids(count, source.vocab_size, 5 + number) for number in range(rows)]
        logits = [source.run(source.default_inputs(ids)).get(_LOGITS) for ids in several]
    except (ValueError, OSError) as error:
        return _failed("source", str(error))
    known = zip(several, logits, strict=True)
    has_answers = bool(inputs.decoder_ids)
    found = () if has_answers else tuple(scored(ids, x) for ids, x in known if x is not None)
    return Original(source.title, activations, inputs, found)


def compare_layers(
    pair: Pair, original: Original, *, data_type: str, tolerance: float | None
) -> Part:
    """Compute the folder and compare every layer with the source's.

    A folder of shards is computed in `data_type` by the code that serves it, another one in fp32.
    """
    try:
        title, computed = _computed_folder(pair, original, data_type)
        if tolerance is None:
            kinds = [data_type, pair.folder.data_type]
            tolerance = tolerance_of([*kinds, *["int8"] * (pair.folder.quantised is not None)])
        expected, found = _same_tokens(original.activations, computed)
        rows = compare_activations(expected, found, tolerance=tolerance)
    except (ValueError, OSError) as error:
        return _failed("folder", str(error))
    compared = f"{len(rows)} places of {original.title} and {title}"
    largest = max(row.relative for row in rows)
    up_to = (f"errors of layers up to {largest:.1e} of their largest value",) if largest else ()
    return Part(NAME, compared, tuple(_findings(rows)), up_to, [_row(row) for row in rows])


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


def _tokens(pair: Pair, most: int) -> int:
    """Return how many tokens both sides know: one of them may be padded."""
    sizes = (vars(each or object).get("vocab_size") for each in (pair.config, pair.folder.config))
    return min(most, *(size for size in sizes if isinstance(size, int)), most)


def load_source(plan: ConversionPlan | None, path: Path, scratch_dir: Path) -> Source:
    """Load a checkpoint by its own library, or what it becomes by transformers, in fp32.

    `plan` is how its family reads it; None for a Hugging Face decoder of no known family.

    Raises:
        ValueError: No library can load it.
    """
    if plan is None or plan.facts.reader.format == "huggingface":
        return load_huggingface(path, plan)
    has_core = find_spec("megatron") is not None and find_spec("megatron.core") is not None
    if has_core and not is_ft_folder(path) and is_core(plan.facts):
        return load_megatron(plan)
    request = dataclasses.replace(
        plan.request, output_dir=scratch_dir, tp_size=1, weight_data_type="fp32"
    )
    request = dataclasses.replace(request, output_format="huggingface")
    folder = convert(request).ft_dir
    loaded = load_huggingface(folder, _own_plan(folder, plan.mapping.family.name))
    kind = plan.facts.reader.format
    return dataclasses.replace(loaded, title=f"{loaded.title} (of a folder made of this {kind})")


def _computed_folder(pair: Pair, original: Original, data_type: str) -> tuple[str, Activations]:
    folder = pair.folder
    if folder.is_shards:
        states = original.activations.get(Place("embedding"))
        found = run_shards(
            FTReader(folder.path), original.inputs, data_type=data_type, states=states
        )
        return f"Slipway's engine in {data_type}", found
    own = None
    if pair.plan is not None and folder.mapping is not None:
        own = _own_plan(folder.path, folder.mapping.family.name)
    loaded = load_huggingface(folder.path, own)
    return loaded.title, loaded.run(original.inputs)


def _own_plan(folder: Path, family: str) -> ConversionPlan:
    """Return how a Hugging Face folder's family reads it."""
    request = ConversionRequest(
        folder,
        folder.parent,
        1,
        "fp32",
        allow=("*",),
        allow_setting=("*",),
        model_type=family,
        output_format="huggingface",
    )
    return plan_conversion(request)


def _same_tokens(mine: Activations, theirs: Activations) -> tuple[Activations, Activations]:
    """Return both without the logits of padding, which one of them may have."""
    if _LOGITS not in mine or _LOGITS not in theirs:
        return mine, theirs
    count = min(each[_LOGITS].shape[1] for each in (mine, theirs))
    return tuple({**each, _LOGITS: each[_LOGITS][:, :count]} for each in (mine, theirs))  # type: ignore[return-value]
