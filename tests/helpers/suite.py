"""What proves a mechanism: one function a property, over a `Case`. No skip list: where a mechanism is exempt, it has
declared so in its facts, and then the opposite is checked. `test_planted.py` shows each function fail on a bug."""

import contextlib
import copy
import functools
import io
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.core.rows import Memory, Rows, pack, unpack
from regard.layers.attention.base import Attention, Facts
from regard.spec import ATTENTION, POSITIONS

WIDTH, HEADS = 16, 4
LONG = 33
CUTS = ([1] * LONG, [4, *[1] * (LONG - 4)], [LONG], [13, 7, 1, 12])


@dataclass(frozen=True)
class Case:
    """A mechanism in a role; `make` replaces the registered class by a broken one in the tests of the suite itself."""

    spec: str
    role: str
    position: str | None = None
    make: Callable[..., Attention] | None = None

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float64, **sizes: Any) -> Attention:
        torch.manual_seed(seed)
        sizes = {"width": WIDTH, "heads": HEADS, "role": self.role, "position": self.position} | sizes
        layer = self.make(**sizes) if self.make else regard.attention(self.spec, **sizes)
        shake(layer)
        return layer.to(dtype).eval()

    def __str__(self) -> str:
        return "-".join(filter(None, (self.spec, self.role, self.position)))


def shake(layer: torch.nn.Module) -> None:
    """Parameters that start at zero or one would hide what they do."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.numel() < 2 or parameter.std() == 0:
                parameter.add_(0.3 * torch.randn_like(parameter))


@functools.cache
def facts_of(spec: str) -> Facts:
    """Kept: they are asked for thousands of times, and each time would build a layer."""
    return regard.facts(spec)


def cases() -> list[Case]:
    found = []
    for name in ATTENTION.names():
        for spec in ATTENTION.find(name).examples:
            found += [Case(spec, role) for role in facts_of(spec).roles]
    return found


def position_cases() -> list[Case]:
    """Every scheme on every mechanism that takes its kind; what else a scheme can be, on softmax."""
    found = []
    for scheme in POSITIONS.names():
        cls = POSITIONS.find(scheme)
        for position, name in itertools.product(cls.examples, ATTENTION.names()):
            spec = ATTENTION.find(name).examples[0]
            facts = facts_of(spec)
            takes = name in ("softmax", "linear") if cls.facts.kind == "input" else cls.facts.kind in facts.positions
            if takes and (position == cls.examples[0] or name == "softmax"):
                found += [Case(spec, role, position) for role in cls.facts.roles if role in facts.roles]
    return found


def inputs(case: Case, T: int = LONG, *, B: int = 3, S: int = 21, seed: int = 1, dtype=torch.float64) -> dict[str, Any]:
    """x, and the memory for cross-attention."""
    draw = torch.Generator().manual_seed(seed)
    given = {"x": torch.randn(B, T, WIDTH, generator=draw, dtype=torch.float64).to(dtype)}
    if case.role == "cross":
        given["memory"] = torch.randn(B, S, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    return given


def holes(T: int, seed: int = 3) -> Tensor:
    """Padding of different amount and place in each row: left, right, inside, none, one token, all. [6, T]"""
    keep = torch.rand(6, T, generator=torch.Generator().manual_seed(seed)) < 0.6
    keep[0, : T // 3], keep[0, T // 3 :] = False, True
    keep[1, : T - T // 4], keep[1, T - T // 4 :] = True, False
    keep[2, 0], keep[2, 1:3], keep[2, -1] = True, False, True
    keep[3] = True
    keep[4] = False
    keep[4, T // 2] = True
    keep[5] = False
    return keep


def reference(layer: Attention, given: dict[str, Tensor]) -> Tensor:
    if "memory" in given:
        return torch.stack([layer.reference(x, memory) for x, memory in zip(given["x"], given["memory"], strict=True)])
    return torch.stack([layer.reference(x) for x in given["x"]])


def same(a: Tensor, b: Tensor) -> None:
    assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# the properties


def check_reference(case: Case) -> None:
    # the mechanism by itself is checked at every length; a scheme of positions acts on single pairs of tokens
    lengths = (1, 2, 7, LONG) if case.position is None else (2, 17)
    for T, sizes in (*((T, {}) for T in lengths), (7, {"bias": True, "head_width": 6})):
        layer = case.build(**sizes)
        given = inputs(case, T, B=1, S=T + 3)
        assert_close(layer(**given), reference(layer, given))


def check_grouped(case: Case) -> None:
    """Fewer key/value heads than heads, wherever q, k and v exist."""
    # mixed heads divide the key/value heads among their parts too
    kv_heads = max(2, regard.spec.parse(case.spec).heads)
    layer = case.build(heads=2 * kv_heads, head_width=4, kv_heads=kv_heads)
    given = inputs(case, 9, B=2)
    assert_close(layer(**given), reference(layer, given))
    if case.role == "causal":
        assert_close(extended(layer, given["x"], [4, 1, 4]), replayed(layer, given["x"], [4, 1, 4]))


def check_limit(case: Case) -> None:
    for spec, target in ATTENTION.find(case.spec.split("(")[0]).reduces_to:
        if case.role not in facts_of(spec).roles or case.role not in facts_of(target).roles:
            continue
        layer, simple = Case(spec, case.role, make=case.make).build(seed=0), Case(target, case.role).build(seed=5)
        shares(simple, layer)
        given = inputs(case)
        assert_close(layer(**given), simple(**given))


def shares(source: Attention, target: Attention) -> None:
    """Copies what two layers have in common; for heads(a, a), the part of a's tensors each of them holds. A tensor that
    is no part of a's (of a mechanism whose heads know of each other) stays as it is drawn."""
    state = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    with torch.no_grad():
        for name, tensor in itertools.chain(target.named_parameters(), target.named_buffers()):
            part, _, rest = name.removeprefix("parts.").partition(".")
            if name.startswith("parts.") and name not in state:
                whole = state[rest]
                for axis in (d for d in range(whole.dim()) if whole.shape[d] > tensor.shape[d]):
                    whole = whole.chunk(len(target.parts), axis)[int(part)]
                if whole.shape == tensor.shape:
                    tensor.copy_(whole)
            elif name in state and state[name].shape == tensor.shape:
                tensor.copy_(state[name])


