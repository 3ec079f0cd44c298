"""Half precision: finite, and as exact as its rounding allows."""

import copy
import itertools
import math
from typing import Any

import torch
from torch.testing import assert_close

from regard.core.state import state_bytes
from regard.testing.cases import LONG, Case, extended, inputs


def check_low_precision(case: Case) -> None:
    """Finite at logits of 1e4, or (declared) float16 overflows there; at moderate ones no further off than rounding the
    inputs once, times two."""
    sizes = {"width": 64, "heads": 4, "head_width": 64}
    for dtype, logits in itertools.product((torch.bfloat16, torch.float16), (4.0, 1e4)):
        low = case.build(dtype=dtype, **sizes)
        layer: Any = copy.deepcopy(low).float()  # what it projects is not in the contract
        draw = torch.Generator().manual_seed(2)
        given = {n: torch.randn(2, t.shape[1], 64, generator=draw) for n, t in inputs(case, B=2).items()}
        if hasattr(layer, "project") and {"q", "k"} <= set(layer.inputs):
            source = given.get("memory", given["x"])
            keys = layer.project_heads("k", source).repeat_interleave(4 // layer.shape.kv_heads, 1)
            top = (layer.project_heads("q", given["x"]) @ keys.mT).abs().max()
            factor = math.sqrt(logits / (layer.shape.head_width**-0.5 * top.item()))
        else:
            factor = math.sqrt(logits / 4)
        given = {n: (t * factor).to(dtype) for n, t in given.items()}
        with torch.no_grad():
            got = low(**given).float()
            if low.facts.overflows and dtype == torch.float16 and logits == 1e4:
                assert not got.isfinite().all(), "declared as overflowing float16 at large logits, but it does not"
                continue
            assert got.isfinite().all(), f"{dtype} at logits of {logits:g}: not finite"
            exact = layer(**{n: t.float() for n, t in given.items()})
            room, eps = torch.zeros_like(exact), torch.finfo(dtype).eps
            for _ in range(4):
                near = copy.deepcopy(layer)
                for parameter in near.parameters():
                    parameter.mul_(1 + eps * (2 * torch.rand_like(parameter) - 1))
                moved = near(**{n: t.float() * (1 + eps * (2 * torch.rand(t.shape) - 1)) for n, t in given.items()})
                room = torch.maximum(room, (moved - exact).abs())
            allowed = 2 * room.max() + 2 * eps * exact.abs().max()
            assert (got - exact).abs().max() <= allowed, (
                f"{dtype} at logits of {logits:g}: off by {(got - exact).abs().max():.3g}, allowed {allowed:.3g}"
            )


def _reserved(layer: Any, capacity: int) -> int:
    """Bytes that a state reserves for a number of tokens; 0 where the layer does not decode."""
    return 0 if layer.facts.state is None else state_bytes(layer.start(2, capacity=capacity))


def check_autocast(case: Case) -> None:
    """Half precision chosen from outside, whole and in steps; what is kept of each token is of half precision too."""
    layer = case.build(dtype=torch.float32)
    rooms = [_reserved(layer, capacity) for capacity in (LONG, 2 * LONG)] if case.role == "causal" else [0, 0]
    given = inputs(case, dtype=torch.float32)
    keep = torch.arange(LONG) < torch.tensor([LONG, 9, 17])[:, None]
    memory = {name: tensor for name, tensor in given.items() if name == "memory"}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = layer(**given, keep=keep) if layer.facts.padding == "any" else layer(**given)
        assert y.isfinite().all()
        if case.role != "self" and layer.facts.padding == "any":
            steps = extended(layer, given["x"], [13, 7, 1, 12], keep, **memory)
            assert steps.isfinite().all()
            grows = rooms[1] > rooms[0]
            assert not grows or _reserved(layer, 2 * LONG) < rooms[1], "the state is as large as in float32"
            if layer.facts.split_invariant:
                exact = layer.float()(**given, keep=keep)
                assert_close(steps.float(), exact.float(), rtol=0.1, atol=0.1 * exact.abs().max().item())
