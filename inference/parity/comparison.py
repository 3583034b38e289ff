"""One comparison of a source with a folder: its weights, then every layer, and what it found."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from export_scripts.checkpoints import open_checkpoint
from export_scripts.checkpoints.huggingface import is_huggingface
from export_scripts.conversion.convert import convert
from export_scripts.conversion.ft_source import is_ft_folder
from export_scripts.conversion.plan import ConversionPlan
from export_scripts.conversion.request import ConversionRequest
from export_scripts.errors import CheckpointMismatchError
from export_scripts.families.gpt.megatron import is_core
from export_scripts.ft.reader import FTReader
from inference.parity.activations import (
    ActivationDifference,
    Activations,
    ModelInputs,
    NoLibraryError,
    Place,
    Source,
    compare_activations,
)
from inference.parity.huggingface import load_huggingface
from inference.parity.megatron import load_megatron
from inference.parity.mesh_transformer import load_mesh_transformer
from inference.parity.shards import run_shards
from inference.parity.tolerances import tolerance_of
from inference.parity.weights import FileDifference, WeightComparison, compare_weights, source_plan


@dataclass(frozen=True)
class ParityRequest:
    """A request for a comparison.

    Attributes:
        checkpoint: the source, a file or a folder.
        ft_dir: the folder of shards, or the Hugging Face folder made of the source.
        data_type: what the folder's model is computed in; the source is computed in fp32.
        tolerance: largest relative error; None for that of the coarser of computed and stored type.
        prompt_ids: token ids to compute; none takes ids from all over the vocabulary.
        given: (config key, value) pairs that the source does not state, as for the conversion.
    """

    checkpoint: Path
    ft_dir: Path
    data_type: str = "fp32"
    tolerance: float | None = None
    prompt_ids: tuple[int, ...] = ()
    given: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ParityReport:
    """The result of a comparison.

    Attributes:
        source: library and class that computed the source; empty if nothing could.
        folder: family, ranks and types, for people.
        activations: every place, in the order of computation.
        uncomputed: why there are none.
    """

    checkpoint: str
    ft_dir: str
    source: str
    folder: str
    weights: WeightComparison
    activations: tuple[ActivationDifference, ...]
    uncomputed: str = ""

    @property
    def first_place(self) -> ActivationDifference | None:
        """The first place whose values deviate."""
        return next((each for each in self.activations if each.deviates), None)

    @property
    def first_file(self) -> FileDifference | None:
        """The first file with other values than the converter would write."""
        return next(iter(self.weights.differences), None)

    @property
    def equal(self) -> bool:
        """Return whether nothing deviates.

        Settings decide only where no layers could be computed to see whether they matter, and
        where nothing was added to the source that would explain them.
        """
        weights = self.weights
        unseen = not self.activations and not weights.not_compared and bool(weights.settings)
        deviates = bool(weights.differences or weights.missing or self.first_place)
        # A folder that cannot be computed is not equal to a source that can.
        return not deviates and not unseen and not (self.source and self.uncomputed)

    def to_json(self) -> str:
        """Return everything as JSON."""
        values = dataclasses.asdict(self)
        values["activations"] = [
            {**dataclasses.asdict(each), "deviates": each.deviates} for each in self.activations
        ]
        first = {
            "place": self.first_place and str(self.first_place.place),
            "file": self.first_file and self.first_file.file,
        }
        found = {"equal": self.equal, "first_deviation": first, **values}
        return json.dumps(_plain(found), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    """Return a value for JSON, which has no words for infinities and NaN."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def compare(request: ParityRequest) -> ParityReport:
    """Compare a source with a folder.

    Raises:
        CheckpointMismatchError: The folder is not sound, or the source cannot become such a one.
        ValueError: The source cannot be read or computed, or a token id is out of range.
    """
    if not is_ft_folder(request.ft_dir) and is_huggingface(request.ft_dir):
        return _compare_huggingface(request)
    reader = FTReader(request.ft_dir)
    with tempfile.TemporaryDirectory() as scratch:
        plan = source_plan(
            request.checkpoint, reader, given=request.given, scratch_dir=Path(scratch)
        )
        report = ParityReport(
            checkpoint=str(request.checkpoint),
            ft_dir=str(request.ft_dir),
            source="",
            folder=f"{reader.family.name}, {reader.tp_size} rank{'s' * (reader.tp_size > 1)}, "
            f"{reader.weight_data_type} on disk, data_type={request.data_type}",
            weights=compare_weights(plan, reader),
            activations=(),
        )
        try:
            source = load_source(plan)
        except NoLibraryError as error:
            return dataclasses.replace(report, uncomputed=str(error))
    inputs = source.default_inputs(request.prompt_ids)
    expected = source.run(inputs)
    report = dataclasses.replace(report, source=source.title)
    del source  # before the folder's model takes as much memory
    return _with_activations(report, request, reader, inputs, expected)


def _compare_huggingface(request: ParityRequest) -> ParityReport:
    """Return the comparison of a Hugging Face folder with the shards of its source."""
    folder = request.ft_dir
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".parity-") as scratch:
        shards = request.checkpoint
        if not is_ft_folder(shards):
            index = open_checkpoint(folder)
            kind = next(index.tensors[key][0].dtype for key in index.tensors)
            asked = ConversionRequest(
                shards, Path(scratch), 1, kind, given=request.given, allow=("*",)
            )
            shards = convert(asked).ft_dir
        report = compare(dataclasses.replace(request, checkpoint=folder, ft_dir=shards, given=()))
    return dataclasses.replace(report, checkpoint=str(request.checkpoint), ft_dir=str(folder))


def _with_activations(
    report: ParityReport,
    request: ParityRequest,
    reader: FTReader,
    inputs: ModelInputs,
    expected: Activations,
) -> ParityReport:
    """Return the report with every layer of the folder's model compared."""
    try:
        found = run_shards(
            reader, inputs, data_type=request.data_type, states=expected.get(Place("embedding"))
        )
    except CheckpointMismatchError as error:  # such as values that are not finite
        return dataclasses.replace(report, uncomputed=str(error))
    tolerance = request.tolerance
    if tolerance is None:
        tolerance = tolerance_of((request.data_type, reader.weight_data_type))
    return dataclasses.replace(
        report, activations=compare_activations(expected, found, tolerance=tolerance)
    )


# Who computes the formats whose library is not run here.
_OTHERS: Mapping[str, str] = {
    "nemo": "NVIDIA's nemo_toolkit",
    "megatron": "Megatron-LM",
    "eleuther": "EleutherAI's gpt-neox",
}


def load_source(plan: ConversionPlan) -> Source:
    """Load a source in fp32; `plan` is how it becomes a folder.

    Raises:
        NoLibraryError: The library is not installed, or is none of those that are run here.
        ValueError: The library cannot load the source.
    """
    kind = plan.facts.reader.format
    if kind == "huggingface":
        return load_huggingface(plan)
    if kind == "jax":
        return load_mesh_transformer(plan)
    if not is_core(plan.facts):
        library = _OTHERS.get(kind, "its own library")
        raise NoLibraryError(
            f"this {kind} checkpoint is computed by {library}, which is not run here; its tensors "
            "were compared"
        )
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise NoLibraryError(
            "this checkpoint is computed by megatron-core, which is not installed (pip install "
            "'megatron-core>=0.12'); its tensors were compared"
        )
    return load_megatron(plan)