def check_twice(case: Case) -> None:
    """heads(a, a) = a, or (declared) heads that know of each other."""
    layer, whole = Case(f"heads({case.spec}, {case.spec})", case.role).build(heads=8), case.build(seed=5, heads=8)
    if case.make is not None:
        layer.parts = torch.nn.ModuleList(case.build(heads=4, head_width=2) for _ in range(2))
    shares(whole, layer)
    given = inputs(case)
    if whole.facts.independent_heads:
        assert_close(layer(**given), whole(**given))
    else:
        assert (layer(**given) - whole(**given)).abs().max() > 1e-9, "declared as mixing heads, but they are apart"


def check_roles(case: Case) -> None:
    layer = case.build()
    for role in ("self", "causal", "cross"):
        if role in layer.facts.roles:
            assert Case(case.spec, role, make=case.make).build().shape.role == role
        else:
            with pytest.raises(ValueError, match=f"role '{role}'"):
                Case(case.spec, role, make=case.make).build()
    assert (layer.facts.state is not None) == ("causal" in layer.facts.roles)
    if case.role == "self":
        with pytest.raises(ValueError, match="role='causal'"):
            layer.start(2)
    if case.role != "cross":
        with pytest.raises(ValueError, match="memory"):
            layer(inputs(case)["x"], memory=torch.zeros(3, 5, WIDTH, dtype=torch.float64))


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
        with pytest.raises(ValueError, match="padding"):
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


def extended(layer: Attention, x: Tensor, cuts: list[int], keep: Tensor | None = None, **start: Any) -> Tensor:
    state = layer.start(len(x), **start)
    ys, first = [], 0
    for n in cuts:
        y, state = layer.extend(
            x[:, first : first + n], state, keep=None if keep is None else keep[:, first : first + n]
        )
        ys.append(y)
        first += n
    return torch.cat(ys, 1)


