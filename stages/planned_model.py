"""A model whose checkpoint is elsewhere: its sizes as stated, for a plan without it."""

import math
from dataclasses import dataclass, fields

from export_scripts.conversion.request import ConversionRequest
from export_scripts.families import FAMILIES
from export_scripts.families.layout.config import FTConfig
from export_scripts.families.layout.spec import ModelFamily
from foundations.values import INT32, TOKENS, amount, option

SIZES_KEY = "export.model.sizes"
_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class SizesSection:
    """`export.model.sizes`: a model to plan for (dry_run=true) before its checkpoint is here."""

    family: str | None = option("its family", None, choices=tuple(FAMILIES))
    hidden: int | None = option("width of the residual stream", None, within=(1, TOKENS))
    layers: int | None = option("layers; of a T5, those of each stack", None, within=(1, 10_000))
    heads: int | None = option("attention heads", None, within=(1, TOKENS))
    vocab: int = option("tokens", 51200, within=(1, INT32))
    inter_size: int | None = option("width of the MLP; null: 4 x hidden", None, within=(1, INT32))
    positions: int = option("longest sequence, where there is a limit", 2048, within=(1, TOKENS))


@dataclass(frozen=True, kw_only=True)
class PlannedModel(SizesSection):
    """The sizes of a model, with the type of its cache of keys and values."""

    family: str
    hidden: int
    layers: int
    heads: int
    compute_type: str

    def problems(self, request: ConversionRequest) -> list[str]:
        """Return why the model could not be converted and served as the request asks."""
        try:
            family, config = self._config(request)
        except ValueError as error:
            return [f"{SIZES_KEY}: {error}."]
        if not family.is_divisible(config, request.tp_size):
            return [
                f"export.model.tensor_model_parallel_size={request.tp_size} does not divide the "
                f"heads and widths of {SIZES_KEY}; use "
                f"{', '.join(map(str, family.tp_sizes(config)))}."
            ]
        if self.layers % request.pp_size:
            return [
                f"export.triton_deployment.pipeline_model_parallel_size={request.pp_size} does not "
                f"divide {SIZES_KEY}.layers={self.layers}; use a divisor."
            ]
        return []

    def describe(self, request: ConversionRequest) -> str:
        """Return parameters, and the memory of a rank, in one line."""
        family, config = self._config(request)
        tensors = list(family.tensors(config))
        count = sum(math.prod(each.shape) for each in tensors)
        of_rank = sum(
            each.file_bytes(request.tp_size, request.weight_data_type) for each in tensors
        )
        ranks = request.tp_size * request.pp_size
        # Keys and values of every layer, on the ranks that share it.
        token = 2 * self.layers * self.hidden * _ITEM_BYTES[self.compute_type] / ranks
        return (
            f"planned without the checkpoint: {self.family}, {amount(count)} parameters, "
            f"{amount(of_rank / request.pp_size)}B of {request.weight_data_type} weights and "
            f"{amount(token)}B of cache for each token on each of {ranks} ranks"
        )

    def _config(self, request: ConversionRequest) -> tuple[ModelFamily, FTConfig]:
        from export_scripts.synthesize import synthetic_config

        sizes = {each.name: getattr(self, each.name) for each in fields(SizesSection)}
        family = FAMILIES[sizes.pop("family")]
        return family, synthetic_config(family, **sizes, weight_data_type=request.weight_data_type)
