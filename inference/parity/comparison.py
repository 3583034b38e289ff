"""One comparison of a source with a folder: its weights, then every layer, and what it found."""

import dataclasses
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
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
    uncomputed: str

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
        """Return whether every weight is equal and no layer deviates.

        Layers that were not computed are not equal. Settings of config.ini show in the layers.
        """
        computed = bool(self.activations) and not self.uncomputed
        return self.weights.equal and computed and self.first_place is None

    @property
    def weights_alone(self) -> bool:
        """Return whether all that could be compared is equal, and no layer could be.

        There settings decide, unless something was added to the source that would explain them.
        """
        weights = self.weights
        unexplained = weights.settings and not weights.not_compared
        # A folder that cannot be computed is not equal to a source that can.
        return weights.equal and not (self.activations or self.source or unexplained)

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
        states = {"equal": self.equal, "weights_alone": self.weights_alone}
        found = {**states, "first_deviation": first, **values}
        return json.dumps(_plain(found), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    """Return a value for JSON, which has no words for infinities and NaN."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def compare(
    checkpoint: Path,
    ft_dir: Path,
    *,
    data_type: str = "fp32",
    tolerance: float | None = None,
    prompt_ids: tuple[int, ...] = (),
    given: Sequence[tuple[str, str]] = (),
) -> ParityReport:
    """Compare a source with a folder.

    Args:
        checkpoint: The source, a file or a folder.
        ft_dir: The folder of shards, or the Hugging Face folder made of the source.
        data_type: What the folder's model is computed in; the source is computed in fp32.
        tolerance: Largest relative error; None for that of the coarser of computed and stored type.
        prompt_ids: Token ids to compute; none takes ids from all over the vocabulary.
        given: (config key, value) pairs that the source does not state, as for the conversion.

    Raises:
        CheckpointMismatchError: The folder is not sound, or the source cannot become such a one.
        ValueError: The source cannot be read or computed, or a token id is out of range.
    """
    if not is_ft_folder(ft_dir) and is_huggingface(ft_dir):
        with tempfile.TemporaryDirectory(dir=ft_dir.parent, prefix=".parity-") as scratch:
            shards = _shards_of(checkpoint, ft_dir, given, Path(scratch))
            report = compare(
                ft_dir, shards, data_type=data_type, tolerance=tolerance, prompt_ids=prompt_ids
            )
        return dataclasses.replace(report, checkpoint=str(checkpoint), ft_dir=str(ft_dir))
    reader = FTReader(ft_dir)
    source, title, uncomputed = None, "", ""
    activations: tuple[ActivationDifference, ...] = ()
    with tempfile.TemporaryDirectory() as scratch:
        plan = source_plan(checkpoint, reader, given=given, scratch_dir=Path(scratch))
        weights = compare_weights(plan, reader)
        try:
            source = load_source(plan)
        except NoLibraryError as error:
            uncomputed = str(error)
    if source is not None:
        title, inputs = source.title, source.default_inputs(prompt_ids)
        expected = source.run(inputs)
        del source  # before the folder's model takes as much memory
        states = expected.get(Place("embedding"))
        if tolerance is None:
            tolerance = tolerance_of((data_type, reader.weight_data_type))
        try:
            found = run_shards(reader, inputs, data_type=data_type, states=states)
            activations = compare_activations(expected, found, tolerance=tolerance)
        except CheckpointMismatchError as error:  # such as values that are not finite
            uncomputed = str(error)
    return ParityReport(
        checkpoint=str(checkpoint),
        ft_dir=str(ft_dir),
        source=title,
        folder=f"{reader.family.name}, {reader.tp_size} rank{'s' * (reader.tp_size > 1)}, "
        f"{reader.weight_data_type} on disk, data_type={data_type}",
        weights=weights,
        activations=activations,
        uncomputed=uncomputed,
    )


def _shards_of(
    checkpoint: Path, folder: Path, given: Sequence[tuple[str, str]], scratch_dir: Path
) -> Path:
    """Return the shards of a source in the type of the Hugging Face folder made of it."""
    if is_ft_folder(checkpoint):
        return checkpoint
    index = open_checkpoint(folder)
    kind = next(index.tensors[key][0].dtype for key in index.tensors)
    request = ConversionRequest(
        checkpoint, scratch_dir, 1, kind, given=tuple(given), allow=("*",), allow_setting=("*",)
    )
    return convert(request).ft_dir


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
