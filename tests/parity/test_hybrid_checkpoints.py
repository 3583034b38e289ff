"""HybridModels that megatron-core's ranks have saved have its logits, however they are cut.

Those with Mamba layers become a Nemotron-H, whose logits are transformers'.

This environment's release saves them, and those of SLIPWAY_MEGATRON_CORE, interpreters separated as
in PATH; a folder that 0.19.2 has saved is among the golden ones.
"""

from typing import Any

import pytest
import torch

from export_scripts.inspect import describe
from tests.conversions import folder_of
from tests.folder_answers import answered
from tests.looks import relative_error
from tests.megatron_hybrid_checkpoints import IDS, Hybrid, save_all
from tests.megatron_ranks import OTHERS
from tests.rank_threads import logits_of

BLOCKS = {"-**--*": 5, "*-*E-*E": 4}  # of patterns in which not every block has attention
TOLERANCE = 1e-5  # of the largest logit
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
SHARED = {
    **EXPERTS, "moe_ffn_hidden_size": 20, "moe_shared_expert_intermediate_size": 28,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5, "moe_router_load_balancing_type": "seq_aux_loss",
}  # fmt: skip
MIXED = {**EXPERTS, "qk_layernorm": True, "moe_ffn_hidden_size": 20}

# Name -> pattern, name of the same model by one rank, and what is given to Hybrid.
SAVES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "even": ("*-*-*-*-", "", {}),
    "even_tp2_pp2": ("*-*-*-*-", "even", {"tp_size": 2, "pp_size": 2}),
    "uneven": ("-**--*", "", {}),
    "uneven_files": ("-**--*", "uneven", {"tp_size": 2, "pp_size": 2, "classic": True}),
    "mamba": ("M-M*-M", "", {}),
    "mamba_tp2_pp2": ("M-M*-M", "mamba", {"tp_size": 2, "pp_size": 2}),
    "mamba_files": ("M-M*-M", "mamba", {"tp_size": 2, "pp_size": 2, "classic": True}),
}
# Releases after 0.16 draw stages in the pattern, and compute experts without Transformer Engine.
NEWER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "even_vp": ("*-|*-|*-|*-", "even", {"tp_size": 2, "pp_size": 2, "vp_size": 2}),
    "even_cut": ("*-*|-*-*-", "even", {"pp_size": 2}),
    "even_vp_files": (
        "*|-*-*|-*|-", "even", {"tp_size": 2, "pp_size": 2, "vp_size": 2, "classic": True},
    ),
    "mamba_experts": ("MEM*-E", "", {"settings": SHARED}),
    "mamba_experts_tp2": (
        "ME|M*-E", "mamba_experts", {"settings": SHARED, "tp_size": 2, "pp_size": 2},
    ),
    "mamba_experts_files": (
        "MEM|*-E", "mamba_experts", {"settings": SHARED, "pp_size": 2, "classic": True},
    ),
    "experts": ("*E*E", "", {"settings": EXPERTS}),
    "mixed": ("*-*E-*E", "", {"settings": MIXED}),
    "mixed_tp2": ("*-*E-*E", "mixed", {"settings": MIXED, "tp_size": 2}),
    "experts_tp2": ("*E*E", "experts", {"settings": EXPERTS, "tp_size": 2, "pp_size": 2}),
}  # fmt: skip


@pytest.mark.parametrize("python", [None, *OTHERS])
def test_every_way_of_cutting_gives_the_logits(python, tmp_path):
    saves = SAVES if python is None else SAVES | NEWER
    save_all(
        [
            Hybrid(str(tmp_path / name), pattern, str(tmp_path / whole) if whole else "", **given)
            for name, (pattern, whole, given) in saves.items()
        ],
        tmp_path,
        python,
    )
    for name, (pattern, whole, _) in saves.items():
        expected = torch.load(tmp_path / (whole or name) / "logits.pt")
        form = "huggingface" if set(pattern) & {"E", "M"} else "fastertransformer"
        folder = folder_of(
            tmp_path / name,
            tmp_path / "out" / name,
            output_format=form,
            given=(("start_id", "1"), ("end_id", "2")),
        )
        if form == "huggingface":
            found = answered([{"folder": str(folder), "ids": IDS}], None)[0]
        else:
            found = logits_of(folder, IDS, tp_size=1, pp_size=1)
        worst = relative_error(found, expected)
        assert worst < TOLERANCE, (name, worst)
        notes = " ".join(describe(tmp_path / name)["notes"])
        layers = f"{len(pattern.replace('|', ''))} layers"
        blocks = f"{BLOCKS.get(pattern, pattern.count('*'))} blocks"
        assert f"HybridModel, {layers if 'M' in pattern else blocks}" in notes
        assert pattern in notes
