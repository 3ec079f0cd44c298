"""What the suite does not ask of the Long-Short Transformer."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import regard


@pytest.mark.parametrize("role", ["self", "causal"])
def test_the_map_is_what_reaches_a_query(role):
    """Without norms the layer is linear in its values, so the map can be told from outside."""
    torch.manual_seed(0)
    layer = regard.attention("longshort(window=4, rank=2, chunk=3, norm=False)", width=16, heads=4, role=role).double()
    x = torch.randn(2, 21, 16, dtype=torch.float64)
    keep = torch.rand(2, 21) < 0.7
    for kept in (None, keep):
        v = layer.project_heads("v", x)
        v = v if kept is None else torch.where(kept[:, None, :, None], v, 0)
        o = layer.weights(x, keep=kept) @ v
        assert_close(layer.output(o.transpose(1, 2).flatten(2)), layer(x, keep=kept))


def test_what_it_refuses():
    with pytest.raises(ValueError, match="window must be at least chunk"):
        regard.attention("longshort(window=4, chunk=5)", width=16, heads=4, role="causal")
    with pytest.raises(ValueError, match="cannot take position 'rotary'"):
        regard.attention("longshort", width=16, heads=4, position="rotary")
    layer = regard.attention("longshort(window=4, chunk=3)", width=16, heads=4, role="causal")
    with pytest.raises(ValueError, match="a state has no map"):
        layer.weights(torch.randn(2, 3, 16), state=layer.start(2))
    regard.attention("longshort(window=4, chunk=5)", width=16, heads=4, role="self")


def test_a_position_scheme_is_added_to_the_tokens():
    torch.manual_seed(0)
    layer = regard.attention("longshort(window=4, chunk=3)", width=16, heads=4, role="causal", position="sinusoidal")
    x = torch.randn(1, 9, 16)
    state, steps = layer.start(1), []
    for t in range(9):
        y, state = layer.extend(x[:, t : t + 1], state)
        steps.append(y)
    assert_close(torch.cat(steps, 1), layer(x))
    assert_close(layer(x)[0].double(), layer.double().reference(x[0].double()), rtol=1e-4, atol=1e-5)


def test_relative_positions_of_a_window_alone_are_those_of_transformer_xl():
    """Theirs joins u and w to queries that are scaled already: those of Transformer-XL, divided by sqrt(D)."""
    torch.manual_seed(0)
    sizes = {"width": 16, "heads": 4, "role": "causal"}
    layer = regard.attention("longshort(window=20, rank=0, norm=False, relative=True)", **sizes).double()
    xl = regard.attention("softmax", position="xl", **sizes).double()
    xl.project.load_state_dict(layer.project.state_dict())
    xl.output.load_state_dict(layer.output.state_dict())
    with torch.no_grad():
        xl.position.project.weight.copy_(layer.near_place.weight)
        xl.position.u.copy_(2 * layer.u)
        xl.position.v.copy_(2 * layer.w)
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    assert_close(layer(x), xl(x))


def test_relative_positions_of_summaries():
    """They move every query that sees a summary, and none before the end of the first chunk."""
    torch.manual_seed(0)
    layer = regard.attention("longshort(window=6, rank=2, chunk=3, relative=True)", width=16, heads=4, role="causal")
    x = torch.randn(1, 9, 16)
    placed = layer(x)
    with torch.no_grad():
        layer.long_place.weight.zero_()
    assert_close(layer(x)[:, :3], placed[:, :3])
    assert (layer(x)[:, 4:] - placed[:, 4:]).abs().amax(-1).min() > 1e-6


def dense(layer: regard.Attention, x: Tensor) -> Tensor:
    """One unpadded row [T, E] with every logit written out: what the authors' two layers compute of a first segment."""
    (T, _), H, r, w, c = x.shape, layer.shape.heads, layer.rank, layer.window, layer.chunk
    D, causal = layer.shape.head_width, layer.shape.role == "causal"
    q = layer.project["q"](x).view(T, H, D) / D**0.5
    raw = [layer.project[name](x) for name in "kv"]
    near = [layer.near_norm(part) for part in raw]
    p = layer.summary(x).view(T, H, r)
    groups = [range(a, a + c) for a in range(0, T - c + 1, c)] if causal else [range(T)]
    long = []
    for part in near if layer.lra else raw:
        tokens = part.view(T, H, D)
        made = [torch.einsum("nhr,nhd->rhd", p[list(own)].softmax(0), tokens[list(own)]) for own in groups]
        # a norm is over all heads of a summary
        long.append(layer.long_norm(torch.cat(made).flatten(1)).view(-1, H, D) if made else tokens[:0])
    i, j, s = torch.arange(T)[:, None], torch.arange(T), torch.arange(len(long[0]))
    if causal:
        inside, behind = (j <= i) & (j > i - w), i // c * r - 1 - s
    else:
        first, side = i // w * w, max(w // 2, 1)
        inside, behind = (j >= first - side) & (j < first + w + side), torch.zeros(T, len(s), dtype=torch.long)
    k, v = (part.view(T, H, D) for part in near)
    tokens, summaries = torch.einsum("ihd,jhd->hij", q, k), torch.einsum("ihd,shd->his", q, long[0])
    if layer.relative:
        frequency = 10000 ** (-torch.arange(0, x.shape[1], 2, dtype=x.dtype) / x.shape[1])

        def places(linear: nn.Linear, distance: Tensor) -> Tensor:
            angle = distance[..., None] * frequency
            return linear(torch.cat([angle.sin(), angle.cos()], -1)).unflatten(-1, (H, D))

        tokens = tokens + torch.einsum("hd,jhd->hj", layer.u, k)[:, None]
        tokens = tokens + torch.einsum("ihd,ijhd->hij", q + layer.w, places(layer.near_place, i - j))
        summaries = summaries + torch.einsum("ihd,ishd->his", q, places(layer.long_place, behind))
    logits = [tokens.masked_fill(~inside, -torch.inf), summaries.masked_fill(behind < 0, -torch.inf)]
    weights = torch.cat(logits, 2).softmax(2)
    o = torch.einsum("hij,jhd->ihd", weights, torch.cat([v, long[1]]))
    return layer.output(o.flatten(1))