def replayed(layer: Attention, x: Tensor, cuts: list[int], keep: Tensor | None = None) -> Tensor:
    """Each piece as the end of the whole sequence up to it: what decoding gives where outputs move with the length."""
    ys, first = [], 0
    for n in cuts:
        y = layer(x[:, : first + n], keep=None if keep is None else keep[:, : first + n])
        ys.append(y[:, first:])
        first += n
    return torch.cat(ys, 1)


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
        self.layers = torch.nn.ModuleList(case.build(seed=seed) for seed in (0, 1))
        for layer in self.layers:
            layer.link_layers(self.layers[0], False, False)

    def forward(self, x: Tensor, states: list[Any], keep: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        packed, rows = (x, Rows.full(x)) if keep is None else pack(x, keep)
        rows = states[0].progress.place(rows)
        after = []
        for layer, state in zip(self.layers, states, strict=True):
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
        states = [layer.start(4) for layer in model.layers]
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


def tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    return [tensor for part in state for tensor in tensors(part)] if isinstance(state, tuple) else []


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
        sizes = []
        for T in (128, 256):
            _, state = layer.extend(inputs(case, T, B=1)["x"], layer.start(1))
            held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(state)}
            sizes.append(sum(held.values()))
    exponent = math.log2(sizes[1] / sizes[0])
    assert abs(exponent - layer.facts.state.exponent) < 0.1, f"state grows with exponent {exponent:.2f}"


def check_batch(case: Case) -> None:
    layer = case.build()
    given = inputs(case)
    y = layer(**given)
    for row in range(3):
        assert_close(layer(**{n: t[row : row + 1] for n, t in given.items()}), y[row : row + 1])


def check_gradient(case: Case) -> None:
    """Of the output, and of the auxiliary loss where one is trained, against those of the references."""
    built = case.build(bias=True)
    given = inputs(case, 9, B=2, S=11)
    learns = built.facts.auxiliary_loss

    def gradients(function: Callable[[Attention, dict[str, Tensor]], tuple[Tensor, Tensor | None]], training: bool):
        # a copy: what is learnt without gradients must not reach the next call
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
        return reference(layer, leaves), sum(losses) / len(losses) if learns else None

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

    def loss(rows: list[int], fill: float = 0.0) -> Tensor:
        packed = {}
        for name, real in keep.items():
            packed[name] = pack(torch.where(real[rows][..., None], tokens[name][rows], fill), real[rows])
        memory = {} if case.role != "cross" else {"memory": Memory(packed["memory"][0], packed["memory"][1].count)}
        return copy.deepcopy(built).train().forward_packed(*packed["x"], **memory).auxiliary_loss

    for row in range(5):
        own = {name: tokens[name][row : row + 1, real[row]] for name, real in keep.items()}
        memory = {} if case.role != "cross" else {"memory": Memory(own["memory"], None)}
        alone = copy.deepcopy(built).train().forward_packed(own["x"], **memory).auxiliary_loss
        assert alone.shape == ()
        assert alone.isfinite()
        assert_close(loss([row]), alone)
        assert_close(loss([row, 5]), alone)
    for fill in (7.0, math.inf, math.nan):
        same(loss(list(range(6)), fill), loss(list(range(6))))


