"""Operators of PyTorch that its ONNX exporter does not translate, in operators of ONNX."""

from collections.abc import Callable
from typing import Any

import torch


def translations() -> dict[Callable, Callable]:
    """By operator of PyTorch, for `torch.onnx.export(custom_translation_table=...)`."""
    return {torch.ops.aten.sort.stable: sort_stable}


def sort_stable(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """torch.sort(x, stable=True): among equal values TopK takes the one that comes first, whichever way it sorts."""
    import onnxscript
    from onnxscript import ir

    op: Any = onnxscript.opset20  # its annotations are of values, and not of what stands for them in a graph
    # TopK compares no booleans
    numbers = op.Cast(x, to=ir.DataType.INT64) if x.dtype == ir.DataType.BOOL else x
    size = op.Shape(x, start=dim, end=dim + 1 if dim != -1 else None)
    values, places = op.TopK(numbers, size, axis=dim, largest=int(descending), sorted=1)
    return op.Cast(values, to=x.dtype), places
