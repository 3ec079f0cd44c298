"""States: any split of the tokens, prompts of different lengths, rows selected, and the size of what is kept."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.core.rows import Rows, pack, unpack
from regard.core.tally import tensors_of
from regard.testing.cases import CUTS, LONG, Case, extended, holes, inputs, replayed


def check_split(case: Case) -> None:
    if case.role == "self":
        return
    layer = case.build()
    for grad, cuts in [(False, cuts) for cuts in CUTS] + [(True, CUTS[-1])]:
        with torch.set_grad_enabled(grad):
            given = inputs(case, B=6)
            keep = holes(LONG)
            if case.role == "cross":
                memory = {"memory": given["memory"], "memory_keep": holes(21, seed=4)}
                assert_close(extended(layer, given["x"], cuts, **memory), layer(given["x"], **memory))
                continue
            full, ragged = extended(layer, given["x"], cuts), extended(layer, given["x"], cuts, keep)
        if not layer.facts.prefix_invariant:
            for got, keep_ in ((full, None), (ragged, keep)):
                assert_close(got, replayed(layer, given["x"], cuts, keep_))
        if layer.facts.split_invariant:
            for got, keep_ in ((full, None), (ragged, keep)):
                assert_close(got, layer(given["x"], keep=keep_))
        elif len(cuts) > 1:
            assert (full - layer(given["x"])).abs().max() > 1e-9, "declared as depending on the cut, but it does not"


class Stack(torch.nn.Module):
    """Two layers with residuals that pack once: the smallest model."""

    def __init__(self, case: Case):
        super().__init__()
        self.stacked = [case.build(seed=seed) for seed in (0, 1)]
        self.layers = torch.nn.ModuleList(self.stacked)
        for layer in self.stacked:
            layer.link_layers(self.stacked[0], False, False)

    def forward(self, x: Tensor, states: list[Any], keep: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        packed, rows = (x, Rows.full(x)) if keep is None else pack(x, keep)
        rows = states[0].progress.place(rows)
        after = []
        for layer, state in zip(self.stacked, states, strict=True):
            out = layer.forward_packed(packed, rows, state=state)
            packed = packed + out.y
            after.append(out.state)
        return packed if keep is None else unpack(packed, keep), after


def check_ragged_decode(case: Case) -> None:
    """Prompts of different length in one batch, then new tokens: each row as if alone."""
    if case.role != "causal" or not case.build().facts.split_invariant:
        return
    x = inputs(case, B=4)["x"]
    prompt = torch.arange(20) < torch.tensor([20, 3, 11, 1])[:, None]
    model = Stack(case)
    with torch.no_grad():
        states = [layer.start(4) for layer in model.stacked]
        ys, states = model(x[:, :20], states, prompt)
        news = []
        for t in range(20, LONG):
            y, states = model(x[:, t : t + 1], states)
            news.append(y)
        for row in range(4):
            own = torch.cat([x[row : row + 1, :20][:, prompt[row]], x[row : row + 1, 20:]], 1)
            expected = own
            for layer in model.layers:
                expected = expected + layer(expected)
            got = torch.cat([ys[row : row + 1, :20][:, prompt[row]], torch.cat(news, 1)[row : row + 1]], 1)
            assert_close(got, expected)


def compare_merged(layer: Any, x: Tensor) -> None:
    """Rows of two states in one, behind each other and in place of each other: each goes on as it would have alone."""

    def read(row: int, length: int) -> Any:
        return layer.extend(x[row : row + 1, :length], layer.start(1))[1]

    lengths, news = (4, 19, 11), x[:, 20:24]
    alone = [layer.extend(news[row : row + 1], read(row, n))[0] for row, n in enumerate(lengths)]
    first, second, third = (read(row, n) for row, n in enumerate(lengths))
    joined = regard.merge(regard.merge(first, second), third)
    assert_close(layer.extend(news, joined)[0], torch.cat(alone))
    first, second, third = (read(row, n) for row, n in enumerate(lengths))
    replaced = regard.merge(regard.merge(second, regard.select(third, torch.zeros(2).long())), first, torch.tensor([1]))
    order = torch.tensor([1, 0, 2])
    assert_close(layer.extend(news[order], replaced)[0], torch.cat(alone)[order])


def check_select(case: Case) -> None:
    if case.role == "self":
        return
    layer = case.build()
    x = inputs(case, B=3)["x"]
    rows = torch.tensor([2, 0, 0, 1, 2])
    with torch.no_grad():
        if case.role == "cross":
            memory = inputs(case, B=3)["memory"]
            keep = holes(21, seed=4)[:3]
            state = layer.start(3, memory=memory, memory_keep=keep)
            y = layer.extend(x[rows], regard.select(state, rows))[0]
            assert_close(y, layer(x[rows], memory=memory[rows], memory_keep=keep[rows]))
            beams = inputs(case, B=12, seed=6)["x"]
            y = layer.extend(beams, state)[0]
            wide = {"memory": memory.repeat_interleave(4, 0), "memory_keep": keep.repeat_interleave(4, 0)}
            assert_close(y, layer(beams, **wide))
            assert_close(layer.extend(beams, state)[0], y)
            if hasattr(layer, "attend"):
                state = layer.start(3, memory=memory)
                assert_close(layer.weights(beams, state=state), layer.weights(beams, memory=wide["memory"]))
            return
        keep = torch.arange(20) < torch.tensor([20, 3, 11])[:, None]
        _, state = layer.extend(x[:, :20], layer.start(3), keep=keep)
        branch = regard.select(state, rows)
        first = layer.extend(x[rows, 20:27], branch)[0]
        order = torch.tensor([2, 0, 1])
        moved = layer.extend(x[order, 20:27], regard.select(state, order))[0]
        expected = layer.extend(-x[:, 20:27], regard.select(state, torch.arange(3)))[0]
        # a branch and its origin go on side by side: each writes into a copy of its own
        early, twin = layer.extend(-x[:, 20:23], regard.select(state, torch.arange(3)))
        second = layer.extend(x[:, 20:27], state)[0]
        late = layer.extend(-x[:, 23:27], twin)[0]
        if layer.facts.split_invariant:
            assert_close(torch.cat([early, late], 1), expected)
        assert_close(moved, second[order])
        assert_close(first, second[rows])
        compare_merged(layer, x)
        sizes = []
        for T in (128, 256):
            _, state = layer.extend(inputs(case, T, B=1)["x"], layer.start(1))
            held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(state)}
            sizes.append(sum(held.values()))
    exponent = math.log2(sizes[1] / sizes[0])
    assert layer.facts.state is not None, "it decodes, and declares no state"
    assert abs(exponent - layer.facts.state.exponent) < 0.1, f"state grows with exponent {exponent:.2f}"