def check_weights(case: Case) -> None:
    layer = case.build()
    given = inputs(case, B=6)
    keep = holes(LONG)
    masks = {"keep": keep}
    if case.role == "cross":
        masks["memory_keep"] = holes(21, seed=4)
    elif layer.facts.padding == "none":
        masks = {"keep": torch.ones_like(keep)}
        keep = masks["keep"]
    maps = layer.weights(**given, **masks)
    columns = masks.get("memory_keep", keep)
    assert maps.shape == (6, HEADS, LONG, columns.shape[1]) or layer.facts.columns == "slots"
    sums = maps.sum(-1).transpose(1, 2)
    assert not sums[~keep].any(), "a padded query has weights"
    if layer.facts.columns == "tokens":
        assert not maps.transpose(1, 3).transpose(2, 3)[~columns].any(), "weight on padding"
    seeing = keep & columns.any(1)[:, None]
    if layer.facts.signed:
        assert (sums[seeing] - 1).abs().max() > 1e-9 or (maps < 0).any(), "declared as signed, but it is not"
    else:
        assert (maps >= -1e-12).all()
        assert_close(sums[seeing], torch.ones_like(sums[seeing]))
    if layer.facts.columns == "slots":
        slots_hold(layer, given, masks, maps)
    x, rows, memory = given["x"], Rows.full(given["x"]), None
    if case.role == "cross":
        memory = Memory(given["memory"], None)
    # apply_map(V) = weights @ V for any V, of each head its own and wider than a head
    maps = layer.weights(**given)
    values = torch.randn(6, HEADS, maps.shape[3], layer.shape.head_width + 3, dtype=x.dtype)
    assert_close(layer.apply_map(values, x, rows, memory=memory), maps @ values)
    if not hasattr(layer, "project_inputs") or layer.facts.columns == "slots":
        return
    # attend(V) = weights @ V for any V put in the place of every value
    query, source = layer.project_inputs(x, rows, memory)
    values = {n: torch.randn_like(source[layer.kinds("value")[0]]) for n in layer.kinds("value")[:1]}
    swapped = source | dict.fromkeys(layer.kinds("value"), next(iter(values.values())))
    nothing = source | {n: torch.zeros_like(source[n]) for n in layer.kinds("value")}
    o = (
        layer.attend_projected(rows, query, swapped, None, memory)[0]
        - layer.attend_projected(rows, query, nothing, None, memory)[0]
    )
    v = next(iter(values.values())).repeat_interleave(HEADS // layer.shape.kv_heads, 1)
    if not layer.facts.linear:
        assert (maps @ v - o).abs().max() > 1e-9, "declared as more than its map, but it is the map times the values"
        return
    assert_close(maps @ v, o)
    if case.role == "causal" and hasattr(layer, "probe_self_state"):
        _, state = layer.extend(x[:, :20], layer.start(6))
        late = layer.weights(x[:, 20:], state=state)
        assert_close(late, maps[:, :, 20:])
        y, _ = layer.extend(x[:, 20:], state)
        assert_close(y, layer(x)[:, 20:])
        # after prompts of different length, each row as if alone
        prompt = torch.arange(20) < torch.tensor([20, 3, 11, 1, 7, 16])[:, None]
        _, state = layer.extend(x[:, :20], layer.start(6), keep=prompt)
        late = layer.weights(x[:, 20:], state=state)
        for row in range(6):
            own = torch.cat([x[row : row + 1, :20][:, prompt[row]], x[row : row + 1, 20:]], 1)
            n = own.shape[1]
            assert_close(late[row : row + 1, :, :, :n], layer.weights(own)[:, :, n - LONG + 20 :])
    if case.role == "cross" and hasattr(layer, "attend"):
        state = layer.start(6, memory=given["memory"])
        assert_close(layer.weights(x, state=state), maps)


def slots_hold(layer: Attention, given: dict[str, Tensor], masks: dict[str, Tensor], maps: Tensor) -> None:
    """A map over slots: each row as if alone, nothing on slots of padding only, and the output is map times slots."""
    for row in range(len(maps)):
        own = {"x": given["x"][row : row + 1, masks["keep"][row]]}
        if "memory" in given:
            own["memory"] = given["memory"][row : row + 1, masks["memory_keep"][row]]
        got = maps[row, :, masks["keep"][row]]
        slots = 0
        if all(tensor.shape[1] for tensor in own.values()):
            alone = layer.weights(**own)[0]
            slots = alone.shape[2]
            assert_close(got[..., :slots], alone)
        assert not got[..., slots:].any(), "weight on slots of padding"
    x, memory = given["x"], Memory(given["memory"], None) if "memory" in given else None
    if hasattr(layer, "project_inputs"):
        o = layer.attend_projected(Rows.full(x), *layer.project_inputs(x, Rows.full(x), memory), None, memory)[0]
        assert_close(layer.weights(**given) @ layer.slots(x, memory=memory), o)
    if layer.shape.role == "causal":
        _, state = layer.extend(x[:, :20], layer.start(len(x)))
        late, whole = layer.weights(x[:, 20:], state=state), layer.weights(x)[:, :, 20:]
        # a state may have room for a slot that is not finished yet
        slots = min(late.shape[3], whole.shape[3])
        assert_close(late[..., :slots], whole[..., :slots])
        assert not late[..., slots:].any()


def _flash_flops(q, k, v, *_, out_shape=None, **__):
    B, H, T, D = q
    return 2 * B * H * T * k[2] * (D + v[3])


def _flash_backward_flops(grad, q, k, v, *_, out_shape=None, **__):
    return 5 * _flash_flops(q, k, v) // 2


# the counter of torch does not know the CPU's kernel
FLASH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward_flops,
}
FLOPS = FlopCounterMode(display=False, custom_mapping=FLASH).flop_registry


