"""An explicit mask of pairs: obeyed by the mechanisms that weigh pairs one by one, refused in words by the others."""

import pytest
import torch
from torch.testing import assert_close

import regard
from regard.spec import ATTENTION

T, S = 9, 11
TAKE = [name for name in ATTENTION.names() if regard.facts(ATTENTION.find(name).examples[0]).pairs]
CASES = [
    (spec, role, position)
    for name in TAKE
    for spec in ATTENTION.find(name).examples
    for role in regard.facts(spec).roles
    for position in (None, *(("alibi", "shaw(distance=3)") if name == "softmax" and role != "cross" else ()))
]


def layer_and_inputs(spec, role, position=None, dtype=torch.float64):
    torch.manual_seed(0)
    layer = regard.attention(spec, width=16, heads=4, role=role, position=position).to(dtype).eval()
    given = {"x": torch.randn(3, T, 16, dtype=dtype)}
    if role == "cross":
        given["memory"] = torch.randn(3, S, 16, dtype=dtype)
    mask = torch.rand(3, T, S if role == "cross" else T) < 0.6
    mask[1, 2] = False  # a query that may read none
    return layer, given, mask


@pytest.mark.parametrize(("spec", "role", "position"), CASES)
def test_masked_pairs_have_no_weight_and_the_rest_share_it(spec, role, position):
    layer, given, mask = layer_and_inputs(spec, role, position)
    y = layer(**given, mask=mask)
    maps, free = layer.weights(**given, mask=mask), layer.weights(**given)
    assert not maps[~mask[:, None].expand_as(maps)].any()
    if not spec.startswith("entmax"):
        # a softmax over fewer keys is the same weights, shared anew
        left = torch.where(mask[:, None], free, 0)
        assert_close(maps, left / left.sum(-1, keepdim=True).clamp(min=1e-300))
    # as each row alone, with a mask without a batch
    for row in range(3):
        alone = {name: part[row : row + 1] for name, part in given.items()}
        assert_close(layer(**alone, mask=mask[row]), y[row : row + 1])
    assert not y[1, 2].any()
    assert (y - layer(**given)).abs().max() > 1e-3


@pytest.mark.parametrize(("spec", "role", "position"), CASES)
def test_padding_moves_the_mask_with_the_tokens(spec, role, position):
    layer, given, mask = layer_and_inputs(spec, role, position)
    keep, sides = torch.rand(3, T) < 0.7, {}
    keep[:, 4] = True
    if role == "cross":
        sides["memory_keep"] = torch.rand(3, S) < 0.7
        sides["memory_keep"][:, 5] = True
    y = layer(**given, keep=keep, mask=mask, **sides)
    for row in range(3):
        own = {"x": given["x"][row : row + 1, keep[row]]}
        columns = keep[row]
        if role == "cross":
            columns = sides["memory_keep"][row]
            own["memory"] = given["memory"][row : row + 1, columns]
        assert_close(layer(**own, mask=mask[row][keep[row]][:, columns])[0], y[row, keep[row]])
    maps = layer.weights(**given, keep=keep, mask=mask, **sides)
    assert not maps[~mask[:, None].expand_as(maps)].any()


def test_gradients_are_finite_where_a_query_reads_nothing():
    for position in (None, "alibi", "shaw(distance=3)"):
        layer, given, mask = layer_and_inputs("softmax", "causal", position, torch.float32)
        x = given["x"].requires_grad_()
        layer(x, mask=mask).square().sum().backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [T, 4])
def test_attend(causal, queries):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (queries, T, T))
    mask = torch.rand(2, queries, T) < 0.6
    mask[..., 0] = True
    past = torch.arange(T) <= torch.arange(T - queries, T)[:, None] if causal else torch.ones(queries, T).bool()
    seen = (mask & past)[:, None]
    expected = torch.softmax((q @ k.mT * 8**-0.5).masked_fill(~seen, -torch.inf), -1) @ v
    assert_close(regard.attend("softmax", q, k, v, causal=causal, mask=mask), expected)
    keep = torch.tensor([[1] * T, [1, 1, 0, 1, 1, 0, 1, 1, 1]]).bool()
    cross = queries != T and not causal
    seen = seen & keep[:, None, None]
    expected = torch.softmax((q @ k.mT * 8**-0.5).masked_fill(~seen, -torch.inf), -1) @ v
    got = regard.attend("softmax", q, k, v, keep, causal=causal, mask=mask)
    rows = torch.ones(2, queries).bool() if cross else keep[:, T - queries :]
    assert_close(got.transpose(1, 2)[rows], expected.transpose(1, 2)[rows])


@pytest.mark.parametrize("name", [name for name in ATTENTION.names() if name not in TAKE])
def test_the_others_refuse(name):
    spec = ATTENTION.find(name).examples[0]
    role = regard.facts(spec).roles[0]
    layer, given, mask = layer_and_inputs(spec, role, dtype=torch.float32)
    with pytest.raises(ValueError, match="takes no mask"):
        layer(**given, mask=mask)


def test_masks_of_another_kind_or_shape():
    layer, given, mask = layer_and_inputs("softmax", "self")
    with pytest.raises(ValueError, match=r"boolean, True = may attend, got torch\.float64"):
        layer(**given, mask=mask.double())
    with pytest.raises(ValueError, match=r"\[9, 9\] or \[3, 9, 9\], queries by keys, got \[3, 9\]"):
        layer(**given, mask=mask[:, 0])
