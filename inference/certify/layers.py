"""Run the models of both sides, each by the library of its format, and compare layer by layer."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from export_scripts.checkpoints.huggingface import index_huggingface
from export_scripts.checkpoints.quantized import QUANTIZATION, quantization
from export_scripts.conversion.convert import convert
from export_scripts.conversion.ft_source import is_ft_folder
from export_scripts.conversion.plan import ConversionPlan
from export_scripts.conversion.request import ConversionRequest
from export_scripts.families.gpt.megatron import is_core
from export_scripts.families.layout.architecture import Architecture
from export_scripts.ft.reader import FTReader
from inference.certify.activations import (
    EMBEDDING,
    LOGITS,
    Activations,
    ModelInputs,
    Source,
    relative_error,
)
from inference.certify.findings import DIFFERS, UP_TO, Part, Remark, not_computed
from inference.certify.huggingface import load_huggingface
from inference.certify.megatron import load_megatron
from inference.certify.options import CertifySection
from inference.certify.pair import Folder, Pair, pieces_of, stored_type
from inference.certify.shards import run_shards
from inference.certify.tolerances import ROUTED, tolerance_of
from inference.engine.capacity import available_bytes

NAME, SERVED = "layers", "served"
_COMPUTED_BYTES = 4  # of a weight: both models run in fp32, one after the other


def compare_layers(
    pair: Pair, options: CertifySection, *, ask: Callable[[Source], Iterator[Part]], scratch: Path
) -> Iterator[Part]:
    """Run the source and then the folder in fp32, and compare every layer.

    A source whose library is not run here is written as a Hugging Face folder in `scratch`, and so
    are quantised weights that transformers cannot load. Shards are run by the code that serves
    them. The parts that `ask` yields for the loaded source come last.
    """
    problem, asked = _memory_problem(pair), list[Part]()
    try:
        if problem:
            raise ValueError(problem)
        source = load_source(pair.plan, pair.facts.reader.path, scratch)
        # One side may have padding rows, whose ids the other does not know.
        sizes = (vars(each).get("vocab_size") for each in (pair.config, pair.folder.config) if each)
        size = min(source.vocab_size, *filter(None, sizes), source.vocab_size)
        source = dataclasses.replace(source, vocab_size=size)
        inputs, title = source.default_inputs(), source.title
        expected = source.run(inputs) if options.layers else {}
        asked += ask(source)
        del source  # both sides may not fit into memory together
    except Exception as error:  # libraries raise anything
        where = "both" if problem else "source"
        yield not_computed(NAME if options.layers else SERVED, f"{error}" or repr(error), where)
        if options.layers and options.endpoint is not None:
            yield not_computed(SERVED, "the source's log probabilities could not be computed")
        return
    if options.layers:
        yield _compare_folder(pair, title, inputs, expected, options.tolerance, scratch)
    yield from asked


def _compare_folder(
    pair: Pair,
    title: str,
    inputs: ModelInputs,
    expected: Activations,
    tolerance: float | None,
    scratch: Path,
) -> Part:
    folder = pair.folder
    try:
        if folder.is_shards:
            folder_title = "Slipway's engine"
            found = run_shards(FTReader(folder.path), inputs, states=expected.get(EMBEDDING))
        else:
            architecture = None if folder.config is None else folder.config.architecture()
            request = None
            if pair.plan is not None:
                request = dataclasses.replace(
                    pair.plan.request,
                    checkpoint_path=folder.path,
                    checkpoint_name=None,
                    lora_checkpoints=(),
                    model_config=None,
                )
            loaded = _load_folder(request, folder.path, architecture, scratch / "folder")
            folder_title, found = loaded.title, loaded.run(inputs)
    except Exception as error:  # libraries raise anything
        return not_computed(NAME, f"{error}" or repr(error), "folder")
    types = [*stored_types(folder)]
    if _may_change_routing(pair):
        types.append(ROUTED)
    places = dict.fromkeys((*expected, *found))
    rows = [_error_row(place, expected.get(place), found.get(place)) for place in places]
    largest = max(row["relative"] for row in rows)
    up_to = (f"errors of layers up to {largest:.1e} of their largest value",) if largest else ()
    compared = f"{len(rows)} places of {title} and {folder_title}"
    limit = tolerance or tolerance_of(types)
    return Part(NAME, compared, tuple(_findings(rows, limit)), up_to, rows)


def _may_change_routing(pair: Pair) -> bool:
    """Return whether rounding may choose another expert, which changes a token's whole state."""
    architecture = None if pair.config is None else pair.config.architecture()
    kinds = {piece.dtype for piece in pieces_of(pair.facts.reader)}
    return getattr(architecture, "expert_num", 0) > 0 and pair.folder.data_type not in kinds


