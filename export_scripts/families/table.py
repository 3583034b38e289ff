"""The table of all source mappings, and of the families that have shards.

A server needs only the family of its config.ini, and does not import this module (`ft.config_ini`).
"""

from export_scripts.families.bert import BERT_HUGGINGFACE
from export_scripts.families.decoders import DECODERS
from export_scripts.families.dense.core import DENSE_CORE_MAPPINGS
from export_scripts.families.gpt.megatron import GPT_CORE_MAPPINGS, GPT_MEGATRON_MAPPINGS
from export_scripts.families.gptj_jax import GPTJ_JAX
from export_scripts.families.gptneox import GPTNEOX_ELEUTHER
from export_scripts.families.hybrid import HYBRID_CORE_MAPPINGS
from export_scripts.families.mixture import MIXTURE_CORE_MAPPINGS
from export_scripts.families.t5.huggingface import T5_ENCODER_HUGGINGFACE, T5_HUGGINGFACE
from export_scripts.families.t5.nemo import T5_NEMO

# The first mapping whose format and `matches` fit a checkpoint converts it.
SOURCE_MAPPINGS = (
    *DECODERS.values(),
    GPTJ_JAX,
    GPTNEOX_ELEUTHER,
    *HYBRID_CORE_MAPPINGS,
    *MIXTURE_CORE_MAPPINGS,
    *DENSE_CORE_MAPPINGS,
    *GPT_MEGATRON_MAPPINGS,
    *GPT_CORE_MAPPINGS,
    T5_HUGGINGFACE,
    T5_ENCODER_HUGGINGFACE,
    T5_NEMO,
    BERT_HUGGINGFACE,
)

# Name -> family, of those that have shards.
FAMILIES = {
    mapping.family.name: mapping.family for mapping in SOURCE_MAPPINGS if mapping.family.has_shards
}
