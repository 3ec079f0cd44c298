"""What the suite does not ask of the Compressive Transformer; `compressive-transformer-pytorch` and labml's."""

import importlib

import pytest
import torch
from compressive_transformer_pytorch.compressive_transformer_pytorch import SelfAttention
from torch.testing import assert_close

import regard
from regard.core.rows import Rows
from regard.models.config import ModelConfig
from regard.models.transformer import Transformer

WIDTH, HEADS, N = 16, 4, 6


def layer_of(options: str = "", **sizes) -> regard.Attention:
    torch.manual_seed(0)
    spec = f"compressive(segment={N}, memory={N}, compressed=4, rate=3{options})"
    return regard.attention(spec, width=WIDTH, heads=HEADS, role="causal", **sizes).double().train()


def draw(B: int, T: int) -> torch.Tensor:
    return torch.randn(B, T, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_peer():
    """Output and loss are those of compressive-transformer-pytorch, which is given a segment at a time."""
    torch.manual_seed(0)
    theirs = SelfAttention(WIDTH, N, N, 4, cmem_ratio=3, heads=HEADS).double().train()
    ours = layer_of(", relative=False", bias=True)
    with torch.no_grad():
        for name, weight in zip("qkv", (theirs.to_q.weight, *theirs.to_kv.weight.chunk(2)), strict=True):
            ours.project[name].weight.copy_(weight)
            # their output alone has a bias
            ours.project[name].bias.zero_()
        ours.output.load_state_dict(theirs.to_out.state_dict())
        ours.squeeze.load_state_dict(theirs.compress_mem_fn.conv.state_dict())
    x, memories, ys, losses = draw(2, 5 * N), None, [], []
    for part in x.split(N, 1):
        # what learns of the output is the paper's stop away from the compression
        cut = None if memories is None else tuple(memory.detach() for memory in memories)
        y, memories, loss = theirs(part, memories=cut)
        ys.append(y)
        losses.append(loss)
    out = ours.forward_packed(x)
    assert_close(out.y, torch.cat(ys, 1))
    # before the first compression nothing is lost, which is no part of our mean
    expected = sum(losses[1:]) / (len(losses) - 1)
    assert_close(out.auxiliary_loss, expected)
    out.auxiliary_loss.backward()
    expected.backward()
    assert_close(ours.squeeze.weight.grad, theirs.compress_mem_fn.conv.weight.grad)
    assert_close(ours.squeeze.bias.grad, theirs.compress_mem_fn.conv.bias.grad)


def labml_attention(ours: regard.Attention, distances: int) -> torch.nn.Module:
    """labml's relative attention with our weights: its vectors of distances are ours, W_R R_d, and its number of each
    distance is v . W_R R_d. Nothing is left at zero, and gradients reach our parameters."""
    theirs = importlib.import_module("labml_nn.transformers.xl.relative_mha").RelativeMultiHeadAttention(
        HEADS, WIDTH, 0
    )
    place = ours.position
    frequency = 10000 ** (-torch.arange(0, WIDTH, 2).double() / WIDTH)
    angle = torch.arange(distances, -distances, -1).double()[:, None] * frequency
    R = torch.cat([angle.sin(), angle.cos()], 1) @ place.project.weight.T
    vectors = R.view(2 * distances, HEADS, -1)
    for name, value in (
        ("key_pos_embeddings", vectors),
        ("key_pos_bias", torch.einsum("chd,hd->ch", vectors, place.v)),
        ("query_pos_bias", place.u),
    ):
        delattr(theirs, name)
        setattr(theirs, name, value)
    theirs.P = distances
    for name, part in (("q", theirs.query), ("k", theirs.key), ("v", theirs.value)):
        part.linear.weight, part.linear.bias = ours.project[name].weight, ours.project[name].bias
    theirs.output.weight, theirs.output.bias = ours.output.weight, ours.output.bias
    return theirs


@pytest.mark.parametrize("memory", [N, 2 * N])
def test_relative_distances_are_labmls(memory, monkeypatch):
    """Slots, memory and segment are one line of places, and all that the paper adds to a score is there. The last
    segment is not full; between segments nothing goes back."""
    # a call that is gone from today's labml
    monkeypatch.setattr(importlib.import_module("labml.tracker"), "debug", lambda *_: None, raising=False)
    torch.manual_seed(0)
    spec = f"compressive(segment={N}, memory={memory}, compressed=4, rate=3)"
    ours = regard.attention(spec, width=WIDTH, heads=HEADS, role="causal", bias=True).double().train()
    with torch.no_grad():
        for part in (ours.position.u, ours.position.v, *(linear.bias for linear in ours.project.values())):
            part.normal_()
    theirs = labml_attention(ours, 64)
    compress = importlib.import_module("labml_nn.transformers.compressive").Conv1dCompression(3, WIDTH).double()
    compress.conv.load_state_dict(ours.squeeze.state_dict())
    x = draw(2, 6 * N + 2)
    mem = slots = x[:, :0].transpose(0, 1)
    state, mine, other = ours.start(2), [], []
    for h in x.split(N, 1):
        y, state = ours.extend(h, regard.detach(state))
        mine.append(y)
        z = h.transpose(0, 1)
        seen = torch.cat([slots, mem, z])
        visible = torch.ones(len(z), len(seen), dtype=torch.bool).tril(len(seen) - len(z))[..., None]
        other.append(theirs(query=z, key=seen, value=seen, mask=visible).transpose(0, 1))
        mem = torch.cat([mem, z])
        if len(mem) > memory:
            old, mem = mem[:N], mem[N:]
            slots = torch.cat([slots, compress(old).detach()])[-4:]
    mine, other = torch.cat(mine, 1), torch.cat(other, 1)
    assert_close(mine, other)
    assert_close(ours.forward_packed(x).y, other)
    toward = torch.randn_like(mine)
    leaves = [ours.position.project.weight, ours.position.u, ours.position.v]
    leaves += [ours.project[name].weight for name in "qkv"]
    expected = torch.autograd.grad((other * toward).sum(), leaves)
    assert_close(torch.autograd.grad((mine * toward).sum(), leaves), expected)


@pytest.mark.parametrize("function", ["conv", "dilated"])
@pytest.mark.parametrize("loss", ["attention", "autoencoding"])
def test_the_loss_trains_the_compression_and_nothing_else(function, loss):
    layer = layer_of(f", function='{function}', loss='{loss}'")
    assert layer.facts.auxiliary_loss
    x = draw(2, 4 * N + 2).requires_grad_()
    out = layer.forward_packed(x)
    compression = {name for name, _ in layer.named_parameters() if name.startswith(("squeeze.", "restore."))}
    out.auxiliary_loss.backward(retain_graph=True)
    assert {name for name, part in layer.named_parameters() if part.grad is not None} == compression
    assert all(part.grad.any() for name, part in layer.named_parameters() if name in compression)
    assert x.grad is None
    layer.zero_grad()
    out.y.square().sum().backward()
    trained = {name for name, part in layer.named_parameters() if part.grad is not None}
    assert trained == {name for name, _ in layer.named_parameters()} - compression
    # the output is the same, and no loss is made, outside of training
    assert_close(layer.eval().forward_packed(x).y, out.y)
    assert layer.forward_packed(x).auxiliary_loss is None


@pytest.mark.parametrize("loss", ["attention", "autoencoding"])
def test_autoencoding_and_attention_by_hand(loss):
    layer, x = layer_of(f", loss='{loss}'"), draw(1, 3 * N - 2)
    errors = []
    for begin in (N, 2 * N):
        old = x[0, begin - N : begin]
        slots = layer.squeeze(old.T[None])
        if loss == "autoencoding":
            error = (layer.restore(slots)[0].T - old).square().mean()
            errors += [error] * len(x[0, begin : begin + N])
            continue
        for h in x[0, begin : begin + N]:
            reads = []
            for source in (old, slots[0].T):
                q, k, v = layer.project["q"](h), layer.project["k"](source), layer.project["v"](source)
                heads = [slice(4 * head, 4 * head + 4) for head in range(HEADS)]
                reads.append(torch.cat([torch.softmax(k[:, own] @ q[own] / 2, 0) @ v[:, own] for own in heads]))
            errors.append((reads[0] - reads[1]).square().mean())
    assert_close(layer.forward_packed(x).auxiliary_loss, torch.stack(errors).mean())


@pytest.mark.parametrize("loss", ["attention", "autoencoding"])
def test_the_loss_does_not_depend_on_the_cut(loss):
    """Each call's loss is a mean over its tokens that have something to lose: weighted by those, they add up."""
    layer, T = layer_of(f", loss='{loss}'"), 4 * N
    x, keep = draw(2, T), torch.arange(T) < torch.tensor([T, 3 * N - 1])[:, None]
    rows = Rows(torch.zeros(2, dtype=torch.long), keep.sum(1), T, None)
    whole = layer.forward_packed(torch.where(keep[..., None], x, 0), rows).auxiliary_loss
    for cuts in ([1] * T, [5, 1, 9, 1, T - 16]):
        state, total, weight, first = layer.start(2), 0.0, 0, 0
        for n in cuts:
            count = keep[:, first : first + n].sum(1)
            out = layer.forward_packed(
                x[:, first : first + n], Rows(state.progress.length, count, n, None), state=state
            )
            asked = (torch.arange(first, first + n) >= N)[None] & keep[:, first : first + n]
            total, weight = total + out.auxiliary_loss * asked.sum(), weight + asked.sum()
            state, first = out.state, first + n
        assert_close(total / weight, whole)


def test_training_by_segments_stops_at_the_memory():
    """Nothing goes back into the inputs of what was cut, but its keys and values still train their projections."""
    layer, x = layer_of(", loss='none'"), draw(2, 4 * N).requires_grad_()
    state = layer.start(2)
    for part in x.split(N, 1)[:-1]:
        _, state = layer.extend(part, state)
    y, _ = layer.extend(x[:, -N:], regard.detach(state))
    y.square().sum().backward()
    assert not x.grad[:, :-N].any()
    assert x.grad[:, -N:].any()
    trained = layer.project["v"].weight.grad.clone()
    layer.zero_grad()
    y, _ = layer.extend(x[:, -N:], regard.detach(state._replace(tail=layer._full(state.tail))))
    y.square().sum().backward()
    assert (trained - layer.project["v"].weight.grad).abs().max() > 1e-6


@pytest.mark.parametrize("function", ["mean", "used"])
def test_the_map_is_what_reaches_a_query(function):
    """Where slots are linear in the tokens the layer is so in its values, and the map can be told from outside."""
    layer, x = layer_of(f", function='{function}'").eval(), draw(2, 5 * N + 1)
    o = layer.weights(x) @ layer.project_heads("v", x)
    assert_close(layer.output(o.transpose(1, 2).flatten(2)), layer(x))


def test_a_model_hands_the_losses_on():
    torch.manual_seed(0)
    spec = f"compressive(segment={N}, memory={N}, compressed=4, rate=2)"
    sizes = {"vocabulary": 20, "width": WIDTH, "heads": HEADS, "inner": 8, "layers": 2, "dropout": 0.0}
    model = Transformer(ModelConfig(kind="decoder", attention=spec, position="none", **sizes))
    tokens = torch.randint(20, (2, 4 * N))
    prediction = model(tokens)
    (prediction.logits.square().mean() + prediction.auxiliary_loss).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.eval()(tokens).auxiliary_loss is None


def test_what_it_refuses():
    for options in ("segment=6, memory=8, rate=2", "segment=6, memory=6, rate=4"):
        with pytest.raises(ValueError, match="multiple of segment"):
            regard.attention(f"compressive({options})", width=16, heads=4, role="causal")
    with pytest.raises(ValueError, match="leave it out"):
        regard.attention("compressive(clamp=4, relative=False)", width=16, heads=4, role="causal")
    with pytest.raises(ValueError, match="cannot take position 'rotary'"):
        regard.attention("compressive", width=16, heads=4, role="causal", position="rotary")
    q = torch.zeros(1, 4, 3, 4)
    with pytest.raises(ValueError, match="no plain function"):
        regard.attend("compressive(function='mean', relative=False)", q, q, q, causal=True)
    layer = layer_of()
    with pytest.raises(ValueError, match="a state has no map"):
        layer.weights(draw(2, 3), state=layer.start(2))


@pytest.mark.parametrize("position", ["shaw(distance=4)", "shaw(distance=2, values=False)", "xl"])
@pytest.mark.parametrize("segment", [4, 10])
def test_usage_where_the_position_acts_on_what_is_read(position: str, segment: int):
    """Segments wider and narrower than a head: usage is read by unit vectors, one for each token of a segment."""
    torch.manual_seed(0)
    spec = f"compressive(segment={segment}, memory={segment}, compressed=3, rate=2, function='used', relative=False)"
    layer = regard.attention(spec, width=WIDTH, heads=2, role="causal", position=position).double()
    x = draw(1, 33)
    assert_close(layer(x)[0], layer.reference(x[0]))
