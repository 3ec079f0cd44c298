"""The Funnel-Transformer: the formulas of the paper in loops, padding that changes nothing, Hugging Face's Funnel."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from lengths import (
    VOCABULARY,
    check_gradients,
    check_padding,
    embedded,
    gelu,
    ids,
    linear,
    norm,
    shaken,
)
from quick import one_of_each
from torch.testing import assert_close

import regard
from regard.core.reference import blend
from regard.core.rows import Rows
from regard.models.funnel import Funnel, FunnelConfig, halve, stretch
from regard.spec import ATTENTION

SPECS = [ATTENTION.find(name).examples[0] for name in ATTENTION.names()]
WIDTH = 16
FORMS = [
    {},
    {"norm": "pre"},
    {"apart": False},
    {"queries_only": False},
    {"classes": 5},
    {"classes": 5, "apart": False, "pooling": "mean", "norm": "pre"},
    {"layers": (1,), "decoder_layers": 0},
    {"layers": (1, 1, 1), "decoder_layers": 1},
]


def build(**options) -> Funnel:
    sizes = {"vocabulary": VOCABULARY, "width": WIDTH, "heads": 4, "inner": 32, "dropout": 0.0, "layers": (2, 2, 1)}
    return shaken(Funnel(FunnelConfig(**(sizes | options))))


def plain_halve(x: list, apart: bool) -> list:
    windows = [x[:1]] if apart else []
    rest = x[1:] if apart else x
    windows += [rest[i : i + 2] for i in range(0, len(rest), 2)]
    return [sum(window) / len(window) for window in windows]


def read(layer, x, memory, at, stand, apart: bool) -> torch.Tensor:
    """Softmax attention of queries x that stand `at` their places over keys that `stand` at theirs, head by head. The
    first token, where it is apart, has no place: nothing that a scheme says of distances joins its logits."""
    D, scheme, outs = layer.shape.head_width, layer.position, []
    q, k, v = (
        torch.stack([linear(vector, layer.project[name]) for vector in part])
        for name, part in (("q", x), ("k", memory), ("v", memory))
    )
    for head in range(layer.shape.heads):
        own = slice(head * D, head * D + D)
        found = []
        for i in range(len(x)):
            logits, values = [], []
            for j in range(len(memory)):
                query, key, value = q[i, own], k[j, own], v[j, own]
                placed, bias = not (apart and 0 in (i, j)), 0.0
                if scheme is not None:
                    query, key = scheme.plain_rotate(query, at[i]), scheme.plain_rotate(key, stand[j])
                product = query @ key
                if scheme is not None and placed:
                    product = product + scheme.plain_score(head, query, key, at[i], stand[j])
                    bias = scheme.plain_bias(head, at[i], stand[j])
                    value = value + scheme.plain_value(head, at[i], stand[j])
                elif scheme is not None and scheme.facts.name == "xl":
                    product = product + scheme.u[head] @ key
                logits.append(product / math.sqrt(D) + bias)
                values.append(value)
            found.append(blend(torch.stack(logits), values))
        outs.append(torch.stack(found))
    return torch.stack([linear(vector, layer.output) for vector in torch.cat(outs, 1)])


def placed_block(layer, x, at, apart, memory=None, stand=None) -> torch.Tensor:
    """One row through a layer."""
    first, last = layer.norms
    attention = layer.attention or layer.cross

    def feed(vector):
        return linear(gelu(linear(vector, layer.feedforward.inner)), layer.feedforward.outer)

    given = torch.stack([norm(vector, first) for vector in x]) if layer.pre else x
    seen = read(attention, given, given if memory is None else memory, at, at if stand is None else stand, apart)
    if layer.pre:
        x = x + seen
        return torch.stack([vector + feed(norm(vector, last)) for vector in x])
    x = [norm(vector, first) for vector in x + seen]
    return torch.stack([norm(vector + feed(vector), last) for vector in x])


def plain(model: Funnel, row: torch.Tensor) -> torch.Tensor:
    """The logits of one row in loops."""
    config = model.config
    counts_tokens = config.places == "tokens"
    unplaced = config.apart and counts_tokens
    x = embedded(model.first.embedding, model.first.position, row)
    at = list(range(len(row)))
    for layer in model.first.blocks:
        x = placed_block(layer, x, at, unplaced)
    begun = x
    stands = [[t] for t in range(len(row))]  # the tokens that each vector stands for
    for index, layers in enumerate(model.blocks, 1):
        entry, *others = layers
        pooled = torch.stack(plain_halve(list(x), config.apart))
        groups = [stands[:1]] if config.apart else []
        rest = stands[1:] if config.apart else stands
        groups += [rest[i : i + 2] for i in range(0, len(rest), 2)]
        stands = [[t for part in group for t in part] for group in groups]
        # a window stands where its first token does, and the first token before them all, a stride away
        before, at = at, [tokens[0] for tokens in stands]
        if config.apart:
            at[0] = 1 - 2**index
        if not counts_tokens:
            at = list(range(len(stands)))
        if config.queries_only:
            seen = torch.stack([norm(vector, entry.norms[0]) for vector in x]) if entry.pre else x
            x = placed_block(entry, pooled, at, unplaced, seen, before)
        else:
            x = placed_block(entry, pooled, at, unplaced)
        for layer in others:
            x = placed_block(layer, x, at, unplaced)
    if config.classes is None:
        where = {t: slot for slot, tokens in enumerate(stands) for t in tokens}
        x = torch.stack([begun[t] + x[where[t]] for t in range(len(row))])
        at = list(range(len(row)))
    for layer in model.decoder:
        x = placed_block(layer, x, at, unplaced)
    if config.norm == "pre":
        x = torch.stack([norm(vector, model.norm) for vector in x])
    if config.classes is None:
        return x @ model.first.embedding.weight.T
    return linear(x[0] if config.pooling == "first" else sum(x) / len(x), model.answer.output)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("T", [1, 2, 3, 8])
def test_reference(form, T):
    model, tokens = build(heads=2, **form), ids(B=2 if T < 8 else 1, T=T)
    for row, logits in zip(tokens, model(tokens).logits, strict=True):
        assert_close(logits, plain(model, row))


RELATIVE = ["xl", "xl(clamp=3)", "shaw(distance=5)", "music(longest=9)", "alibi", "buckets(buckets=8)", "rotary"]


@pytest.mark.parametrize("position", RELATIVE)
@pytest.mark.parametrize("form", [{}, {"apart": False, "norm": "pre"}, {"queries_only": False}], ids=str)
def test_positions_count_tokens_in_every_block(position, form):
    """In block b neighbours are 2^b places apart, and pooled queries and the keys they read stand on the same line."""
    small = {"layers": (1, 1, 2), "decoder_layers": 1, "heads": 2}
    model, tokens = build(position=position, **small, **form), ids(B=1, T=8)
    assert_close(model(tokens).logits[0], plain(model, tokens[0]))


def in_matrices(model: Funnel, row: torch.Tensor) -> torch.Tensor:
    """The logits of one row, blocks of matrices at a time: a line of places, pooled as the vectors are, and the logits
    of Transformer-XL at the differences of two places."""
    apart, H = model.config.apart, model.config.heads

    def layer(part, x, memory, at, stand):
        attention = part.attention or part.cross
        q, k, v = (attention.project[n](y).view(len(y), H, -1) for n, y in (("q", x), ("k", memory), ("v", memory)))
        scheme, distance = attention.position, (at[:, None] - stand).double()
        angle = distance[..., None] * 10000 ** (-torch.arange(0, WIDTH, 2).double() / WIDTH)
        R = scheme.project(torch.cat([angle.sin(), angle.cos()], -1)).unflatten(-1, (H, -1))
        place = torch.einsum("ihd,ijhd->hij", q + scheme.v, R)
        if apart:
            both = torch.arange(len(x))[:, None].bool() & torch.arange(len(memory)).bool()
            place = place * both
        logits = torch.einsum("ihd,jhd->hij", q + scheme.u, k) + place
        o = torch.einsum("hij,jhd->ihd", (logits / q.shape[-1] ** 0.5).softmax(-1), v)
        x = part.norms[0](x + attention.output(o.flatten(1)))
        return part.norms[1](x + part.feedforward.outer(F.gelu(part.feedforward.inner(x))))

    x, at = model.first.embedding(row) * WIDTH**0.5, torch.arange(len(row))
    for part in model.first.blocks:
        x = layer(part, x, x, at, at)
    begun = x
    for index, (entry, *others) in enumerate(model.blocks, 1):
        rest, places = (x[1:], at[1:]) if apart else (x, at)
        odd = len(rest) % 2
        pooled = torch.cat([rest, rest[-1:]]) if odd else rest  # the last alone
        pooled, places = pooled.view(-1, 2, WIDTH).mean(1), places[::2]
        if apart:
            pooled, places = torch.cat([x[:1], pooled]), torch.cat([torch.tensor([1 - 2**index]), places])
        x = layer(
            entry,
            pooled,
            x if model.config.queries_only else pooled,
            places,
            at if model.config.queries_only else places,
        )
        at = places
        for part in others:
            x = layer(part, x, x, at, at)
    times = 2 ** len(model.blocks)
    stretched = torch.cat([x[:1], x[1:].repeat_interleave(times, 0)]) if apart else x.repeat_interleave(times, 0)
    x, at = begun + stretched[: len(row)], torch.arange(len(row))
    for part in model.decoder:
        x = layer(part, x, x, at, at)
    return x @ model.first.embedding.weight.T


@pytest.mark.parametrize("form", [{}, {"apart": False}, {"queries_only": False}], ids=str)
@pytest.mark.parametrize("T", [13, 16])
def test_gradients_of_three_blocks(form, T):
    model, tokens = build(position="xl", **form), ids(B=1, T=T)
    mine, other = model(tokens).logits[0], in_matrices(model, tokens[0])
    assert_close(mine, other)
    names, parameters = zip(*model.named_parameters(), strict=True)
    toward = torch.randn_like(mine)
    got, expected = (torch.autograd.grad((y * toward).sum(), parameters) for y in (mine, other))
    for name, one, two in zip(names, got, expected, strict=True):
        assert_close(one, two, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("position", ["xl", "alibi"])
def test_positions_that_count_vectors(position):
    """Runs of before: each block counts its own, and pooled queries read by content alone."""
    model, tokens = build(position=position, places="vectors", heads=2), ids(B=1, T=8)
    assert all(layer[0].cross.position is None for layer in model.blocks)
    assert_close(model(tokens).logits[0], plain(model, tokens[0]))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_padding_and_gradients(form):
    model = build(**form)
    check_padding(model)
    check_gradients(model)


@pytest.mark.parametrize("spec", one_of_each([spec for spec in SPECS if "self" in regard.facts(spec).roles]))
def test_any_attention(spec):
    check_padding(build(attention=spec))


@pytest.mark.parametrize("spec", one_of_each([spec for spec in SPECS if "cross" in regard.facts(spec).roles]))
def test_any_attention_of_pooled_queries(spec):
    check_padding(build(cross_attention=spec))


@pytest.mark.parametrize("position", regard.names("position"))
def test_positions(position):
    check_padding(build(position=position))


@pytest.mark.parametrize("apart", [False, True])
def test_lengths(apart):
    """What is stretched stands where its window stood, at every length."""
    for T in range(1, 20):
        x = torch.arange(T, dtype=torch.float64)[None, :, None]
        rows, times = Rows.full(x), 1
        for _ in range(3):
            x, rows = halve(x, rows, apart)
            times *= 2
            back = stretch(x, T, times, apart)[0, :, 0]
            assert rows.T == x.shape[1] == rows.count[0]
            for t in range(T):
                assert abs(back[t] - t) < times
            assert not apart or back[0] == 0


def peer(**options):
    """Hugging Face's encoder and decoder at the sizes of `build`."""
    peers = importlib.import_module("transformers.models.funnel")
    sizes = {"d_model": WIDTH, "n_head": 4, "d_head": 4, "d_inner": 32, "num_decoder_layers": 2}
    off = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "truncate_seq": False}
    config = {"vocab_size": VOCABULARY, "hidden_act": "gelu", "layer_norm_eps": 1e-5}
    return shaken(peers.FunnelModel(peers.FunnelConfig(**config, **sizes, **off, **options)))


