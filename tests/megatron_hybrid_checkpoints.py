"""HybridModels saved by megatron-core itself, by gloo processes on the CPU, with their logits.

Runs as a program, with the interpreter of any release of megatron-core from 0.16 on, which needs
nothing else than torch. Up to 0.17 the class is MambaModel.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests import mamba_on_a_cpu
from tests.megatron_ranks import be_ranks, run_ranks

IDS = [3, 17, 41, 5, 5, 29, 11, 50, 2, 8]
VOCABULARY = 56

SIZES: dict[str, Any] = {
    "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 8, "layernorm_epsilon": 1e-5, "normalization": "RMSNorm",
    "add_bias_linear": False,
}  # fmt: skip
# Of a model with Mamba layers, which is a Nemotron-H then.
MAMBA: dict[str, Any] = {
    "mamba_num_heads": 8, "mamba_head_dim": 6, "mamba_num_groups": 2, "mamba_state_dim": 5,
}  # fmt: skip


@dataclass(frozen=True)
class Hybrid:
    """One checkpoint to save.

    Attributes:
        folder: Where the run goes; its logits lie there, too, if `whole` is not given.
        pattern: Of the layers, `|` between stages.
        whole: The folder of the same model as one rank has saved it, before.
        tp_size: Tensor-parallel ranks.
        pp_size: Pipeline stages.
        vp_size: Parts of each stage in an interleaved schedule.
        classic: Whether each rank saves a file of its own.
        settings: Further ones of TransformerConfig.
    """

    folder: str
    pattern: str
    whole: str = ""
    tp_size: int = 1
    pp_size: int = 1
    vp_size: int = 1
    classic: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> Mapping[str, Any]:
        """All settings of TransformerConfig that it states."""
        return {**SIZES, **(MAMBA if self.has_mamba else {}), **self.settings}

    @property
    def ranks(self) -> int:
        """The number of processes that save it."""
        return self.tp_size * self.pp_size

    @property
    def has_mamba(self) -> bool:
        """Whether it is a Nemotron-H."""
        return "M" in self.pattern


def save_all(saves: Sequence[Hybrid], work_dir: Path, python: str | None = None) -> None:
    """Save checkpoints in processes of their own, of another interpreter than this if given."""
    run_ranks("tests.megatron_hybrid_checkpoints", saves, work_dir, python=python)


def _layers(settings: Any) -> dict[str, Any]:
    """Return what builds attention, MLPs and experts, of megatron-core's own modules."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    without = {
        "attention": {
            "pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp,
        },
        "mlp": {
            "input_layernorm": IdentityOp, "self_attention": IdentityOp,
            "self_attn_bda": IdentityFuncOp,
        },
    }  # fmt: skip
    mixer = ModuleSpec(
        MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    )
    layer = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    found = {"mamba_layer": ModuleSpec(MambaLayer, submodules=layer)}
    for name, experts in (("attention", None), ("mlp", None), ("moe", settings.num_moe_experts)):
        spec = get_gpt_layer_local_spec(
            num_experts=experts, normalization=settings.normalization,
            qk_layernorm=settings.qk_layernorm,
        )  # fmt: skip
        parts = replace(spec.submodules, **without["mlp" if name == "moe" else name])
        module = MLPLayer if name == "mlp" else spec.module
        found[f"{name}_layer"] = ModuleSpec(module=module, submodules=parts)
    return found


def _part(save: Hybrid, vp_stage: int | None) -> Any:
    """Return a part of this rank's model."""
    from megatron.core import parallel_state
    from megatron.core.activations import squared_relu
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {
        "tensor_model_parallel_size": save.tp_size, "pipeline_model_parallel_size": save.pp_size,
        "num_layers": len(save.pattern.partition("/")[0].replace("|", "")),
    }  # fmt: skip
    if vp_stage is not None:
        sizes["virtual_pipeline_model_parallel_size"] = save.vp_size
    settings = TransformerConfig(
        gated_linear_unit=not save.has_mamba,
        activation_func=squared_relu if save.has_mamba else torch.nn.functional.silu,
        use_mamba_mem_eff_path=False,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        **save.sizes,
        **sizes,
    )
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True) and not vp_stage
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True) and (
        vp_stage in (None, save.vp_size - 1)
    )
    common = {
        "vocab_size": VOCABULARY, "max_sequence_length": 64, "pre_process": first,
        "post_process": last, "position_embedding_type": "none" if save.has_mamba else "rope",
    }  # fmt: skip
    try:
        from megatron.core.models.hybrid import hybrid_block
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        hybrid_block.TENorm = WrappedTorchNorm
        spec = ModuleSpec(
            hybrid_block.HybridStack,
            submodules=hybrid_block.HybridStackSubmodules(**_layers(settings)),
        )
        return HybridModel(
            settings, spec, hybrid_layer_pattern=save.pattern, vp_stage=vp_stage, **common
        )
    except ImportError:
        from megatron.core.models.mamba import MambaModel
        from megatron.core.ssm import mamba_block

        mamba_block.TENorm = WrappedTorchNorm
        spec = ModuleSpec(
            mamba_block.MambaStack,
            submodules=mamba_block.MambaStackSubmodules(**_layers(settings)),
        )
        return MambaModel(settings, spec, hybrid_override_pattern=save.pattern, **common)