def stored_types(folder: Folder) -> Iterator[str]:
    """Yield the types of a folder's stored weights; QUANTIZATION for those not decoded."""
    yield folder.data_type
    if folder.is_undecoded:
        yield QUANTIZATION
    yield from (stored_type(piece) for piece in pieces_of(folder.reader) if piece.stored[1:])


def _error_row(
    place: str, expected: torch.Tensor | None, found: torch.Tensor | None
) -> dict[str, Any]:
    """Return the error at one place; infinite if a side lacks it or has another shape."""
    if place == LOGITS and expected is not None and found is not None:
        count = min(expected.shape[1], found.shape[1])  # without padding tokens
        expected, found = expected[:, :count], found[:, :count]
    relative, is_finite = math.inf, False
    if expected is not None and found is not None and expected.shape == found.shape:
        known = expected[expected.isfinite()].abs()
        is_finite = len(known) == expected.numel()
        largest = float(known.max()) if len(known) else 0.0
        relative = relative_error(expected, found, largest=largest)
    return {"place": place, "relative": relative, "finite": is_finite}


def _findings(rows: list[dict[str, Any]], tolerance: float) -> Iterator[Remark]:
    """Yield the first place beyond the tolerance, and the first with non-finite values."""
    bad = [row for row in rows if not row["relative"] <= tolerance]
    for row in bad[:1]:
        detail = (
            f"error {row['relative']:.2e} of its largest value, {tolerance:.0e} is allowed; "
            f"{len(bad)} of {len(rows)} places differ"
        )
        yield Remark(DIFFERS, "first layer that differs", row["place"], detail)
    non_finite = [row for row in rows if not row["finite"] and row not in bad]
    for row in non_finite[:1]:
        detail = f"on both sides alike; at {len(non_finite)} of {len(rows)} places"
        yield Remark(UP_TO, "infinite values, or not numbers", row["place"], detail)


def _memory_problem(pair: Pair) -> str:
    """Return an error message if a model in fp32 exceeds the free memory; else an empty string."""
    needed = _COMPUTED_BYTES * max(
        sum(math.prod(piece.shape) for piece in pieces_of(reader))
        for reader in (pair.facts.reader, pair.folder.reader)
    )
    if needed < (free := available_bytes()):
        return ""
    return f"a model in fp32 takes {needed >> 30} GiB, and {free >> 30} GiB of memory are free"


def load_source(plan: ConversionPlan | None, path: Path, scratch_dir: Path) -> Source:
    """Load a checkpoint in fp32 by its own library, or its conversion by transformers.

    `plan` is its conversion plan; None for a Hugging Face decoder of an unknown family.

    Raises:
        ValueError: no library can load it.
    """
    if plan is None:
        return load_huggingface(path, None)
    kind, architecture = plan.facts.reader.format, plan.config.architecture()
    if kind == "huggingface":
        return _load_folder(plan.request, path, architecture, scratch_dir)
    has_core = find_spec("megatron") is not None and find_spec("megatron.core") is not None
    if has_core and not is_ft_folder(path) and is_core(plan.facts):
        return load_megatron(plan)
    return _load_converted(plan.request, architecture, scratch_dir, f"a folder made of this {kind}")


def _load_folder(
    request: ConversionRequest | None,
    path: Path,
    architecture: Architecture | None,
    scratch_dir: Path,
) -> Source:
    """Load a Hugging Face folder, or its conversion if packages for its quantisation are missing.

    PEFT merges the adapters that it can read, the conversion the others.
    """
    adapters = () if request is None else request.lora_checkpoints
    is_quantised = quantization(index_huggingface(path)[0]) is not None
    try:
        return load_huggingface(path, architecture, adapters, is_quantised=is_quantised)
    except ValueError:
        if request is None or not (adapters or is_quantised):
            raise
    origin = "its widened weights" if is_quantised else "a folder made of it with its adapters"
    return _load_converted(request, architecture, scratch_dir, origin)


def _load_converted(
    request: ConversionRequest, architecture: Architecture | None, folder: Path, origin: str
) -> Source:
    """Convert a checkpoint to a Hugging Face folder in fp32, and load that."""
    request = dataclasses.replace(
        request,
        output_dir=folder,
        tp_size=1,
        output_format="huggingface",
        weight_data_type="fp32",
    )
    loaded = load_huggingface(convert(request).ft_dir, architecture)
    return dataclasses.replace(loaded, title=f"{loaded.title} (of {origin})")
