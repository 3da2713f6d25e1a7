"""A matrix product with float32 weights in training: multiplied in a narrower dtype, gradients summed in float32.

The weights of the one layer are used once a step of the unroll. Autograd would add up those gradients in the dtype of
the product; here each is added by the product itself to the float32 gradient, at the same memory traffic.
"""

from typing import Any

import torch
from torch import nn


class Projection(nn.Linear):
    """A linear layer without bias. `working`: the copy of its weight that inputs of that dtype are multiplied with."""

    working: torch.Tensor | None = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs] -> [n, outputs]."""
        if torch.is_grad_enabled():
            return _Product.apply(x, self.weight, self.used(x.dtype))
        return nn.functional.linear(x, self.used(x.dtype))

    def used(self, dtype: torch.dtype) -> torch.Tensor:
        """What inputs of `dtype` are multiplied with."""
        return self.working if self.working is not None and self.working.dtype == dtype else self.weight.detach()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, working: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, working)
        ctx.weight = weight
        return x @ working.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        x, working = ctx.saved_tensors
        if ctx.weight.requires_grad:
            add_gradient(ctx.weight, grad, x)
        return grad @ working if ctx.needs_input_grad[0] else None, None, None


def add_gradient(weight: nn.Parameter, grad: torch.Tensor, x: torch.Tensor) -> None:
    """Add grad.T @ x to the weight's gradient, summed in its own dtype. `grad` [n, outputs], `x` [n, inputs]."""
    weight.grad = add_product(weight.grad, grad.T, x, weight.dtype)


def add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """total + a @ b in `dtype`, in place where there is a total already."""
    if a.is_cuda and dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
        if total is None:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    product = (a @ b).to(dtype) if total is None or a.dtype != dtype else None
    if total is None:
        assert product is not None
        return product
    return total.add_(product) if product is not None else total.addmm_(a, b)
