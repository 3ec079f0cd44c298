"""Gradients of outputs and of auxiliary losses, against those of the references."""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.testing import assert_close

from regard.core.rows import Memory, Rows, pack
from regard.layers.attention.base import Attention
from regard.testing.cases import LONG, Case, extended, holes, inputs, reference, same


def check_gradient(case: Case) -> None:
    """Of the output, and of the auxiliary loss where one is trained, against those of the references."""
    built = case.build(bias=True)
    given = inputs(case, 9, B=2, S=11)
    learns = built.facts.auxiliary_loss

    def gradients(function: Callable[[Attention, dict[str, Tensor]], tuple[Tensor, Tensor | None]], training: bool):
        # a copy: what is learned without gradients must not reach the next call
        layer = copy.deepcopy(built).train(training)
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
        y, loss = function(layer, leaves)
        torch.manual_seed(7)
        ((y * torch.randn_like(y)).sum() + (0 if loss is None else 3 * loss)).backward()
        return {**{n: t.grad for n, t in leaves.items()}, **{n: p.grad for n, p in layer.named_parameters()}}

    def fast(layer: Attention, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        out = layer.forward_packed(leaves["x"], memory=Memory(leaves["memory"], None) if "memory" in leaves else None)
        assert (out.auxiliary_loss is not None) == (learns and layer.training), (
            f"declared loss={learns}, got {out.auxiliary_loss}"
        )
        return out.y, out.auxiliary_loss

    def slow(layer: Attention, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        # rows of one length weigh the same
        losses = [layer.reference_loss(*row) for row in zip(*leaves.values(), strict=True)] if learns else []
        return reference(layer, leaves), torch.stack(losses).mean() if learns else None

    def steps(layer: Attention, leaves: dict[str, Tensor]) -> tuple[Tensor, None]:
        memory = {name: tensor for name, tensor in leaves.items() if name != "x"}
        return extended(layer, leaves["x"], [4, 1, 4], **memory), None

    def equal(got: dict[str, Tensor | None], expected: dict[str, Tensor | None], what: str) -> None:
        for name, grad in expected.items():
            assert (got[name] is None) == (grad is None), f"{name}{what}: got {got[name]}, expected {grad}"
            if grad is not None:
                assert_close(got[name], grad, msg=lambda text, name=name: f"{name}{what}: {text}")

    exact = gradients(slow, learns)
    for name, grad in exact.items():
        assert grad is not None, f"the reference does not read {name}"
    equal(gradients(fast, learns), exact, "")
    if case.role != "self" and built.facts.split_invariant:
        equal(gradients(steps, False), gradients(fast, False), " through extend")


def check_loss(case: Case) -> None:
    """The auxiliary loss is one number, of the real tokens only: a row of padding and a token of it change nothing."""
    built = case.build()
    if not built.facts.auxiliary_loss:
        return
    tokens, keep = inputs(case, B=6), {"x": holes(LONG)}
    if case.role == "cross":
        keep["memory"] = holes(21, seed=4)

    def trained(x: Tensor, rows: Rows | None, memory: Memory | None) -> Tensor:
        found = copy.deepcopy(built).train().forward_packed(x, rows, memory=memory).auxiliary_loss
        assert found is not None
        return found

    def loss(rows: list[int], fill: float = 0.0) -> Tensor:
        packed = {}
        for name, real in keep.items():
            packed[name] = pack(torch.where(real[rows][..., None], tokens[name][rows], fill), real[rows])
        memory = None if case.role != "cross" else Memory(packed["memory"][0], packed["memory"][1].count)
        x, real_rows = packed["x"]
        return trained(x, real_rows, memory)

    for row in range(5):
        own = {name: tokens[name][row : row + 1, real[row]] for name, real in keep.items()}
        alone = trained(own["x"], None, None if case.role != "cross" else Memory(own["memory"], None))
        assert alone.shape == ()
        assert alone.isfinite()
        assert_close(loss([row]), alone)
        assert_close(loss([row, 5]), alone)
    for fill in (7.0, math.inf, math.nan):
        same(loss(list(range(6)), fill), loss(list(range(6))))
