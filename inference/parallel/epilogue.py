"""Options of matrix products, and their epilogue: bias, activation and residual."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional

from export_scripts.families.layout.architecture import Activation


@dataclass(frozen=True)
class GemmOptions:
    """Form of all matrices; all but `int8` needs a GPU and 16 bits."""

    int8: bool = False  # whole numbers of 8 bits, one scale per output
    fp8: bool = False  # E4M3, activations too
    batch_invariant: bool = False  # the bits of a row do not depend on the other rows


PLAIN_GEMM = GemmOptions()

GemmActivation = Literal["gelu_tanh", "gelu_erf", "relu", "relu2", "silu"]


def gemm_activation(activation: Activation, *, exact_gelu: bool = False) -> GemmActivation:
    """Return the form of an architecture's activation that a product can apply.

    Raises:
        ValueError: It has parameters of its own.
    """
    if activation == "xielu":
        raise ValueError("activation xielu: only dense decoders have its parameters")
    if activation == "gelu":
        return "gelu_erf" if exact_gelu else "gelu_tanh"
    return activation


def activate(x: Tensor, activation: GemmActivation) -> Tensor:
    """Return the activation of `x`, which may be overwritten."""
    if activation == "relu":
        return functional.relu_(x)
    if activation == "relu2":
        return functional.relu_(x).square_()
    if activation == "silu":
        return functional.silu(x, inplace=True)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def ordered_sum(parts: Tensor, *, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Return the sum of parts (T, N, E) + bias + residual, added up in fp32 one by one."""
    terms = [*parts, *(term for term in (bias, residual) if term is not None)]
    total: Tensor = terms[0].float()
    for term in terms[1:]:
        total = total + term
    return total.to(parts.dtype)


def added(y: Tensor, *, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Return y + bias + residual, (N, O); `y` is overwritten."""
    y = y if bias is None else y.add_(bias)
    return y if residual is None else y.add_(residual)


@dataclass(frozen=True)
class Epilogue:
    """Bias and activation of a product's outputs.

    With `gated` outputs are pairs of a gate and what its activation multiplies. With `rounds` one
    product alone takes them: FP8 rows may be rounded for it.
    """

    bias: Tensor | None = None  # (O,)
    activation: GemmActivation | None = None
    gated: bool = False
    rounds: bool = False

    def finish(self, y: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return activation(y) + residual, (N, O), for y with its bias, which is overwritten."""
        if self.activation is not None:
            y = activate(y, self.activation)
        return y if residual is None else y.add_(residual)
