"""The Transformer around every mechanism: decoding equals training, padding changes nothing, no parameter is idle."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

import regard
from regard.core.rows import Memory, Rows
from regard.models.config import ModelConfig
from regard.models.registry import PAPER
from regard.models.transformer import Transformer
from regard.spec import ATTENTION

SMALL = {"vocabulary": 50, "width": 16, "heads": 4, "inner": 32, "layers": 2, "dropout": 0.0}
SPECS = [(name, ATTENTION.find(name).examples[0]) for name in ATTENTION.names()]


def taking(role: str) -> list[str]:
    return [spec for _, spec in SPECS if role in regard.facts(spec).roles]


def build(**options) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(**(SMALL | options))).double().eval()


def ids(B: int = 3, T: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(50, (B, T), generator=torch.Generator().manual_seed(seed))


KEEP = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 1], [1] * 9, [1, 0, 0, 0, 0, 1, 0, 0, 0]]).bool()
TARGET_KEEP = torch.tensor([[1] * 7, [1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 1, 1, 1]]).bool()


def check(model: Transformer, split: bool = True) -> None:
    """Decoding in pieces equals the whole (where it does not depend on the cut), and each row equals itself alone."""
    source, target = ids(), ids(T=7, seed=2)
    whole = model(source, target, keep=KEEP, target_keep=TARGET_KEEP).logits
    state = model.start(3, memory=model.encode(source, keep=KEEP))
    pieces = []
    for first, last in ((0, 3), (3, 4), (4, 7)):
        logits, state = model.extend(target[:, first:last], state, keep=TARGET_KEEP[:, first:last])
        pieces.append(logits)
    if split:
        assert_close(torch.cat(pieces, 1), whole)
    for row in range(3):
        alone = model(source[row : row + 1, KEEP[row]], target[row : row + 1, TARGET_KEEP[row]]).logits
        assert_close(whole[row : row + 1, TARGET_KEEP[row]], alone)


@pytest.mark.parametrize("spec", taking("self"))
def test_encoder(spec):
    check(build(attention=spec, decoder_attention="softmax"))


@pytest.mark.parametrize("spec", taking("causal"))
def test_decoder(spec):
    check(build(decoder_attention=[spec, "softmax"], norm="pre"), regard.facts(spec).split_invariant)


@pytest.mark.parametrize("spec", taking("cross"))
def test_cross(spec):
    check(build(cross_attention=spec))


@pytest.mark.parametrize("position", regard.names("position"))
def test_positions(position):
    check(build(position=position))


@pytest.mark.parametrize("spec", taking("causal"))
def test_language_model(spec):
    model = build(kind="decoder", attention=spec)
    tokens = ids()
    whole = model(tokens).logits
    state = model.start(3)
    steps = []
    for t in range(9):
        logits, state = model.extend(tokens[:, t : t + 1], state)
        steps.append(logits)
    steps = torch.cat(steps, 1)
    if regard.facts(spec).split_invariant:
        assert_close(steps, whole)
    else:
        assert steps.isfinite().all()
        assert (steps - whole).abs().max() > 1e-9


def test_beams_share_a_memory():
    model = build()
    source, target = ids(B=2), ids(B=6, T=4, seed=3)
    memory = model.encode(source)
    state = model.start(6, memory=memory)
    _, state = model.extend(target[:, :2], state)
    order = torch.tensor([1, 0, 2, 4, 4, 3])
    logits, _ = model.extend(target[:, 2:], state.reorder(order))
    rows = torch.cat([target[order, :2], target[:, 2:]], 1)
    assert_close(logits, model(source.repeat_interleave(3, 0), rows).logits[:, 2:])


@pytest.mark.parametrize("spec", [*taking("self"), ["luna(length=3)", "softmax"], ["softmax", "luna(length=3)"]])
def test_no_parameter_is_idle(spec):
    model = build(attention=spec, decoder_attention="softmax")
    model(ids(), ids(T=7, seed=2)).logits.square().sum().backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


def _weigh_and_run(layer, read, x, rows=None, *, memory=None, **rest):
    read.append(layer.weights(x, memory=None if memory is None else memory.x))
    return type(layer).forward_packed(layer, x, rows, memory=memory, **rest)


@pytest.mark.parametrize("place", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_maps_are_those_of_the_layers(place, norm):
    """Each layer's map, row alone, from the layer's own `weights` on what the layer really reads."""
    model = build(norm=norm, cross_attention="additive")
    source, target = ids(), ids(T=7, seed=2)
    maps = model.maps(source, target, keep=KEEP, target_keep=TARGET_KEEP, place=place)
    stack = model.encoder if place == "encoder" else model.decoder
    layers = [block.cross if place == "cross" else block.attention for block in stack.blocks]
    queries, keys = {"encoder": (KEEP, KEEP), "decoder": (TARGET_KEEP,) * 2, "cross": (TARGET_KEEP, KEEP)}[place]
    for row in range(3):
        read = []
        for layer in layers:
            layer.forward_packed = partial(_weigh_and_run, layer, read)
        model(source[row : row + 1, KEEP[row]], target[row : row + 1, TARGET_KEEP[row]])
        for layer in layers:
            del layer.forward_packed
        for index, part in enumerate(maps):
            assert part.shape == (3, 4, queries.shape[1], keys.shape[1])
            assert_close(part[row][:, queries[row]][..., keys[row]], read[index][0])
            assert part[row][:, ~queries[row]].abs().sum() == 0
            assert part[row][..., ~keys[row]].abs().sum() == 0


def test_maps_of_one_stack():
    decoder = build(kind="decoder")
    maps = decoder.maps(ids(), keep=KEEP)
    assert len(maps) == 2
    assert maps[0].triu(1).abs().sum() == 0
    with pytest.raises(ValueError, match="has maps of decoder"):
        decoder.maps(ids(), place="cross")
    with pytest.raises(ValueError, match="need source and target"):
        build().maps(ids())


def test_presets_have_the_sizes_of_the_paper():
    """With 37,000 shared tokens, as for English to German: the paper rounds to 65 and 213 million."""
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in Transformer(ModelConfig(vocabulary=37000, **sizes)).parameters())
            for name, sizes in PAPER.items()
        }
    # embedding; per encoder layer 4 E^2 + 2 E I + I + E + 4 E; per decoder layer 8 E^2 + 2 E I + I + E + 6 E
    for name, (E, inner, layers) in {"tiny": (128, 256, 4), "base": (512, 2048, 6), "big": (1024, 4096, 6)}.items():
        feed = 2 * E * inner + inner + E
        assert counts[name] == 37000 * E + layers * (12 * E**2 + 2 * feed + 10 * E)
    assert counts["base"] == 63_045_632
    assert counts["big"] == 214_171_648


PUBLISHED = {
    "norm": "pre",
    "norm_kind": "rms",
    "norm_epsilon": 1e-6,
    "head_width": 6,
    "kv_heads": 2,
    "bias": "inputs",
    "scaled_embedding": False,
    "normed_embedding": True,
    "head": "transform",
    "head_bias": True,
    "tied": False,
    "position": "rotary",
}


def test_options_of_published_models():
    """Each option is there in the parameters, and decoding and padding hold with all of them."""
    model = build(**PUBLISHED)
    check(model)
    block = model.decoder.blocks[0]
    for layer in (block.attention, block.cross):
        assert layer.project["q"].weight.shape == (24, 16)
        assert layer.project["k"].bias.shape == (12,)
        assert layer.output.bias is None
    norms = [part for part in model.modules() if isinstance(part, torch.nn.RMSNorm)]
    # an encoder layer has two and a decoder layer three; with embedding, end and head
    assert len(norms) == 2 * 2 + 2 * 3 + 2 * 2 + 1
    assert {norm.eps for norm in norms} == {1e-6}
    assert not [part for part in model.modules() if isinstance(part, torch.nn.LayerNorm)]
    model(ids(), ids(T=7, seed=2)).logits.square().sum().backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


@pytest.mark.parametrize("final", [None, True, False])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_final_norm(norm, final):
    model = build(kind="decoder", norm=norm, final_norm=final)
    assert isinstance(model.decoder.norm, torch.nn.LayerNorm) == (norm == "pre" if final is None else final)


def test_embedding_and_head_by_hand():
    """BERT's order: vectors, segments and positions are added, then normed; dense, GELU and norm before the logits."""
    options = {
        "normed_embedding": True,
        "scaled_embedding": False,
        "head": "transform",
        "head_bias": True,
        "segments": 2,
    }
    model = build(kind="encoder", pooler=True, position="learned(longest=9)", **options)
    for name in ("bias", "norm.bias", "norm.weight", "dense.bias"):
        part = model.output.bias if name == "bias" else model.transform.get_parameter(name)
        torch.nn.init.normal_(part)
    torch.nn.init.normal_(model.encoder.embedding_norm.weight)
    tokens, segments = ids(), ids(seed=5) % 2
    whole = model(tokens, keep=KEEP, segments=segments).logits
    pooled = model.pooled(tokens, keep=KEEP, segments=segments)
    stack, head = model.encoder, model.transform
    for row in range(3):
        own, parts = tokens[row, KEEP[row]], segments[row, KEEP[row]]
        x = stack.embedding.weight[own] + stack.segments.weight[parts] + stack.position.table[: len(own)]
        x = torch.nn.functional.layer_norm(x, [16], stack.embedding_norm.weight, stack.embedding_norm.bias)[None]
        for block in stack.blocks:
            x = block(x, Rows.full(x)).y
        y = torch.nn.functional.gelu(x @ head.dense.weight.T + head.dense.bias)
        y = torch.nn.functional.layer_norm(y, [16], head.norm.weight, head.norm.bias)
        assert_close(whole[row, KEEP[row]], (y @ stack.embedding.weight.T + model.output.bias)[0])
        assert_close(pooled[row], torch.tanh(model.pooler(x[0, 0])))
    maps = model.maps(tokens, keep=KEEP, segments=segments)
    assert (maps[0] - model.maps(tokens, keep=KEEP)[0]).abs().max() > 1e-6
    assert_close(model(tokens).logits, model(tokens, segments=torch.zeros_like(tokens)).logits)