@pytest.mark.parametrize(
    ("role", "options"),
    [
        ("self", "window=6, rank=3"),
        ("self", "window=5, rank=2, lra=True"),
        ("causal", "window=7, rank=2, chunk=4, lra=True"),
        ("causal", "window=7, rank=3, chunk=4, relative=True"),
        ("causal", "window=5, rank=1, chunk=5, relative=True, lra=True"),
    ],
)
def test_forms_of_the_authors_and_their_gradients(role, options):
    """Rows of several windows and chunks, the last ones not full, and more queries than are read at a time."""
    torch.manual_seed(0)
    layer = regard.attention(f"longshort({options})", width=16, heads=4, role=role, bias=True).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    x, count = torch.randn(3, 70, 16, dtype=torch.float64), [70, 33, 3]
    keep = torch.arange(70) < torch.tensor(count)[:, None]
    toward = torch.randn_like(x)[keep]
    found = []
    for by_hand in (False, True):
        given = x.clone().requires_grad_()
        rows = [dense(layer, row[:n]) for row, n in zip(given, count, strict=True)] if by_hand else None
        y = torch.cat(rows) if by_hand else layer(given, keep=keep)[keep]
        leaves = {"x": given, **dict(layer.named_parameters())}
        found.append(
            {"y": y} | dict(zip(leaves, torch.autograd.grad((y * toward).sum(), leaves.values()), strict=True))
        )
    for name, expected in found[1].items():
        assert_close(found[0][name], expected, msg=lambda text, name=name: f"{name}: {text}")


def test_what_the_forms_refuse():
    with pytest.raises(ValueError, match="cannot take role 'self'"):
        regard.attention("longshort(relative=True)", width=16, heads=4)
    with pytest.raises(ValueError, match="needs norm=True"):
        regard.attention("longshort(lra=True, norm=False)", width=16, heads=4)
