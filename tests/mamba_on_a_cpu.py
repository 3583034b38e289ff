"""Stand-ins, on a CPU, of the kernels that megatron-core's Mamba layers take from other packages.

All the rest, among it every split into parts and every cut by ranks, is megatron-core's own.
"""

import importlib.util
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import torch


def rearrange(tensor: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
    """Return what einops does, of patterns with at most one group of two axes."""
    before, after = (side.replace("(", " ( ").split() for side in pattern.split("->"))
    if "(" in before:
        at = before.index("(")
        tensor = tensor.unflatten(
            at, [sizes.get(name.strip(")"), -1) for name in before[at + 1 : at + 3]]
        )
    names, wanted = ([each.strip("()") for each in side if each != "("] for side in (before, after))
    if "1" in names and "1" not in wanted:
        tensor = tensor.squeeze(names.index("1"))
        names.remove("1")
    tensor = tensor.permute([names.index(each) for each in wanted])
    return tensor.flatten(after.index("("), after.index("(") + 1) if "(" in after else tensor


def scan(
    x: Any, dt: Any, a: Any, b: Any, c: Any, _: int, *, dt_bias: Any, **others: Any
) -> torch.Tensor:
    """Return the output of the recurrence, token by token: (batch, tokens, heads, size)."""
    heads = x.shape[2] // b.shape[2]
    b, c = (each.repeat_interleave(heads, 2) for each in (b, c))
    steps = torch.nn.functional.softplus(dt + dt_bias)
    state = x.new_zeros(*x[:, 0].shape, b.shape[-1])
    outputs = []
    for token in range(x.shape[1]):
        step = steps[:, token, :, None]
        state = state * torch.exp(step * a[:, None])[..., None]
        state = state + (step * x[:, token])[..., None] * b[:, token, :, None]
        outputs.append((state * c[:, token, :, None]).sum(-1) + others["D"][:, None] * x[:, token])
    return torch.stack(outputs, 1)


class RMSNorm(torch.nn.Module):
    """A norm of each group's heads, after a gate."""

    def __init__(self, size: int, *, eps: float, group_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return the normalised product, times the scales."""
        x = (x * torch.nn.functional.silu(z)).unflatten(-1, (-1, self.group_size))
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * (
            self.weight
        )


def install() -> None:
    """Put them where megatron-core, not yet imported, looks for them."""
    triton = "mamba_ssm.ops.triton"
    found: dict[str, dict[str, Any]] = {
        "einops": {"rearrange": rearrange, "repeat": None},
        "mamba_ssm": {}, "mamba_ssm.ops": {}, triton: {},
        f"{triton}.layernorm_gated": {"RMSNorm": RMSNorm},
        f"{triton}.selective_state_update": {"selective_state_update": None},
        f"{triton}.ssd_combined": {
            "mamba_chunk_scan_combined": scan, "mamba_split_conv1d_scan_combined": scan,
        },
    }  # fmt: skip
    if importlib.util.find_spec("triton") is None:  # which decorates kernels that are not called
        importlib.import_module("torch._inductor.codecache")  # which finds out that there is none
        anything = {"__getattr__": lambda name: MagicMock(name=name)}
        found |= {"triton": anything, "triton.language": anything}
    for name, members in found.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    importlib.import_module("megatron.core.ssm.mamba_mixer")

    if "__getattr__" in vars(sys.modules["triton"]):  # torch would use it
        del sys.modules["triton"], sys.modules["triton.language"]
