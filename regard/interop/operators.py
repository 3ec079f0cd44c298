"""Operators of PyTorch that its ONNX exporter does not translate, in operators of ONNX."""

from collections.abc import Callable
from typing import Any

import torch


def translations() -> dict[Callable, Callable]:
    """By operator of PyTorch, for `torch.onnx.export(custom_translation_table=...)`."""
    return {torch.ops.aten.sort.stable: sort_stable, torch.ops.aten.searchsorted.Tensor: search_sorted}


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


def search_sorted(
    ascending: Any,
    values: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """torch.searchsorted: how many of the sorted numbers [..., S] stand before each value [..., T]."""
    import onnxscript
    from onnxscript import ir

    op: Any = onnxscript.opset20
    if sorter is not None:
        raise NotImplementedError("searchsorted with a sorter")
    ascending, values = op.Unsqueeze(ascending, [-2]), op.Unsqueeze(values, [-1])
    before = op.LessOrEqual(ascending, values) if right or side == "right" else op.Less(ascending, values)
    count = op.ReduceSum(op.Cast(before, to=ir.DataType.INT64), [-1], keepdims=0)
    return op.Cast(count, to=ir.DataType.INT32) if out_int32 else count
