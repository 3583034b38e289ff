"""Dense decoders beyond FasterTransformer's own: one layout; of each family a file and a row."""

from __future__ import annotations

from export_scripts.families.dense.core import DENSE_CORE_MAPPINGS
from export_scripts.families.dense.falcon import FALCON_HUGGINGFACE
from export_scripts.families.dense.gemma import (
    GEMMA2_HUGGINGFACE,
    GEMMA3_HUGGINGFACE,
    GEMMA_HUGGINGFACE,
)
from export_scripts.families.dense.granite import GRANITE_HUGGINGFACE
from export_scripts.families.dense.llama import LLAMA_HUGGINGFACE
from export_scripts.families.dense.mistral import MISTRAL_HUGGINGFACE
from export_scripts.families.dense.nemotron import NEMOTRON_HUGGINGFACE
from export_scripts.families.dense.olmo2 import OLMO2_HUGGINGFACE
from export_scripts.families.dense.phi3 import PHI3_HUGGINGFACE
from export_scripts.families.dense.qwen import QWEN2_HUGGINGFACE, QWEN3_HUGGINGFACE
from export_scripts.families.dense.smollm3 import SMOLLM3_HUGGINGFACE
from export_scripts.families.dense.starcoder2 import STARCODER2_HUGGINGFACE
from export_scripts.families.mapping.source_mapping import SourceMapping

DENSE_MAPPINGS: tuple[SourceMapping, ...] = (
    LLAMA_HUGGINGFACE,
    MISTRAL_HUGGINGFACE,
    QWEN2_HUGGINGFACE,
    QWEN3_HUGGINGFACE,
    GRANITE_HUGGINGFACE,
    OLMO2_HUGGINGFACE,
    GEMMA_HUGGINGFACE,
    GEMMA2_HUGGINGFACE,
    GEMMA3_HUGGINGFACE,
    SMOLLM3_HUGGINGFACE,
    PHI3_HUGGINGFACE,
    STARCODER2_HUGGINGFACE,
    NEMOTRON_HUGGINGFACE,
    FALCON_HUGGINGFACE,
    *DENSE_CORE_MAPPINGS,
)