def test_an_encoder_without_a_head():
    model = build(kind="encoder", head="none")
    assert model.encode(ids(), keep=KEEP).x.shape == (3, 9, 16)
    with pytest.raises(ValueError, match="gives no logits"):
        model(ids())


def test_bad_input():
    with pytest.raises(ValueError, match="needs source and target"):
        build()(ids())
    with pytest.raises(ValueError, match="takes one sequence"):
        build(kind="decoder")(ids(), ids())
    with pytest.raises(ValueError, match="whole numbers"):
        build(kind="decoder")(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="keep must be boolean"):
        build(kind="decoder")(ids(), keep=torch.ones(3, 9))
    with pytest.raises(ValueError, match="does not decode"):
        build(kind="encoder").start(2)
    with pytest.raises(ValueError, match="needs memory"):
        build().start(2)
    with pytest.raises(ValueError, match="has no encoder"):
        build(kind="decoder").encode(ids())
    with pytest.raises(ValueError, match="dropout"):
        build(dropout=1.0)
    with pytest.raises(ValueError, match="target_vocabulary"):
        build(kind="decoder", target_vocabulary=9)
    with pytest.raises(ValueError, match="segments is for kind 'encoder'"):
        build(kind="decoder", segments=2)
    with pytest.raises(ValueError, match="knows no segments"):
        build(kind="encoder")(ids(), segments=ids())
    with pytest.raises(ValueError, match="segments must be"):
        build(kind="encoder", segments=2)(ids(), segments=ids(T=8))
    with pytest.raises(ValueError, match="head 'none'"):
        build(kind="decoder", head="none")
    with pytest.raises(ValueError, match="no pooler"):
        build(kind="encoder").pooled(ids())
    with pytest.raises(ValueError, match="norm_epsilon"):
        build(norm_epsilon=0.0)
    with pytest.raises(ValueError, match="bias must be"):
        build(bias="outputs")
    with pytest.raises(ValueError, match="'linformer' cannot take role 'causal'"):
        build(kind="decoder", attention="linformer")


