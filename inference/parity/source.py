"""The source model in its own library, where that library is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from export_scripts.conversion.plan import ConversionPlan
from export_scripts.families.gpt.core import is_core
from inference.parity.activations import NoLibraryError
from inference.parity.huggingface import HuggingFaceSource, load_huggingface
from inference.parity.megatron import MegatronSource, load_megatron
from inference.parity.mesh_transformer import load_mesh_transformer

# Who computes the formats whose library is not run here.
_OTHERS: Mapping[str, str] = {
    "nemo": "NVIDIA's nemo_toolkit",
    "megatron": "Megatron-LM",
    "eleuther": "EleutherAI's gpt-neox",
}


def load_source(plan: ConversionPlan) -> HuggingFaceSource | MegatronSource:
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