@functools.cache
def _writes(function) -> str:
    """What an operator writes: "new" tensors, its "first" argument, or nothing, as a view."""
    returns = [result.alias_info for result in function._schema.returns]
    if all(alias is None for alias in returns):
        return "new"
    return "first" if any(alias is not None and alias.is_write for alias in returns) else ""


class Tally(TorchDispatchMode):
    """Operations as torch's counter counts them, which is much slower; elements written by operators that are no views,
    and the largest single output in bytes."""

    def __init__(self):
        super().__init__()
        self.flops = 0
        self.written = 0
        self.largest = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        writes = _writes(function)
        if writes == "new":
            for tensor in tensors(tuple(out) if isinstance(out, list | tuple) else out):
                self.written += tensor.numel()
                self.largest = max(self.largest, tensor.numel() * tensor.element_size())
        elif writes == "first":
            self.written += sum(tensor.numel() for tensor in tensors(tuple(args[:1])))
        formula = FLOPS.get(function.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


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


def check_low_precision(case: Case) -> None:
    """Finite at logits of 1e4, or (declared) float16 overflows there; at moderate ones no further off than rounding the
    inputs once, times two."""
    sizes = {"width": 64, "heads": 4, "head_width": 64}
    for dtype, logits in itertools.product((torch.bfloat16, torch.float16), (4.0, 1e4)):
        low = case.build(dtype=dtype, **sizes)
        layer = copy.deepcopy(low).float()
        draw = torch.Generator().manual_seed(2)
        given = {n: torch.randn(2, t.shape[1], 64, generator=draw) for n, t in inputs(case, B=2).items()}
        if hasattr(layer, "project") and {"q", "k"} <= set(layer.inputs):
            source = given.get("memory", given["x"])
            top = (
                (
                    layer.split("q", given["x"])
                    @ layer.split("k", source).repeat_interleave(4 // layer.shape.kv_heads, 1).mT
                )
                .abs()
                .max()
            )
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


def check_compile(case: Case) -> None:
    graphs = []

    def counter(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    layer = case.build()
    run = torch.compile(layer.forward_packed, backend=counter, fullgraph=True)
    given = inputs(case)
    memory = Memory(given["memory"], torch.tensor([21, 5, 9])) if case.role == "cross" else None
    rows = Rows(torch.zeros(3, dtype=torch.long), torch.tensor([LONG, 9, 17]), LONG, None)
    x = given["x"].requires_grad_()
    got, y = run(x, rows, memory=memory).y, layer.forward_packed(x, rows, memory=memory).y
    assert_close(got, y)
    assert_close(torch.autograd.grad(got.square().sum(), x), torch.autograd.grad(y.square().sum(), x))
    assert len(graphs) == 1
    if case.role == "causal":
        graphs.clear()
        torch._dynamo.reset()
        with torch.no_grad():
            _, state = layer.extend(given["x"][:, :7], layer.start(3, capacity=LONG))
            for t in range(7, 14):
                x = given["x"][:, t : t + 1]
                rows = Rows(state.progress.length, torch.ones(3, dtype=torch.long), 1, state.progress.longest)
                y, state, *_ = run(x, rows, state=state)
                assert_close(y, layer(given["x"][:, : t + 1])[:, t:])
        assert len(graphs) <= 2, f"{len(graphs)} graphs for the steps of one decoding"


def check_export(case: Case) -> None:
    """One exported program for all lengths, with and without padding, of PyTorch's own operators; or, declared, only
    one of a fixed length."""
    layer = case.build()
    dynamic = layer.facts.dynamic_length
    if not dynamic:
        with pytest.raises(ValueError, match="dynamic length"):
            exported(layer, case, False)
    for padded in (False, True)[: 1 + (dynamic and layer.facts.padding == "any")]:
        program = exported(layer, case, padded, dynamic)
        kinds = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert not [kind for kind in kinds if "regard" in kind], "it cannot be loaded without Regard"
        run = program.module()
        for T in (37, 64, 129) if dynamic else (EXPORTED,):
            given = exported_inputs(case, T, padded)
            with torch.no_grad():
                assert_close(run(**given), layer(**given))


EXPORTED = 48  # tokens of the example that a program is recorded from


def exported(layer: Attention, case: Case, padded: bool, dynamic: bool = True) -> torch.export.ExportedProgram:
    """The program of a layer; the range of its lengths ends below the tables of those that have a longest input."""
    T, S = (torch.export.Dim(name, min=32, max=200) for name in "TS")
    given = exported_inputs(case, EXPORTED, padded)
    shapes = {name: {1: S if name.startswith("memory") else T} for name in given} if dynamic else None
    with torch.no_grad():
        return torch.export.export(layer, (), given, dynamic_shapes=shapes)


def exported_inputs(case: Case, T: int, padded: bool) -> dict[str, Tensor]:
    given = inputs(case, T, B=6, S=T + 3, seed=T)
    if padded:
        given["keep"] = holes(T)
        if case.role == "cross":
            given["memory_keep"] = holes(T + 3, seed=4)
    return given


def check_autocast(case: Case) -> None:
    """Half precision chosen from outside, whole and in steps."""
    layer = case.build(dtype=torch.float32)
    given = inputs(case, dtype=torch.float32)
    keep = torch.arange(LONG) < torch.tensor([LONG, 9, 17])[:, None]
    memory = {name: tensor for name, tensor in given.items() if name == "memory"}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = layer(**given, keep=keep) if layer.facts.padding == "any" else layer(**given)
        assert y.isfinite().all()
        if case.role != "self" and layer.facts.padding == "any":
            steps = extended(layer, given["x"], [13, 7, 1, 12], keep, **memory)
            assert steps.isfinite().all()
            if layer.facts.split_invariant:
                exact = layer.float()(**given, keep=keep)
                assert_close(steps.float(), exact.float(), rtol=0.1, atol=0.1 * exact.abs().max().item())


def check_round_trip(case: Case) -> None:
    layer = case.build(seed=0)
    stored = io.BytesIO()
    torch.save(layer.state_dict(), stored)
    stored.seek(0)
    other = case.build(seed=1)
    other.load_state_dict(torch.load(stored, weights_only=True))
    given = inputs(case)
    same(other(**given), layer(**given))
    assert str(regard.spec.parse(case.spec)) == str(regard.spec.parse(str(regard.spec.parse(case.spec))))
    with pytest.raises(ValueError, match="nonsense"):
        regard.attention(
            case.spec.replace(")", ", nonsense=1)", 1) if "(" in case.spec else f"{case.spec}(nonsense=1)",
            width=WIDTH,
            heads=HEADS,
            role=case.role,
        )
    with pytest.raises(ValueError, match="unknown attention 'nonsense'"):
        regard.attention(f"heads({case.spec}, nonsense)", width=WIDTH, heads=2 * HEADS, role=case.role)


CHECKS = {name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")}
# a position scheme changes the logits and where they stand, and nothing else that the suite asks for
POSITION_CHECKS = ["reference", "grouped", "causality", "padding", "split", "ragged_decode", "gradient", "weights"]


# what differs in how it is exported: dense, in tiles, in classes, a scan, a sort, a low rank, slots, and none
QUICKLY_EXPORTED = {
    ("softmax", "cross"),
    ("longformer(window=3, globals=2)", "self"),
    ("strided(stride=3)", "causal"),
    ("linear", "causal"),
    ("reformer(chunk=4, buckets=4, rounds=1)", "self"),
    ("compressed(factor=3)", "cross"),
    ("compressive(segment=10, memory=10, compressed=3, rate=5, function='used')", "causal"),
}


def is_quick(case: Case, check: str) -> bool:
    """Whether `make test` runs a check on a case; `make test-all` runs every check on every case.

    The first example of a mechanism goes through every check but `export`, in every role; so does every example that
    declares another cost or other limits than the first. The rest skip what is slow and depends on the code path of the
    whole mechanism. Every scheme of positions goes through every check on softmax; on the others through those that
    compare values: whole, in steps and their gradients."""
    name = case.spec.split("(")[0]
    if check == "export":
        return (case.spec, case.role) in QUICKLY_EXPORTED
    if case.position is not None:
        return name == "softmax" or check in ("reference", "split", "gradient")
    first = ATTENTION.find(name).examples[0]
    if check not in ("compile", "cost", "low_precision", "autocast", "twice", "round_trip") or case.spec == first:
        return True
    same_facts = replace(facts_of(case.spec), formula="") == replace(facts_of(first), formula="")
    return check == "cost" and not same_facts