def test_the_aligner_learns_and_leaves_the_translator_alone():
    """Its gradients stop at its own weights; its map is the posterior; without it nothing changes."""
    plain, model = build(norm="pre"), build(norm="pre", aligner=True)
    torch.nn.init.normal_(model.aligner.bias)
    source, target = ids(), ids(T=7, seed=2)
    keeps = {"keep": KEEP, "target_keep": TARGET_KEEP}
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("aligner.") for name in missing)
    assert_close(model(source, target, **keeps).logits, plain(source, target, **keeps).logits, rtol=0, atol=0)
    assert model(source, target, **keeps).auxiliary_loss is None
    loss = model.train()(source, target, **keeps).auxiliary_loss
    loss.backward()
    for name, part in model.named_parameters():
        assert (part.grad is not None and bool(part.grad.any())) == name.startswith("aligner."), name
    # by hand: a row, a target token and a source token at a time
    model.eval()
    aligner, E = model.aligner, model.config.width
    (maps,) = model.maps(source, target, **keeps, place="aligner")
    total, count = 0.0, 0
    for row in range(3):
        own, other = source[row : row + 1, KEEP[row]], target[row : row + 1, TARGET_KEEP[row]]
        outputs = []
        memory = model.encode(own)
        model.decoder(other, Rows.full(other), memory=memory, outputs=outputs)
        queries = aligner.query(aligner.norm(outputs[-2][0]))
        keys = aligner.key(aligner.memory_norm(memory.x[0]))
        found = maps[row, 0][TARGET_KEEP[row]]
        words = KEEP[row].clone()
        words[words.nonzero()[-1]] = False
        assert not found[:, ~words].any()
        for t, query in enumerate(queries):
            terms = torch.softmax(torch.stack([query @ key / E**0.5 for key in keys[:-1]]), 0)
            if t + 1 < other.shape[1]:
                for s, token in enumerate(own[0, :-1]):
                    word = model.encoder.embedding.weight[token] * E**0.5
                    word = aligner.token_norm(word + aligner.outer(torch.relu(aligner.inner(word))))
                    entry = torch.softmax(model.output.weight @ word + aligner.bias, 0)
                    terms = torch.cat([terms[:s], terms[s : s + 1] * entry[other[0, t + 1]], terms[s + 1 :]])
                total, count = total - terms.sum().log(), count + 1
            assert_close(found[t, words], terms / terms.sum())
    assert_close(loss, total / count)


