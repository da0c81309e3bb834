"""Linear layers whose weights stay in fp8: half the memory of 16 bits, computed in the dtype of their input."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..loaders.precision import FP8, true_values

LARGEST = 448.0
"""Of float8_e4m3fn."""

SMALLEST = 1e-12
"""What counts as the largest value of a token that is all but zero."""

GRANULE = 16
"""fp8 products need both sizes of a weight to be multiples of this."""

HIDES = ("wo",)
"""Modules whose weight is shown as int8: transformers' T5 casts the input of `wo` to its weight's dtype unless that is
int8, and an input in fp8 would be ruined."""


class Fp8Linear(nn.Module):
    """x W^T + b with W = weight * scale; weight [out, in] in fp8, scale float32 on the CPU without dimensions, or None
    for 1.

    fast: multiply inputs in bfloat16 as fp8 (e4m3fn only) where the sizes allow it, with a scale for each token, so
    that a token's result does not depend on which others are in the call. Scales for inputs that a file may hold are
    not used: they are one for all tokens and cut off what is larger.
    """

    def __init__(self, weight: Tensor, scale: Tensor | None, bias: Tensor | None, fast: bool) -> None:
        super().__init__()
        self.fp8 = weight.dtype
        self.scale = scale
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.fast = fast and self.fp8 == torch.float8_e4m3fn and not any(size % GRANULE for size in weight.shape)
        outputs = weight.new_full((1, weight.shape[0]), 1.0 if scale is None else scale.item(), dtype=torch.float32)
        self.register_buffer("output_scales", outputs if self.fast else None, persistent=False)

    @property
    def stored(self) -> Tensor:
        """The weight in fp8, whatever dtype it is shown in."""
        return self.weight.view(self.fp8)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The true weight, in memory of its own."""
        return true_values(self.stored, self.scale, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.fast and x.dtype == torch.bfloat16:
            return self._multiply_in_fp8(x)
        return F.linear(x, self.dequantised(x.dtype), self.bias)

    def _multiply_in_fp8(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1, keepdim=True)
        factor = (LARGEST / largest.float().clamp(min=SMALLEST)).to(x.dtype)
        tokens = (rows * factor).to(self.fp8).contiguous()
        result = torch._scaled_mm(tokens, self.stored.t(), scale_a=factor.float().reciprocal(),
                                  scale_b=self.output_scales, bias=self.bias, out_dtype=x.dtype)
        return result.view(*x.shape[:-1], -1)


def multiplies(device: torch.device) -> str:
    """"" if the device multiplies in fp8 by the call that `Fp8Linear` makes, else why not."""
    with torch.inference_mode(False), torch.no_grad():
        eye = torch.eye(GRANULE, dtype=torch.bfloat16, device=device)
        layer = Fp8Linear(eye.to(torch.float8_e4m3fn), None, None, fast=True)
        try:
            right = torch.equal(layer(eye), eye)
        except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
            return str(error).splitlines()[0]
    return "" if right else "a product came out wrong"


def install(network: nn.Module, scales: Mapping[str, Tensor | None], fast: bool) -> None:
    """Puts an Fp8Linear in the place of each linear layer whose weight is in fp8. scales: by weight name, None = 1."""
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Linear) and module.weight.dtype in FP8:
            bias = None if module.bias is None else module.bias.data
            made = Fp8Linear(module.weight.data, scales.get(f"{name}.weight"), bias, fast)
            parent, _, leaf = name.rpartition(".")
            if leaf in HIDES:
                made.weight = nn.Parameter(made.weight.data.view(torch.int8), requires_grad=False)
            setattr(network.get_submodule(parent), leaf, made)
