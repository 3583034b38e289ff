"""Compute both sides, each by the library that it is made for, and compare layer by layer."""

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
from inference.certify.pair import Folder, Pair, stored_type
from inference.certify.shards import run_shards
from inference.certify.tolerances import ROUTED, tolerance_of
from inference.engine.capacity import available_bytes

NAME, SERVED = "layers", "served"
_COMPUTED_BYTES = 4  # of a weight: both sides are computed in fp32, one after the other


def compare_layers(
    pair: Pair, options: CertifySection, *, ask: Callable[[Source], Iterator[Part]], scratch: Path
) -> Iterator[Part]:
    """Compute the source and then the folder in fp32, and compare every layer.

    A source whose library is not run here is written as a Hugging Face folder in `scratch`, and so
    are quantised weights that transformers does not widen. Shards are computed by the code that
    serves them. What `ask` yields of the loaded source follows.
    """
    problem, asked = _memory_problem(pair), list[Part]()
    try:
        if problem:
            raise ValueError(problem)
        source = load_source(pair.plan, pair.facts.reader.path, scratch)
        # One side may have rows of padding, whose tokens the other does not know.
        sizes = (vars(each).get("vocab_size") for each in (pair.config, pair.folder.config) if each)
        size = min(source.vocab_size, *filter(None, sizes), source.vocab_size)
        source = dataclasses.replace(source, vocab_size=size)
        inputs, title = source.default_inputs(), source.title
        expected = source.run(inputs) if options.layers else {}
        asked += ask(source)
        del source  # both sides may not fit into memory together
    except Exception as error:  # a library can fail in any way
        where = "both" if problem else "source"
        yield not_computed(NAME if options.layers else SERVED, f"{error}" or repr(error), where)
        if options.layers and options.endpoint is not None:
            yield not_computed(SERVED, "nothing could compute the source's log probabilities")
        return
    if options.layers:
        yield _compared_folder(pair, title, inputs, expected, options.tolerance, scratch)
    yield from asked


def _compared_folder(
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
            other, reader = "Slipway's engine", FTReader(folder.path)
            found = run_shards(reader, inputs, states=expected.get(EMBEDDING))
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
            other, found = loaded.title, loaded.run(inputs)
    except Exception as error:  # a library can fail in any way
        return not_computed(NAME, f"{error}" or repr(error), "folder")
    types = [*stored_types(folder)]
    if _may_route_otherwise(pair):
        types.append(ROUTED)
    places = dict.fromkeys((*expected, *found))
    rows = [_compared(place, expected.get(place), found.get(place)) for place in places]
    largest = max(row["relative"] for row in rows)
    up_to = (f"errors of layers up to {largest:.1e} of their largest value",) if largest else ()
    compared = f"{len(rows)} places of {title} and {other}"
    limit = tolerance or tolerance_of(types)
    return Part(NAME, compared, tuple(_findings(rows, limit)), up_to, rows)


def _may_route_otherwise(pair: Pair) -> bool:
    """Return whether rounding may choose another expert, which changes a token's state as a whole.

    The tensors are held to their rounding all the same.
    """
    architecture = None if pair.config is None else pair.config.architecture()
    kinds = {each.dtype for pieces in pair.facts.reader.tensors.values() for each in pieces}
    return getattr(architecture, "expert_num", 0) > 0 and pair.folder.data_type not in kinds


def stored_types(folder: Folder) -> Iterator[str]:
    """Yield the types in which a folder keeps its weights; of unknown ones, that they are."""
    yield folder.data_type
    if folder.is_unread:
        yield QUANTIZATION
    for pieces in folder.reader.tensors.values():
        yield from (stored_type(each) for each in pieces if each.stored[1:])


def _compared(
    place: str, expected: torch.Tensor | None, found: torch.Tensor | None
) -> dict[str, Any]:
    """Return the error at one place, infinite where a side lacks it or has another shape."""
    if place == LOGITS and expected is not None and found is not None:
        count = min(expected.shape[1], found.shape[1])  # without those of padding
        expected, found = expected[:, :count], found[:, :count]
    relative, is_finite = math.inf, False
    if expected is not None and found is not None and expected.shape == found.shape:
        known = expected[expected.isfinite()].abs()
        is_finite = len(known) == expected.numel()
        largest = float(known.max()) if len(known) else 0.0
        relative = relative_error(expected, found, largest=largest)
    return {"place": place, "relative": relative, "finite": is_finite}


def _findings(rows: list[dict[str, Any]], tolerance: float) -> Iterator[Remark]:
    """Yield the first place that deviates, and the first with values that are not finite."""
    bad = [row for row in rows if not row["relative"] <= tolerance]
    for row in bad[:1]:
        detail = (
            f"error {row['relative']:.2e} of its largest value, {tolerance:.0e} is allowed; "
            f"{len(bad)} of {len(rows)} places differ"
        )
        yield Remark(DIFFERS, "first layer that differs", row["place"], detail)
    strange = [row for row in rows if not row["finite"] and row not in bad]
    for row in strange[:1]:
        detail = f"on both sides alike; at {len(strange)} of {len(rows)} places"
        yield Remark(UP_TO, "infinite values, or not numbers", row["place"], detail)


def _memory_problem(pair: Pair) -> str:
    """Return that a model in fp32 is larger than the free memory."""
    needed = _COMPUTED_BYTES * max(
        sum(math.prod(piece.shape) for pieces in reader.tensors.values() for piece in pieces)
        for reader in (pair.facts.reader, pair.folder.reader)
    )
    if needed < (free := available_bytes()):
        return ""
    return f"a model in fp32 takes {needed >> 30} GiB, and {free >> 30} GiB of memory are free"


def load_source(plan: ConversionPlan | None, path: Path, scratch_dir: Path) -> Source:
    """Load a checkpoint by its own library, or what it becomes by transformers, in fp32.

    `plan` is how its family reads it; None for a Hugging Face decoder of no known family.

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
    return _load_written(plan.request, architecture, scratch_dir, f"a folder made of this {kind}")


def _load_folder(
    request: ConversionRequest | None,
    path: Path,
    architecture: Architecture | None,
    scratch_dir: Path,
) -> Source:
    """Load a Hugging Face folder; quantised weights need packages, which may not be there.

    Adapters are merged by PEFT where it reads them, and otherwise by the conversion.
    """
    adapters = () if request is None else request.lora_checkpoints
    is_quantised = quantization(index_huggingface(path)[0]) is not None
    try:
        return load_huggingface(path, architecture, adapters, is_quantised=is_quantised)
    except ValueError:
        if request is None or not (adapters or is_quantised):
            raise
    what = "its widened weights" if is_quantised else "a folder made of it with its adapters"
    return _load_written(request, architecture, scratch_dir, what)


def _load_written(
    request: ConversionRequest, architecture: Architecture | None, folder: Path, what: str
) -> Source:
    """Write a checkpoint as a Hugging Face folder in fp32, and load that."""
    request = dataclasses.replace(
        request,
        output_dir=folder,
        tp_size=1,
        output_format="huggingface",
        weight_data_type="fp32",
    )
    loaded = load_huggingface(convert(request).ft_dir, architecture)
    return dataclasses.replace(loaded, title=f"{loaded.title} (of {what})")