def test_the_aligner_of_a_source_without_words():
    """The end of the source alone: nothing can be linked, and nothing is ruined."""
    model = build(aligner=True).train()
    source, target = torch.tensor([[3], [3]]), ids(2, 5)
    loss = model(source, target).auxiliary_loss
    loss.backward()
    assert loss.isfinite()
    assert all(part.grad.isfinite().all() for part in model.aligner.parameters())
    (maps,) = model.eval().maps(source, target, place="aligner")
    assert not maps.any()


def test_the_aligner_computes_in_full_precision_under_autocast():
    """Its sums of small probabilities are of float32, whatever the translator's products are in."""
    model = build(aligner=True).float()
    source, target, embedding = ids(), ids(T=7, seed=2), model.encoder.embedding.weight
    x, memory = torch.randn(3, 7, 16), Memory(torch.randn(3, 9, 16), None)
    given = x, Rows.full(x), memory, source, target, embedding, model.output.weight
    for part in (model.aligner.forward, model.aligner.map):
        expected = part(*given)
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(part(*given), expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_the_aligner_on_a_gpu():
    """There the dictionary is read token by token, without looking for equal ones."""
    model = build(aligner=True).train()
    source, target = ids(), ids(T=7, seed=2)
    here = model(source, target, keep=KEEP, target_keep=TARGET_KEEP).auxiliary_loss
    there = model.cuda()(source.cuda(), target.cuda(), keep=KEEP.cuda(), target_keep=TARGET_KEEP.cuda()).auxiliary_loss
    assert_close(there.cpu(), here)


@pytest.mark.parametrize("keep", [None, KEEP], ids=["full", "ragged"])
def test_prefill_gives_the_logits_of_the_last_real_token(keep):
    model, tokens = build(kind="decoder"), ids()
    expected, after = model.extend(tokens, model.start(3), keep=keep)
    logits, state = model.prefill(tokens, model.start(3), keep=keep)
    last = [8, 8, 8] if keep is None else [8, 8, 5]
    assert_close(logits, expected[range(3), last])
    assert_close(model.extend(tokens[:, :1], state)[0], model.extend(tokens[:, :1], after)[0])
