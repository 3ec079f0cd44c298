"""The cost of a training step, counted at two lengths."""

import contextlib
import math
import re
from dataclasses import replace

import torch
from torch import Tensor

from regard.core.tally import Tally
from regard.layers.attention.base import Facts
from regard.testing.cases import Case, inputs


def cost(case: Case, T: int) -> dict[str, int]:
    """The counted work of a training step: operations, elements written, bytes (the largest tensor, what is saved)."""
    # a table for the longest input grows with it
    layer = replace(case, spec=re.sub(r"longest=\d+", f"longest={T}", case.spec)).build(dtype=torch.float32)
    # inside a model every layer hands its gradient on, also one without parameters
    given = {name: tensor.requires_grad_() for name, tensor in inputs(case, T, B=1, S=T, dtype=torch.float32).items()}
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        # held, so that no other tensor takes its address
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with Tally() as tally:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            y = layer(**given)
        y.sum().backward()
    return {
        "flops": tally.flops,
        "written": tally.written,
        "largest": tally.largest,
        "saved": sum(tensor.untyped_storage().nbytes() for tensor in saved.values()),
    }


def check_cost(case: Case) -> None:
    """The exponents of a step, forward and backward, counted at two lengths."""
    facts = case.build().facts
    if facts.time.exponent == 1.5:
        # roots without rounding, and far from where the projections, which are linear, are most of the work
        _check_growth(case, facts, 16384, 4)
    elif facts.time.exponent == 2:
        # what is quadratic may show it early, and then takes long later
        for N in (256, 512):
            with contextlib.suppress(AssertionError):
                _check_growth(case, facts, N, 2)
                return
        _check_growth(case, facts, 1024, 2)
    else:
        _check_growth(case, facts, 1024, 2)


def _check_growth(case: Case, facts: Facts, N: int, factor: int) -> None:
    short, long = cost(case, N), cost(case, factor * N)
    # a mixer may multiply no matrix and save nothing
    grown = {name: math.log(max(long[name], 1) / max(short[name], 1), factor) for name in short}
    time, memory = max(grown["flops"], grown["written"]), max(grown["largest"], grown["saved"])
    assert abs(time - facts.time.exponent) < 0.1, f"time grows with exponent {time:.2f}: {grown}"
    assert abs(memory - facts.memory.exponent) < 0.1, f"memory grows with exponent {memory:.2f}: {grown}"
    if facts.memory.exponent < 2:
        assert long["largest"] < 4 * (factor * N) ** 2, "a tensor of N x N"
