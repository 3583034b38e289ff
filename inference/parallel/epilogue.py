"""Options of matrix products, and their epilogue: bias, activation and residual."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional

from export_scripts.families.layout.architecture import Activation


@dataclass(frozen=True)
class GemmOptions:
    """Options of all matrix products; all but `int8` need a GPU and 16 bits."""

    int8: bool = False  # 8-bit integers, one scale per output
    fp8: bool = False  # E4M3, for activations, too
    batch_invariant: bool = False  # a row's bits do not depend on the other rows


PLAIN_GEMM = GemmOptions()

GemmActivation = Literal["gelu_tanh", "gelu_erf", "relu", "relu2", "silu"]


def gemm_activation(activation: Activation, *, exact_gelu: bool = False) -> GemmActivation:
    """Return the activation of an architecture as a product can apply it.

    Raises:
        ValueError: The activation has parameters.
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
    """Return the sum of parts (T, N, E) + bias + residual, added in fp32 in a fixed order."""
    terms = [*parts, *(term for term in (bias, residual) if term is not None)]
    total: Tensor = terms[0].float()
    for term in terms[1:]:
        total = total + term
    return total.to(parts.dtype)


def add_terms(y: Tensor, *, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Return y + bias + residual, (N, O); `y` is overwritten."""
    y = y if bias is None else y.add_(bias)
    return y if residual is None else y.add_(residual)


@dataclass(frozen=True)
class Epilogue:
    """Bias and activation of a product's outputs.

    With `gated`, outputs are pairs of a gate and the value that the activated gate multiplies. With
    `rounds`, only one product reads the outputs, which may be rounded to FP8 for it.
    """

    bias: Tensor | None = None  # (O,)
    activation: GemmActivation | None = None
    gated: bool = False
    rounds: bool = False

    def finish(self, y: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return activation(y) + residual, (N, O), for y with bias; y is overwritten."""
        if self.activation is not None:
            y = activate(y, self.activation)
        return y if residual is None else y.add_(residual)
