"""Linear layers with prepacked weights, for inference on a CPU.

A product of few rows spends much of its time on rearranging the weights for the processor, at every call. Weights that
are stored as it reads them give the same numbers faster: as oneDNN lays them out or, small ones on a processor of
Intel, transposed for MKL. In bfloat16 or int8 they also take half or a quarter of the multiplications, where the
processor has instructions for them.

Activations are rounded row by row, so that the result for a sentence does not depend on the others of its batch.
"""

import functools
import platform
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Precision = Literal["float32", "bfloat16", "int8"]
ROWS = 64  # the number of rows that the layout of oneDNN is chosen for; it serves any number
# Numbers of a small weight, 1 MiB of them. With 5 to 80 rows on an Intel Xeon, a call of oneDNN takes 1.2 to 2 times as
# long as one of MKL on one core, and 0.9 to 2 times on two, most of it before the product; with larger ones from
# memory, 0.6 to 0.9 times. MKL has no AVX-512 for other processors: on an AMD EPYC, oneDNN takes 0.8 times as long with
# 20 rows and half as long with 80.
SMALL = 2**18


class Packed(nn.Module, ABC):
    """y = x W^T + b. `weight` and `bias` are those of the layer it replaces; later changes of them are not seen. Where
    gradients flow through it to its input, it is that layer."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return F.linear(x, self.weight, self.bias)
        return self.multiply(x)

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """The product from the prepacked weights."""

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}"


class Transposed(Packed):
    """Weights column by column, which is the order in which a product of few rows reads them."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        self.layout = linear.weight.detach().t().contiguous().t()

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layout, self.bias)


class PackedFloat(Packed):
    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__(linear)
        self.dtype = dtype
        self.layout = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype), ROWS)
        self.offset = None if linear.bias is None else linear.bias.detach().to(dtype)

    def multiply(self, x: Tensor) -> Tensor:
        count = x.numel() // x.shape[-1]
        size = padded_count(count)
        if size == count:
            return self._product(x)
        rows = F.pad(x.reshape(count, -1), (0, 0, 0, size - count))
        return self._product(rows)[:count].view(*x.shape[:-1], len(self.weight))

    def _product(self, x: Tensor) -> Tensor:
        y = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.layout, self.offset, "none", [], "")
        return y.to(x.dtype)


def padded_count(rows: int) -> int:
    """The number of rows after padding. oneDNN compiles a kernel for each number of rows that it meets, which takes
    0.4 ms and half a megabyte, and caches 1,024 of them. Up to 64 rows are not padded; more are, by 7 rows or a
    sixteenth at most, so that a server meets few numbers."""
    if rows <= 64:
        return rows
    step = max(8, 1 << (rows - 1).bit_length() - 5)
    return -(-rows // step) * step


class PackedInteger(Packed):
    """Weights in 8 bits with a scale for each output, activations with one for each row; sums in 32 bits."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        weight = linear.weight.detach()
        self.scale = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(weight.dtype).tiny)
        self.layout = (weight / self.scale[:, None]).round().to(torch.int8).t()
        if weight.shape[1] == 1:
            # PyTorch's product misreads a matrix of one row that says it is transposed
            self.layout = self.layout.clone(memory_format=torch.contiguous_format)

    def multiply(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        step = rows.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny).div_(127)
        # PyTorch has no public product of int8
        product = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
        y = product((rows / step).round_().to(torch.int8), self.layout) * step
        y = y.mul_(self.scale) if self.bias is None else torch.addcmul(self.bias, y, self.scale)
        return y.view(*x.shape[:-1], len(self.weight))


def pack_linears(model: nn.Module, precision: Precision = "float32") -> nn.Module:
    """Replaces the linear layers of a model on the CPU in place; the model then only does inference."""
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        raise ValueError(f"only a float32 model on the CPU can be packed, got {weight.dtype} on {weight.device}")
    if precision not in ("float32", "bfloat16", "int8"):
        raise ValueError(f"precision must be 'float32', 'bfloat16' or 'int8', got {precision!r}")
    if precision != "float32" and not torch.backends.mkldnn.is_available():
        raise ValueError(f"precision {precision!r} needs oneDNN, which this PyTorch lacks: use 'float32'")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                module.register_module(name, _pack(child, precision))
    return model.eval().requires_grad_(False)


def _pack(linear: nn.Linear, precision: Precision) -> Packed:
    if precision == "int8":
        return PackedInteger(linear)
    is_for_mkl = linear.weight.numel() <= SMALL and torch.backends.mkl.is_available() and is_intel()
    if precision == "float32" and (is_for_mkl or not torch.backends.mkldnn.is_available()):
        return Transposed(linear)
    return PackedFloat(linear, getattr(torch, precision))


@functools.cache
def is_intel() -> bool:
    """Whether the processor is one of Intel's."""
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        described = platform.processor()  # as Windows describes it
    return "GenuineIntel" in described
