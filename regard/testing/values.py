"""The outputs: against the reference, in the limit, with fewer key/value heads, in each role, saved and loaded."""

import io
import itertools

import torch
from torch.testing import assert_close

import regard
from regard.layers.attention.base import Attention
from regard.spec import ATTENTION
from regard.testing.cases import (
    HEADS,
    LONG,
    WIDTH,
    Case,
    extended,
    facts_of,
    inputs,
    reference,
    refused,
    replayed,
    same,
)


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
    parts = len(list(target.get_submodule("parts").children())) if hasattr(target, "parts") else 1
    with torch.no_grad():
        for name, tensor in itertools.chain(target.named_parameters(), target.named_buffers()):
            part, _, rest = name.removeprefix("parts.").partition(".")
            if name.startswith("parts.") and name not in state:
                whole = state[rest]
                for axis in (d for d in range(whole.dim()) if whole.shape[d] > tensor.shape[d]):
                    whole = whole.chunk(parts, axis)[int(part)]
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
            with refused(f"role '{role}'"):
                Case(case.spec, role, make=case.make).build()
    assert (layer.facts.state is not None) == ("causal" in layer.facts.roles)
    if case.role == "self":
        with refused("role='causal'"):
            layer.start(2)
    if case.role != "cross":
        with refused("memory"):
            layer(inputs(case)["x"], memory=torch.zeros(3, 5, WIDTH, dtype=torch.float64))


def check_batch(case: Case) -> None:
    layer = case.build()
    given = inputs(case)
    y = layer(**given)
    for row in range(3):
        assert_close(layer(**{n: t[row : row + 1] for n, t in given.items()}), y[row : row + 1])


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
    with refused("nonsense"):
        regard.attention(
            case.spec.replace(")", ", nonsense=1)", 1) if "(" in case.spec else f"{case.spec}(nonsense=1)",
            width=WIDTH,
            heads=HEADS,
            role=case.role,
        )
    with refused("unknown attention 'nonsense'"):
        regard.attention(f"heads({case.spec}, nonsense)", width=WIDTH, heads=2 * HEADS, role=case.role)
