"""What must not be seen: the future, and padding."""

import itertools
import math

import torch
from torch.testing import assert_close

from regard.testing.cases import LONG, Case, holes, inputs, refused, same


def check_causality(case: Case) -> None:
    if case.role != "causal":
        return
    layer = case.build(dtype=torch.float32)
    x = inputs(case, dtype=torch.float32)["x"]
    for cut in (1, 5, 14, 27):
        for seed, large in itertools.product((8, 9), (1.0, torch.finfo(torch.float32).max ** 0.25)):
            other = inputs(case, dtype=torch.float32, seed=seed)["x"]
            changed = torch.cat([x[:, :cut], other[:, cut:].clamp(-1, 1) * large], 1)
            if layer.facts.prefix_invariant:
                same(layer(changed)[:, :cut], layer(x)[:, :cut])
            if layer.facts.columns == "slots":
                # what a query gives to slots that have read a later token would move with that token
                same(layer.weights(changed)[:, :, :cut], layer.weights(x)[:, :, :cut])
    if layer.facts.columns == "slots":
        return
    future = torch.ones(LONG, LONG).triu(1).bool()
    assert not layer.weights(x)[..., future].any(), "weight on the future"


def check_prefix(case: Case) -> None:
    if case.role != "causal":
        return
    layer = case.build()
    x = inputs(case)["x"]
    whole = layer(x)
    moved = [(layer(x[:, :t]) - whole[:, :t]).abs().max().item() for t in (1, 2, 7, 16, 32)]
    if layer.facts.prefix_invariant:
        assert max(moved) < 1e-9, f"outputs of a prefix move by {moved}"
    else:
        assert max(moved) > 1e-9, "declared as moving with the length, but nothing moved"


def check_padding(case: Case) -> None:
    # with biases the zeros of padding have keys and values too
    layer = case.build(bias=True)
    keep = holes(LONG)
    if layer.facts.padding == "none":
        with refused("padding"):
            layer(inputs(case, B=6)["x"], keep=keep)
        return
    given = inputs(case, B=6)
    masks = {"keep": keep}
    if case.role == "cross":
        masks["memory_keep"] = holes(21, seed=4)[torch.tensor([3, 2, 0, 1, 5, 4])]
    y = layer(**given, **masks)
    alone = torch.zeros_like(y)
    for row in range(6):
        own = {"x": given["x"][row : row + 1, keep[row]]}
        if case.role == "cross":
            own["memory"] = given["memory"][row : row + 1, masks["memory_keep"][row]]
            if not own["memory"].shape[1]:
                continue
        if own["x"].shape[1]:
            alone[row, keep[row]] = layer(**own)[0]
    assert_close(y, alone)
    # what stands in the padding reaches neither the outputs nor the gradients, to the last bit
    layer = case.build(dtype=torch.float32)
    results = []
    for fill in (0.0, 7.0, -(torch.finfo(torch.float32).max ** 0.25), 1e30, math.inf, math.nan):
        filled = {n: t.float().clone() for n, t in given.items()}
        filled["x"][~keep] = fill
        if case.role == "cross":
            filled["memory"][~masks["memory_keep"]] = fill
        for tensor in filled.values():
            tensor.requires_grad_()
        layer.zero_grad()
        y = layer(**filled, **masks)
        y.square().sum().backward()
        grads = [p.grad for p in layer.parameters() if p.grad is not None]
        results.append([y.detach(), *grads, *(t.grad for t in filled.values())])
    for result in results:
        for got, expected in zip(result, results[0], strict=True):
            assert got.isfinite().all()
            same(got, expected)
