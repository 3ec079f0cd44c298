"""What the suite does not ask of Luna: the packed sequence that goes from layer to layer."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import regard
from regard.core.rows import Memory, Rows
from regard.layers.attention.base import Attention
from regard.models.config import ModelConfig
from regard.models.transformer import Transformer

WIDTH, HEADS = 16, 4


def layer_of(role: str, spec: str = "luna(length=3)") -> Attention:
    return regard.attention(spec, width=WIDTH, heads=HEADS, role=role, bias=True).double().eval()


def draw(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def by_hand(layer, P: torch.Tensor, context: torch.Tensor, heads: int = HEADS) -> torch.Tensor:
    """Y_P [l, E] of one row: what P [l, E] packs of the context [S, E]."""
    q, c = (layer.linears[name](part) for name, part in (("packed_q", P), ("packed_k", context)))
    outs, wide = [], WIDTH // heads
    for head in range(heads):
        own = slice(head * wide, (head + 1) * wide)
        outs.append(torch.softmax(q[:, own] @ c[:, own].T / wide**0.5, -1) @ c[:, own])
    return torch.cat(outs, -1)


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_the_packed_sequence_reads_with_its_own_number_of_heads(heads):
    layer = layer_of("self", f"luna(length=3, pack_heads={heads})")
    layer.link_layers(None, False, True)
    layer.double()
    x = draw(1, 7, WIDTH)
    packed = layer.packed + by_hand(layer, layer.packed, x[0], heads)
    assert_close(layer.forward_packed(x).stream[0], F.layer_norm(packed, (WIDTH,)))


@pytest.mark.parametrize("role", ["self", "cross"])
def test_the_packed_sequence_goes_on(role):
    first, second = layer_of(role), layer_of(role)
    first.link_layers(None, False, True)
    second.link_layers(first, True, False)
    first.double()
    torch.nn.init.normal_(first.packed_norm.weight)
    assert second.packed is first.packed
    assert second.packed_norm is None
    x, memory, count = draw(2, 7, WIDTH), draw(2, 9, WIDTH), torch.tensor([7, 5])
    rows = Rows(torch.zeros(2, dtype=torch.long), count, 7, None)
    given = {"memory": Memory(memory, count)} if role == "cross" else {}
    out = first.forward_packed(x, rows, **given)
    for row in range(2):
        context = (memory if role == "cross" else x)[row, : count[row]]
        packed = first.packed + by_hand(first, first.packed, context)
        assert_close(out.stream[row], F.layer_norm(packed, (WIDTH,), first.packed_norm.weight))
    # a layer that is given a stream reads it in the place of its own P
    y = second.forward_packed(x, rows, stream=out.stream, **given)
    assert y.stream is None
    for row in range(2):
        alone = layer_of(role)
        alone.load_state_dict(second.state_dict())
        with torch.no_grad():
            alone.packed.copy_(out.stream[row])
        own = x[row : row + 1, : count[row]] if role == "self" else x[row : row + 1]
        expected = alone(own, memory=memory[row : row + 1, : count[row]]) if role == "cross" else alone(own)
        assert_close(y.y[row, : own.shape[1]], expected[0])
    if role == "cross":
        begun = first.initial_state(2, memory=given["memory"], dtype=x.dtype, device=x.device)
        assert_close(begun.stream, out.stream)
        begun = second.initial_state(2, memory=given["memory"], stream=begun.stream, dtype=x.dtype, device=x.device)
        assert_close(second.forward_packed(x, state=begun.state).y, y.y)


def test_causal_layers_read_a_stream_and_hand_it_on():
    layer, x, stream = layer_of("causal"), draw(2, 9, WIDTH), draw(2, 3, WIDTH)
    whole = layer.forward_packed(x, stream=stream)
    assert whole.stream is stream
    assert (whole.y - layer(x)).abs().max() > 1e-3
    begun = layer.initial_state(2, stream=stream, dtype=x.dtype, device=x.device)
    assert begun.stream is stream
    steps, state = [], begun.state
    for t in range(9):
        y, state = layer.extend(x[:, t : t + 1], state)
        steps.append(y)
    assert_close(torch.cat(steps, 1), whole.y)


def test_a_cut_state_still_trains_the_packed_sequence():
    layer, x = layer_of("causal"), draw(2, 6, WIDTH)
    _, state = layer.extend(x[:, :3], layer.start(2))
    y, _ = layer.extend(x[:, 3:], regard.detach(state))
    y.square().sum().backward()
    assert layer.packed.grad.any()


def test_the_layers_of_an_encoder_share_one_stream():
    sizes = {"vocabulary": 20, "width": WIDTH, "heads": HEADS, "inner": 8, "layers": 3, "dropout": 0.0}
    model = Transformer(ModelConfig(kind="encoder", attention="luna(length=3)", **sizes))
    layers = [block.attention for block in model.encoder.blocks]
    assert [layer.packed_norm is not None for layer in layers] == [True, True, False]
    assert len({id(layer.packed) for layer in layers}) == 1
    model(torch.randint(20, (2, 5))).logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ValueError, match="hand on one packed sequence"):
        Transformer(ModelConfig(kind="encoder", attention=["luna(length=3)", "luna(length=4)"], **sizes))


BOTH = {"vocabulary": 20, "width": WIDTH, "heads": HEADS, "inner": 8, "layers": 2, "dropout": 0.0}
SOURCE_KEEP = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 0, 1, 0, 1, 0]]).bool()
PLACES = [
    {"attention": "luna(length=3)", "cross_attention": "luna(length=3)"},
    {"attention": "luna(length=3)"},
    {"attention": "softmax", "cross_attention": "luna(length=3)"},
    {"attention": "luna(length=3)", "decoder_attention": "softmax", "cross_attention": ["softmax", "luna(length=3)"]},
]


def translator(**options) -> Transformer:
    model = Transformer(ModelConfig(**(BOTH | options))).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("specs", PLACES, ids=str)
def test_decoding_reads_the_stream_of_the_encoder_as_training_does(specs, norm):
    specs = specs | {"norm": norm}
    model, source, target = translator(**specs), torch.randint(20, (2, 6)), torch.randint(20, (4, 7))
    keep = torch.rand(4, 7) < 0.7
    keep[:, 0] = True
    wide = [part.repeat_interleave(2, 0) for part in (source, SOURCE_KEEP)]
    whole = model(wide[0], target, keep=wide[1], target_keep=keep).logits
    for cuts in ([7], [1] * 7, [3, 1, 3]):
        # two rows of the target to each of the source, as beams are
        state = model.start(4, memory=model.encode(source, keep=SOURCE_KEEP))
        pieces, first = [], 0
        for n in cuts:
            logits, state = model.extend(target[:, first : first + n], state, keep=keep[:, first : first + n])
            pieces.append(logits)
            first += n
        assert_close(torch.cat(pieces, 1), whole)
    for parameter in model.parameters():
        parameter.grad = None
    model(source, target[:2], keep=SOURCE_KEEP).logits.square().sum().backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


def test_the_stream_goes_from_the_encoder_through_every_layer_of_the_decoder():
    """P <- LN(P + Y_P) in each layer of the encoder, then in each cross-attention of the decoder, by hand."""
    model, source, target = translator(**PLACES[0]), torch.randint(20, (2, 6)), torch.randint(20, (2, 5))
    seen = []
    for block in model.decoder.blocks:
        for layer in (block.attention, block.cross):
            layer.forward_packed = functools.partial(_noted, layer, seen)
    memory = model.encode(source)
    model.decoder(target, Rows.full(target), memory=memory)
    assert_close(seen[0], memory.stream)
    for number, block in enumerate(model.decoder.blocks):
        own, cross = seen[2 * number : 2 * number + 2]
        assert_close(own, cross)
        if block.cross.packed_norm is None:
            continue
        for row in range(2):
            packed = own[row] + by_hand(block.cross, own[row], memory.x[row])
            norm = block.cross.packed_norm
            assert_close(seen[2 * number + 2][row], F.layer_norm(packed, (WIDTH,), norm.weight, norm.bias))
    assert [block.cross.packed_norm is None for block in model.decoder.blocks] == [False, True]
    assert model.encoder.blocks[-1].attention.packed_norm is not None
    assert len([name for name, _ in model.named_parameters() if name.endswith(".packed")]) == 1


def test_in_a_model_with_norms_before_P_is_normed_to_read_and_its_residual_is_raw():
    """P <- P + Attn(LN(P), LN(X)) in each layer of the encoder; LN behind it; then P <- P + Attn(LN(P), M) in each
    cross-attention, and the causal layers read P as it comes."""
    model, source, target = translator(norm="pre", **PLACES[0]), torch.randint(20, (2, 6)), torch.randint(20, (2, 5))

    def normed(norm, x):
        return F.layer_norm(x, (WIDTH,), norm.weight, norm.bias)

    seen, inputs = [], []
    for block in model.encoder.blocks:
        block.attention.forward_packed = functools.partial(_noted_with_input, block.attention, seen, inputs)
    memory = model.encode(source)
    P = model.encoder.blocks[0].attention.packed.expand(2, -1, -1)
    for block, x in zip(model.encoder.blocks, inputs, strict=True):
        layer = block.attention
        P = torch.stack([P[row] + by_hand(layer, normed(layer.packed_norm, P[row]), x[row]) for row in range(2)])
    assert_close(memory.stream, normed(model.encoder.stream_norm, P))
    seen = []
    for block in model.decoder.blocks:
        for layer in (block.attention, block.cross):
            layer.forward_packed = functools.partial(_noted, layer, seen)
    model.decoder(target, Rows.full(target), memory=memory)
    P = memory.stream
    for number, block in enumerate(model.decoder.blocks):
        for stream in seen[2 * number : 2 * number + 2]:
            assert_close(stream, P)
        layer = block.cross
        read = [by_hand(layer, normed(layer.packed_norm, P[row]), memory.x[row]) for row in range(2)]
        P = P + torch.stack(read)
    model.zero_grad()
    model(source, target).logits.square().sum().backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_gradients_of_an_encoder(norm):
    """All of it by torch's attention, X and P side by side; padded rows are read as far as they go."""
    sizes = BOTH | {"layers": 3, "kind": "encoder", "bias": True, "position": "none", "attention": "luna(length=3)"}
    model, tokens = translator(norm=norm, **sizes), torch.randint(20, (2, 6))
    keep = torch.arange(6) < torch.tensor([[6], [4]])
    pre = norm == "pre"

    def read(layer, queries, context, names):
        q, k = (
            layer.linears[name](part).unflatten(-1, (HEADS, -1)).transpose(-3, -2)
            for name, part in zip(names, (queries, context), strict=True)
        )
        return F.scaled_dot_product_attention(q, k, k).transpose(-3, -2).flatten(-2)

    def by_hand(row):
        x, P = model.encoder.embedding(row) * WIDTH**0.5, model.encoder.blocks[0].attention.packed
        for block in model.encoder.blocks:
            layer, (first, last), feed = block.attention, block.norms, block.feedforward
            X, asks = (first(x), layer.packed_norm(P)) if pre else (x, P)
            packed = read(layer, asks, X, ("packed_q", "packed_k"))
            y = layer.output(read(layer, X, packed, ("q", "k")))
            if layer.packed_norm is not None:
                P = P + packed if pre else layer.packed_norm(P + packed)
            x = x + y if pre else first(x + y)
            fed = feed.outer(F.relu(feed.inner(last(x) if pre else x)))
            x = x + fed if pre else last(x + fed)
        return (model.encoder.norm(x) if pre else x) @ model.output.weight.T

    mine = model(tokens, keep=keep).logits[keep]
    other = torch.cat([by_hand(row[: real.sum()]) for row, real in zip(tokens, keep, strict=True)])
    assert_close(mine, other)
    names, parameters = zip(*model.named_parameters(), strict=True)
    toward = torch.randn_like(mine)
    got, expected = (torch.autograd.grad((y * toward).sum(), parameters) for y in (mine, other))
    for name, one, two in zip(names, got, expected, strict=True):
        assert_close(one, two, msg=lambda text, name=name: f"{name}: {text}")


def _noted_with_input(layer, seen, inputs, x, rows=None, *, stream=None, **rest):
    inputs.append(x)
    return _noted(layer, seen, x, rows, stream=stream, **rest)


def _noted(layer, seen, x, rows=None, *, stream=None, **rest):
    seen.append(stream)
    return type(layer).forward_packed(layer, x, rows, stream=stream, **rest)


def test_packed_sequences_of_different_length_are_refused():
    with pytest.raises(ValueError, match="hand on one packed sequence"):
        translator(attention="luna(length=3)", cross_attention="luna(length=4)")