@torch.no_grad()
def theirs_and_ours(ours: Funnel, theirs, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of both, once our weights are theirs. Nothing of theirs is set to zero; ours has a bias of queries,
    which theirs has not."""
    layers = [*ours.first.blocks, *(layer for block in ours.blocks for layer in block), *ours.decoder]
    others = [layer for block in theirs.encoder.blocks for layer in block] + list(theirs.decoder.layers)
    for mine, other in zip(layers, others, strict=True):
        attention, inside = mine.attention or mine.cross, other.attention
        attention.project["q"].weight.copy_(inside.q_head.weight)
        attention.project["q"].bias.zero_()
        for name, head in (("k", inside.k_head), ("v", inside.v_head)):
            attention.project[name].load_state_dict(head.state_dict())
        attention.output.load_state_dict(inside.post_proj.state_dict())
        if attention.position is not None:
            attention.position.project.weight.copy_(inside.r_kernel.flatten(1).T)
            attention.position.u.copy_(inside.r_w_bias)
            attention.position.v.copy_(inside.r_r_bias)
        mine.feedforward.inner.load_state_dict(other.ffn.linear_1.state_dict())
        mine.feedforward.outer.load_state_dict(other.ffn.linear_2.state_dict())
        for layer, norms in zip(mine.norms, (inside.layer_norm, other.ffn.layer_norm), strict=True):
            layer.load_state_dict(norms.state_dict())
    tokens = ids(T=T)
    x = ours.first.embed(tokens, Rows.full(tokens))
    mask = torch.ones(x.shape[:2], dtype=torch.float64)
    encoded = theirs.encoder(x, attention_mask=mask, output_hidden_states=True)
    begun = encoded.hidden_states[len(ours.first.blocks)]
    y = theirs.decoder(encoded.last_hidden_state, begun, attention_mask=mask).last_hidden_state
    return ours(tokens).logits, y @ ours.first.embedding.weight.T


@pytest.mark.parametrize("kind", ["relative_shift", "factorized"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("queries_only", [False, True])
@pytest.mark.parametrize("T", [5, 8, 13])
def test_it_is_that_of_hugging_face(kind, apart, queries_only, T):
    """Three blocks and a decoder, relative positions in all of them. Their tables of positions fail below 4 tokens."""
    theirs = peer(block_sizes=[2, 2, 1], separate_cls=apart, pool_q_only=queries_only, attention_type=kind)
    mine, other = theirs_and_ours(build(apart=apart, queries_only=queries_only, position="xl"), theirs, T)
    # their softmax reads logits in float32
    assert_close(mine, other, rtol=1.3e-6, atol=1e-5)
    if T == 13:
        # what is compared is there: positions that count vectors give something else
        old = build(apart=apart, queries_only=queries_only, position="xl", places="vectors")
        assert (theirs_and_ours(old, theirs, T)[0] - other).abs().max() > 0.1


@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if regard.facts(spec).auxiliary_loss and "self" in regard.facts(spec).roles]
)
def test_second_losses_are_handed_on(spec):
    """Of every layer: one before the length changes, one behind."""
    small = {"layers": (1, 1), "queries_only": False, "decoder_layers": 0}
    both, one = (build(attention=specs, **small).train()(ids()).auxiliary_loss for specs in (spec, [spec, "softmax"]))
    assert both > one > 0
    assert build()(ids()).auxiliary_loss is None


def test_refusals():
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        FunnelConfig(layers=(2, 0))
    with pytest.raises(ValueError, match="kind must be 'funnel', got 'encoder'"):
        FunnelConfig(kind="encoder")
    with pytest.raises(ValueError, match="'local' cannot take role 'cross'"):
        build(cross_attention="local(window=2)")
    with pytest.raises(ValueError, match="cannot take role 'self'"):
        build(attention="xl")
    with pytest.raises(ValueError, match="whole numbers"):
        build()(torch.zeros(2, 3))