def _arguments(save: Hybrid, parts: Sequence[Any]) -> argparse.Namespace:
    """Return what Megatron-LM calls these settings."""
    key = "hybrid_layer_pattern" if hasattr(parts[0], "hybrid_layer_pattern") else (
        "hybrid_override_pattern"
    )  # fmt: skip
    settings = {
        {"num_moe_experts": "num_experts"}.get(name, name): value
        for name, value in save.sizes.items()
    }
    return argparse.Namespace(
        **settings,
        **{key: save.pattern},
        is_hybrid_model=True,
        num_layers=parts[0].config.num_layers,
        norm_epsilon=SIZES["layernorm_epsilon"],
        group_query_attention=True,
        swiglu=not save.has_mamba,
        squared_relu=save.has_mamba,
        position_embedding_type="none" if save.has_mamba else "rope",
        use_rotary_position_embeddings=not save.has_mamba,
        rotary_base=10000,
        rotary_percent=1.0,
        max_position_embeddings=64,
        untie_embeddings_and_output_weights=True,
        tensor_model_parallel_size=save.tp_size,
        pipeline_model_parallel_size=save.pp_size,
        virtual_pipeline_model_parallel_size=save.vp_size if len(parts) > 1 else None,
        params_dtype=torch.float32,
        padded_vocab_size=VOCABULARY,
    )


def _save(save: Hybrid) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    rank = torch.distributed.get_rank()
    folder = Path(save.folder, "iter_0000007")
    if rank == 0:
        folder.mkdir(parents=True)
        Path(save.folder, "latest_checkpointed_iteration.txt").write_text("7")
    torch.distributed.barrier()
    interleaved = {"virtual_pipeline_model_parallel_size": save.vp_size} if save.vp_size > 1 else {}
    parallel_state.initialize_model_parallel(save.tp_size, save.pp_size, **interleaved)
    torch.manual_seed(5)
    stages = range(save.vp_size) if interleaved else (None,)
    parts = [_part(save, stage) for stage in stages]
    names = [f"model{number}" for number in range(len(parts))] if interleaved else ["model"]
    for part in parts:
        part.eval()
        for name, value in part.named_parameters():
            if name.endswith("dt_bias"):  # some time steps are tiny
                torch.nn.init.normal_(value, -4.0, 3.0)
            elif value.ndim == 1:
                torch.nn.init.normal_(value, 1.0, 0.1)
            elif "router" not in name:
                torch.nn.init.normal_(value, 0.0, 0.3)
        if save.whole:
            wanted = part.sharded_state_dict()
            part.load_state_dict(
                dist_checkpointing.load(wanted, str(Path(save.whole, folder.name))), strict=False
            )
    if not save.whole:
        ids = torch.tensor([IDS])
        mask = torch.ones(len(IDS), len(IDS), dtype=torch.bool).triu(1)[None, None]
        with torch.no_grad():
            logits = parts[0](ids, torch.arange(len(IDS))[None], mask)[0]
        if rank == 0:
            torch.save(logits, Path(save.folder, "logits.pt"))
    state = {
        "args": _arguments(save, parts), "checkpoint_version": 3.0, "iteration": 7,
    }  # fmt: skip
    if save.classic:
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        name = f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if save.pp_size > 1 else "")
        if parallel_state.get_data_parallel_rank() == 0:
            (folder / name).mkdir()
            models = {
                each: part.state_dict_for_save_checkpoint()
                for each, part in zip(names, parts, strict=True)
            }
            torch.save(state | models, folder / name / "model_optim_rng.pt")
    else:
        models = {each: part.sharded_state_dict() for each, part in zip(names, parts, strict=True)}
        dist_checkpointing.save(state | models, str(folder))
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()


def main(plan: Path) -> int:
    """Save the checkpoints of a plan."""
    mamba_on_a_cpu.install()
    return be_ranks(plan, lambda item: _save(Hybrid(**item)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
