"""Perceivers: the formulas of the papers in loops, decoding that equals the whole, and Hugging Face's Perceiver."""

import importlib

import pytest
import torch
from lengths import (
    KEEP,
    VOCABULARY,
    block,
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
from regard.core.rows import Memory, Rows
from regard.decoding import DecodingConfig, generate
from regard.models.config import ModelConfig
from regard.models.perceiver import Perceiver, PerceiverAR, PerceiverARConfig, PerceiverConfig
from regard.models.transformer import Transformer
from regard.spec import ATTENTION

SPECS = [ATTENTION.find(name).examples[0] for name in ATTENTION.names()]
WIDTH, LATENT = 16, 24
SIZES = {"vocabulary": VOCABULARY, "width": WIDTH, "heads": 4, "inner": 32, "dropout": 0.0, "layers": 2}
FORMS = [
    {"reads": "once"},
    {"reads": "once", "blocks": 3},
    {"reads": "each", "blocks": 3, "classes": 5},
    {"reads": "once", "query_residual": True},
    {"reads": "once", "norm": "post"},
    {"reads": "each", "blocks": 2, "classes": 5, "pooling": "pma", "seeds": 2},
]


def taking(role: str) -> list[str]:
    return [spec for spec in SPECS if role in regard.facts(spec).roles]


def build(**options) -> Perceiver:
    own = {"latents": 5, "latent_width": LATENT, "cross_heads": 2}
    return shaken(Perceiver(PerceiverConfig(**(SIZES | own | options))))


def ar(**options) -> PerceiverAR:
    return shaken(PerceiverAR(PerceiverARConfig(**(SIZES | {"latents": 4} | options))))


def read(reader, z, x):
    return block(reader.block, z, gelu, normed(reader, x))


def normed(reader, x):
    return torch.stack([norm(vector, reader.norm) for vector in x]) if reader.block.pre else x


def answer(reader, queries, z):
    """Without the residual: what the queries read is all that goes on."""
    layer = reader.block
    first, second = layer.norms
    asking = torch.stack([norm(vector, first) for vector in queries]) if layer.pre else queries
    seen = layer.cross.reference(asking, normed(reader, z))

    def feed(vector):
        return linear(gelu(linear(vector, layer.feedforward.inner)), layer.feedforward.outer)

    if layer.pre:
        return torch.stack([vector + feed(norm(vector, second)) for vector in seen])
    return torch.stack([norm(vector + feed(vector), second) for vector in (norm(vector, first) for vector in seen)])


@pytest.mark.parametrize("form", FORMS[:5], ids=str)
@pytest.mark.parametrize("T", [1, 7])
def test_reference(form, T):
    model, tokens = build(**form), ids(B=2, T=T)
    for row, logits in zip(tokens, model(tokens).logits, strict=True):
        x = embedded(model.embedding, model.position, row)
        z = model.latents
        for index in range(model.config.blocks):
            if index == 0 or form["reads"] == "each":
                z = read(model.readers[min(index, 1)], z, x)
            for layer in model.blocks:
                z = block(layer, z, gelu)
        if "classes" in form:
            assert_close(logits, linear(sum(z) / len(z), model.answer.output))
            continue
        queries = model.places.plain_add(torch.stack([model.query for _ in row]))
        told = (read if model.config.query_residual else answer)(model.asker, queries, z)
        assert_close(logits, told @ model.embedding.weight.T)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_padding_and_gradients(form):
    model = build(**form)
    check_padding(model)
    check_gradients(model)


@pytest.mark.parametrize("spec", one_of_each(taking("cross")))
def test_any_attention_reads(spec):
    check_padding(build(cross_attention=spec, cross_heads=4))


@pytest.mark.parametrize("spec", one_of_each(taking("self")))
def test_any_attention_among_the_latents(spec):
    model = build(attention=spec, blocks=2, latents=11)
    check_padding(model)
    check_gradients(model)


@pytest.mark.parametrize("position", ["none", "learned", "sinusoidal"])
def test_positions(position):
    check_padding(build(position=position))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_that_of_hugging_face(padded, residual):
    """Encoder and decoder, with and without the residual of the output queries, weights copied: blocks with shared
    weights, another width of the latents, other heads to read. A row without padding there is a row of ours; their mask
    is added to the logits of the reading."""
    peers = importlib.import_module("transformers.models.perceiver.modeling_perceiver")
    config = peers.PerceiverConfig(
        d_model=WIDTH,
        d_latents=LATENT,
        num_latents=5,
        num_blocks=3,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=2,
        qk_channels=LATENT,
        v_channels=LATENT,
        self_attention_widening_factor=2,
        cross_attention_widening_factor=2,
        attention_probs_dropout_prob=0.0,
        hidden_act="gelu",
    )
    encoder = shaken(peers.PerceiverEncoder(config, kv_dim=WIDTH))
    decoder = shaken(
        peers.PerceiverLayer(
            config,
            is_cross_attention=True,
            qk_channels=WIDTH,
            v_channels=WIDTH,
            num_heads=2,
            q_dim=WIDTH,
            kv_dim=LATENT,
            widening_factor=3,
            use_query_residual=residual,
        )
    )
    model = build(blocks=3, inner=2 * LATENT, cross_heads=2)
    asking = build(blocks=3, inner=3 * WIDTH, cross_heads=2, query_residual=residual).asker

    def copy(layer, theirs, attention):
        inside = theirs.attention.self
        for name, other in zip("qkv", (inside.query, inside.key, inside.value), strict=True):
            attention.project[name].load_state_dict(other.state_dict())
        attention.output.load_state_dict(theirs.attention.output.dense.state_dict())
        layer.feedforward.inner.load_state_dict(theirs.mlp.dense1.state_dict())
        layer.feedforward.outer.load_state_dict(theirs.mlp.dense2.state_dict())
        for mine, other in zip(layer.norms, (inside.layernorm1, theirs.layernorm), strict=True):
            mine.load_state_dict(other.state_dict())

    for reader, theirs in ((model.readers[0], encoder.cross_attention), (asking, decoder)):
        copy(reader.block, theirs, reader.block.cross)
        reader.norm.load_state_dict(theirs.attention.self.layernorm2.state_dict())
    for layer, theirs in zip(model.blocks, encoder.self_attends, strict=True):
        copy(layer, theirs, layer.attention)
    x = torch.randn(3, 9, WIDTH, dtype=torch.float64)
    count = torch.tensor([9, 4, 1]) if padded else None
    mask = None
    if padded:
        mask = torch.where(torch.arange(9) < count[:, None], 0.0, -torch.inf).double()[:, None, None]
    ours = model.think(Memory(x, count)).y
    theirs = encoder(model.latents.expand(3, -1, -1), inputs=x, inputs_mask=mask).last_hidden_state
    assert_close(ours, theirs)
    queries = torch.randn(3, 6, WIDTH, dtype=torch.float64)
    asked = asking(queries, Rows.full(queries), Memory(ours, None)).y
    assert_close(asked, decoder(queries, inputs=theirs)[0])


# Perceiver AR


def plain_ar(model: PerceiverAR, row: torch.Tensor, prefix: int) -> torch.Tensor:
    """Logits [T - prefix, V] of one row in loops: each latent by itself, token by token."""
    first, *others = model.stack.blocks
    x = embedded(model.stack.embedding, model.stack.position, row)
    M = model.config.latents

    def layer(part, queries, keys, sees):
        """Each query over the keys it sees, by the reference of the layer's attention: its last row."""
        outs = []
        for i, vector in enumerate(queries):
            seen = torch.stack([norm(key, part.norms[0]) for key in keys[sees(i)]])
            vector = vector + part.attention.reference(seen)[-1]
            hidden = gelu(linear(norm(vector, part.norms[1]), part.feedforward.inner))
            outs.append(vector + linear(hidden, part.feedforward.outer))
        return torch.stack(outs)

    z = layer(first, x[prefix:], x, lambda i: slice(0, prefix + i + 1))
    for part in others:
        z = layer(part, z, z, lambda i: slice(max(0, i + 1 - M), i + 1))
    return torch.stack([norm(vector, model.stack.norm) for vector in z]) @ model.output.weight.T


@pytest.mark.parametrize("T", [1, 3, 4, 9])
@pytest.mark.parametrize("prefix", [None, 0, 2])
def test_ar_reference(T, prefix):
    model, tokens = ar(), ids(B=2, T=T)
    logits = model(tokens, prefix=prefix).logits
    first = max(0, T - 4) if prefix is None else min(prefix, T)
    assert not logits[:, :first].any()
    for row, found in zip(tokens, logits, strict=True):
        if first < T:
            assert_close(found[first:], plain_ar(model, row, first))


def check_ar(model: PerceiverAR) -> None:
    """Decoding in any pieces equals the whole, and each row equals itself alone, whatever its padding and prefix."""
    tokens = ids()
    count = KEEP.sum(1)
    for prefix in (None, 0, 3, torch.tensor([2, 7, 0, 5])):
        each = (count - 4).clamp(min=0) if prefix is None else torch.as_tensor(prefix).expand(4).contiguous()
        whole = model(tokens, keep=KEEP, prefix=prefix).logits
        for cuts in ([], [3, 4], list(range(1, 11))):
            state, pieces = model.start(4, prefix=each), []
            for a, b in zip([0, *cuts], [*cuts, 11], strict=True):
                logits, state = model.extend(tokens[:, a:b], state, keep=KEEP[:, a:b])
                pieces.append(logits)
            assert_close(torch.cat(pieces, 1), whole)
        for row in range(4):
            alone = model(tokens[row : row + 1, KEEP[row]], prefix=int(each[row])).logits
            assert_close(whole[row : row + 1, KEEP[row]], alone)
    # without padding, where the host knows all lengths
    for prefix in (0, 5, 7, 20):
        whole = model(tokens, prefix=prefix).logits
        for cuts in ([2, 6], list(range(1, 11))):
            state, pieces = model.start(4, prefix=prefix, capacity=11), []
            for a, b in zip([0, *cuts], [*cuts, 11], strict=True):
                logits, state = model.extend(tokens[:, a:b], state)
                pieces.append(logits)
            assert_close(torch.cat(pieces, 1), whole)


@pytest.mark.parametrize("grad", [False, True])
def test_ar_decodes(grad):
    with torch.set_grad_enabled(grad):
        check_ar(ar())


@pytest.mark.parametrize(
    "spec",
    one_of_each([s for s in taking("causal") if regard.facts(s).prefix_invariant and regard.facts(s).split_invariant]),
)
def test_ar_any_attention(spec):
    """Of the tokens, and of the latents: what is the same however many tokens follow and wherever they are cut."""
    with torch.no_grad():
        check_ar(ar(cross_attention=spec, attention=["softmax", spec]))


@pytest.mark.parametrize("position", regard.names("position"))
def test_ar_positions(position):
    with torch.no_grad():
        check_ar(ar(position=position, attention="softmax"))


def test_ar_without_prefix_is_the_transformer():
    model = ar(attention=["softmax", "local(window=2)"])
    config = ModelConfig(
        **(
            SIZES
            | {"layers": 3, "kind": "decoder", "norm": "pre", "feedforward": "dense(activation='gelu')", "bias": True}
        ),
        attention=["softmax", "softmax", "local(window=2)"],
    )
    other = Transformer(config).double().eval()
    other.decoder.load_state_dict(model.stack.state_dict())
    assert_close(model(ids(), prefix=0, keep=KEEP).logits, other(ids(), keep=KEEP).logits)


def test_ar_beyond_its_latents():
    """What a latent knows depends on the prefix: behind another one the same token is predicted from other latents."""
    model = ar()
    tokens = ids(T=9)
    late, early = model(tokens, prefix=5).logits, model(tokens, prefix=3).logits
    assert not torch.isclose(late[:, 5:], early[:, 5:]).all(-1).any()


def test_ar_is_causal():
    model, tokens = ar(), ids()
    other = tokens.clone()
    other[:, 9:] = (other[:, 9:] + 1) % VOCABULARY
    before, after = model(tokens, prefix=5).logits, model(other, prefix=5).logits
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.isclose(before[:, 9:], after[:, 9:]).all()


def test_ar_generates():
    """A prompt of any length is read as `forward` reads it, and goes on with a state of its own."""
    model = ar()
    prompt, keep = ids(), KEEP
    config = DecodingConfig(maximum=6, beam=1)
    for row, [best] in enumerate(generate(model, prompt, keep, config, eos=3, forbidden=(0,))):
        tokens = prompt[row : row + 1, keep[row]]
        prefix = max(0, tokens.shape[1] - 4)
        for token in best.ids:
            logits = model(tokens, prefix=prefix).logits[0, -1].clone()
            logits[0] = -torch.inf
            assert logits.argmax() == token
            tokens = torch.cat([tokens, torch.tensor([[token]])], 1)


def test_ar_state_selects():
    model, tokens = ar(), ids()
    state = model.start(4, prefix=torch.tensor([2, 7, 0, 5]))
    _, state = model.extend(tokens[:, :6], state)
    order = torch.tensor([2, 2, 0, 1, 3])
    logits, _ = model.extend(tokens[order][:, 6:], state.reorder(order))
    whole = model(tokens[order], prefix=torch.tensor([0, 0, 2, 7, 5])).logits
    assert_close(logits, whole[:, 6:])


def test_ar_gradients():
    model = ar(tied=False)
    check_gradients(model)
    through = {name: part.grad.clone() for name, part in model.named_parameters()}
    model.zero_grad()
    tokens, state, total = ids(), model.start(4, prefix=(KEEP.sum(1) - 4).clamp(min=0)), 0
    for a, b in ((0, 5), (5, 6), (6, 11)):
        logits, state = model.extend(tokens[:, a:b], state, keep=KEEP[:, a:b])
        total = total + logits.square().sum()
    total.backward()
    for name, part in model.named_parameters():
        assert_close(part.grad, through[name])


def test_ar_reads_a_prefix_without_answering_it():
    """Time N M: four times the context takes about four times the operations, and less than a decoder takes."""
    from torch.utils.flop_counter import FlopCounterMode

    def count(model, T):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.hidden(ids(B=1, T=T))
        return counter.get_total_flops()

    model = ar(latents=8)
    assert count(model, 1024) < 4.4 * count(model, 256)


@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if regard.facts(spec).auxiliary_loss and "self" in regard.facts(spec).roles]
)
def test_second_losses_are_handed_on(spec):
    """Of every layer: one before the length changes, one behind."""
    both, one = (build(attention=specs).train()(ids()).auxiliary_loss for specs in (spec, [spec, "softmax"]))
    assert both > one > 0
    assert build()(ids()).auxiliary_loss is None


def test_refusals():
    with pytest.raises(ValueError, match="cannot take position 'rotary': latents have no place"):
        PerceiverConfig(position="rotary")
    with pytest.raises(ValueError, match="reads must be 'once' or 'each', got 'twice'"):
        PerceiverConfig(reads="twice")
    with pytest.raises(ValueError, match="latents must be at least 1, got 0"):
        PerceiverConfig(latents=0)
    with pytest.raises(ValueError, match="kind must be 'perceiver', got 'decoder'"):
        PerceiverConfig(kind="decoder")
    with pytest.raises(ValueError, match="'local' cannot take role 'cross'"):
        build(cross_attention="local(window=2)")
    with pytest.raises(ValueError, match="latents must be at least 2, got 1"):
        PerceiverARConfig(latents=1)
    with pytest.raises(ValueError, match="cannot take role 'causal'"):
        ar(cross_attention="linformer")
    model = ar()
    with pytest.raises(ValueError, match="prefix must not be negative, got -1"):
        model(ids(), prefix=-1)
    with pytest.raises(ValueError, match="prefix must be a whole number, or 4 of them as a tensor"):
        model(ids(), prefix=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="tokens have 2 rows and the state 4"):
        model.extend(ids(B=2), model.start(4))
