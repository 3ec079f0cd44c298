"""GNMT, Deep-Att and the mixture of experts between LSTMs, against loops written from the papers; and as every
translator."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from translators import KEEP, TARGET_KEEP, VOCABULARY, Doubled, check_translator, ids

from regard.kernels.recurrence import Cells
from regard.models import DeepRecurrent, DeepRecurrentConfig, build
from regard.models.registry import presets

SMALL = {"vocabulary": VOCABULARY, "width": 6, "layers": 4, "dropout": 0.0}
EXPERTS = {
    "feedforward": "moe(experts=3, choices=2, noise=False)",
    "inner": 5,
    "layers": 3,
    "decoder_layers": 2,
    "residual_from": 2,
}


FAST = {"connections": "fast-forward", "layers": 3, "decoder_layers": 3}


def built(**options) -> DeepRecurrent:
    torch.manual_seed(0)
    model = build(DeepRecurrentConfig(**SMALL | options)).double()
    for parameter in model.parameters():
        # what starts at zero or small would hide what it does
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def lstm(cells: Cells, xs: list[Tensor]) -> list[Tensor]:
    return recur(cells, [cells.weight_ih @ x + cells.bias_ih for x in xs])


def recur(cells: Cells, given: list[Tensor]) -> list[Tensor]:
    """h at each token, from what the gates are given there."""
    h = c = torch.zeros(cells.hidden, dtype=torch.float64)
    outs = []
    for x in given:
        i, f, g, o = (x + cells.weight_hh @ h + cells.bias_hh).chunk(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outs.append(h)
    return outs


def feed(layer: torch.nn.Module | None, xs: list[Tensor]) -> list[Tensor]:
    return xs if layer is None else list(torch.stack(xs) + layer.reference(torch.stack(xs)).y)


def fast(cells: Cells, below: list[Tensor], drop: float, leftwards: bool = False) -> list[Tensor]:
    """[f; h] of a layer over what stands below it; dropout is of h alone."""
    given = [cells.weight_ih @ x + cells.bias_ih for x in below]
    hs = recur(cells, given[::-1])[::-1] if leftwards else recur(cells, given)
    return [torch.cat([f, drop * h]) for f, h in zip(given, hs, strict=True)]


def fast_reference(model: DeepRecurrent, source: Tensor, target: Tensor, drop: float) -> Tensor:
    """Logits of one sentence of a Deep-Att, layer by layer."""
    tops = []
    for first, stack in zip((False, True), model.columns, strict=True):
        xs, leftwards = [drop * model.source_embedding.weight[w] for w in source], first
        for cells in stack:
            xs, leftwards = fast(cells, xs, drop, leftwards), not leftwards
        tops.append(xs)
    both = [torch.cat(pair) for pair in zip(*tops, strict=True)]
    xs = [model.encoder_out.weight @ x + model.encoder_out.bias for x in both]
    bottom, *uppers = model.decoder
    ys = fast(bottom, [drop * model.target_embedding.weight[w] for w in target], drop)
    contexts = [drop * c for c in contexts_of(model, [y[-6:] / drop for y in ys], xs)]
    for cells in uppers:
        ys = fast(cells, [torch.cat(pair) for pair in zip(ys, contexts, strict=True)], drop)
    ys = [model.decoder_out.weight @ y + model.decoder_out.bias for y in ys]
    return torch.stack([model.output.weight @ y + model.output.bias for y in ys])


def contexts_of(model: DeepRecurrent, hs: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
    """What each of the bottom layer's h reads of the source."""
    inner = model.cross.inner
    v = inner.gain * inner.reading[0] / torch.sqrt((inner.reading[0] ** 2).sum())
    contexts = []
    for h in hs:
        hidden = [torch.tanh(model.query.weight @ h + model.key.weight @ x + inner.offset[0]) for x in xs]
        a = torch.softmax(torch.stack([v @ part for part in hidden]), 0)
        contexts.append(sum(share * x for share, x in zip(a, xs, strict=True)))
    return contexts


def reference(model: DeepRecurrent, source: Tensor, target: Tensor, drop: float) -> Tensor:
    """Logits of one sentence, token by token; where dropout stands, vectors are multiplied by `drop`."""
    xs = [drop * model.source_embedding.weight[w] for w in source]
    back = lstm(model.backward_layer, xs[::-1])[::-1]
    first, second, *others = model.encoder
    xs = lstm(second, [drop * torch.cat(pair) for pair in zip(lstm(first, xs), back, strict=True)])
    xs = feed(model.encoder_feed, xs)
    start = model.config.residual_from
    for number, cells in enumerate(others, 3):
        made = lstm(cells, [drop * x for x in xs])
        xs = [x + y for x, y in zip(xs, made, strict=True)] if number >= start else made
    bottom, *uppers = model.decoder
    hs = lstm(bottom, [drop * model.target_embedding.weight[w] for w in target])
    contexts = contexts_of(model, hs, xs)
    ys = feed(model.decoder_feed, hs)
    for number, cells in enumerate(uppers, 2):
        made = lstm(cells, [drop * torch.cat(pair) for pair in zip(ys, contexts, strict=True)])
        ys = [y + x for x, y in zip(ys, made, strict=True)] if number >= start else made
    return torch.stack([model.output.weight @ y + model.output.bias for y in ys])


@pytest.mark.parametrize(
    "options",
    [{}, EXPERTS | {"tied": False, "target_vocabulary": VOCABULARY}, {"residual_from": 4}, FAST],
    ids=["gnmt", "moe", "late", "deep-att"],
)
def test_scores_and_gradients_are_those_of_the_papers(options):
    model = built(**options).eval()
    model.dropout = Doubled()
    source, target = ids(), ids(T=7, seed=2)
    logits = model(source, target, keep=KEEP, target_keep=TARGET_KEEP).logits
    expected = torch.zeros_like(logits)
    for row in range(3):
        loop = fast_reference if "connections" in options else reference
        expected[row, TARGET_KEEP[row]] = loop(model, source[row, KEEP[row]], target[row, TARGET_KEEP[row]], 2)
    assert_close(logits, expected)
    torch.manual_seed(3)
    towards = torch.randn_like(logits)
    parameters = dict(model.named_parameters())
    ours, theirs = (torch.autograd.grad((made * towards).sum(), parameters.values()) for made in (logits, expected))
    for name, one, other in zip(parameters, ours, theirs, strict=True):
        assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "options",
    [{"heads": 2}, EXPERTS, {"layers": 2, "attention": "softmax"}, FAST],
    ids=["gnmt", "moe", "two", "deep-att"],
)
def test_it_decodes_as_every_translator(options):
    model = built(**options)
    check_translator(model)
    with torch.no_grad():
        prediction = model(ids(), ids(T=7, seed=2), keep=KEEP, target_keep=TARGET_KEEP)
    assert (prediction.auxiliary_loss is not None) == ("feedforward" in options)


def test_padding_does_not_vote_for_experts():
    """The loss that balances experts counts real tokens only."""
    model = built(**EXPERTS).train()
    source, target = ids(), ids(T=7, seed=2)
    found = []
    for fill in (0, 9):
        filled = torch.where(KEEP, source, fill), torch.where(TARGET_KEEP, target, fill)
        found.append(model(*filled, keep=KEEP, target_keep=TARGET_KEEP).auxiliary_loss)
    assert_close(found[0], found[1], rtol=0, atol=0)
    found[0].backward()
    for layer in (model.encoder_feed, model.decoder_feed):
        assert any(part.grad is not None and part.grad.any() for part in layer.parameters())


def test_how_a_new_model_starts():
    torch.manual_seed(0)
    model = build(DeepRecurrentConfig(vocabulary=50, width=64, layers=3))
    drawn = {name: part for name, part in model.named_parameters() if not name.startswith("cross.")}
    assert all(part.abs().max() <= 0.1 for part in drawn.values())
    for name, part in drawn.items():
        deviation = 0.0 if name.endswith("bias_hh") else 0.1 / 3**0.5
        assert part.std().item() == pytest.approx(deviation, rel=0.25), name
    assert model.cross.inner.gain.item() == pytest.approx(1 / 8)
    assert not model.cross.inner.offset.any()
    # what feed-forward layers share, encoder and decoder share
    shared = built(feedforward="productkey(keys=4, choices=2, shared_values=True)", layers=2)
    assert shared.decoder_feed.values is shared.encoder_feed.values
    # fast-forward connections: f keeps its size from layer to layer
    model = build(DeepRecurrentConfig(vocabulary=50, width=64, layers=6, connections="fast-forward", dropout=0.0))
    x, sizes = torch.randn(4, 20, 64), []
    for cells in model.columns[0]:
        f = cells.given(x)
        x = torch.cat([f, cells(x)[0]], -1)
        sizes.append(f.std().item())
    assert 0.3 < sizes[-1] / sizes[0] < 1.5


def test_the_first_added_layer_is_the_third():
    model = built()
    source = ids()
    for cells in (*list(model.encoder)[2:], *list(model.decoder)[2:]):
        for parameter in cells.parameters():
            torch.nn.init.zeros_(parameter)
    shallow = built(layers=2)
    state = {name: part for name, part in model.state_dict().items() if ".2." not in name and ".3." not in name}
    shallow.load_state_dict(state)
    assert_close(model.eval().encode(source).x, shallow.eval().encode(source).x)
    assert_close(model(source, source).logits, shallow(source, source).logits)


@pytest.mark.parametrize(
    ("name", "vocabulary", "parameters"), [("gnmt-4", 32_320, 160_671_297), ("gnmt-8", 32_000, 243_967_233)]
)
def test_published_sizes(name, vocabulary, parameters):
    """Counted on NVIDIA's model, one embedding for both sides."""
    preset = presets("translation")[name]
    with torch.device("meta"):
        model = preset.form.module(preset.form.config(**preset.values | {"vocabulary": vocabulary}))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_sizes_of_deep_att():
    """Nine layers in each of two columns and seven in the decoder; a layer above the first reads [f; h], 5 times as
    wide as h, and in the decoder the context beside it."""
    preset = presets("translation")["deep-att-16"]
    with torch.device("meta"):
        model = preset.form.module(preset.form.config(**preset.values | {"vocabulary": 30_000}))
    h = 512
    first, upper, decoding = (4 * h * (width + h) + 8 * h for width in (h, 5 * h, 6 * h))
    layers = 2 * (first + 8 * upper) + first + 6 * decoding
    others = h * (10 * h + 1) + h * (5 * h + 1) + 2 * h * h + 2 * h + 1  # in and out of attention, and its score
    parameters = layers + others + 30_000 * h + 30_000 * (h + 1)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters == 186_305_841


def test_wrong_configs_and_states_are_refused():
    for options, words in (
        ({"layers": 1}, "layers must be at least 2"),
        ({"heads": 4}, "width 6 is not divisible by heads 4"),
        ({"kind": "recurrent"}, "kind must be 'deep-recurrent'"),
        ({**EXPERTS, **FAST}, "feedforward stands between layers with residual connections"),
    ):
        with pytest.raises(ValueError, match=words):
            DeepRecurrentConfig(**SMALL | options)
    model = built().eval()
    memory = model.encode(ids())
    for call, words in (
        (lambda: model.start(0, memory=memory), "not a batch of 0"),
        (lambda: model.start(2), r"needs memory=model\.encode"),
        (lambda: model.start(4, memory=memory), "a memory of 3 rows serves a multiple"),
        (lambda: model.extend(ids(T=1), memory), "expected the state of this model"),
        (lambda: model.extend(ids(T=1), model.start(6, memory=memory)), "tokens have 3 rows and the state 6"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_every_layer_of_the_mixture_is_added_to_what_it_reads():
    """As its authors have it: recurrences above that answer zeros let the words pass."""
    preset = presets("translation")["moe-lstm"]
    model = preset.form.module(preset.form.config(**preset.values | {"vocabulary": VOCABULARY})).eval()
    for cells in (*model.encoder[2:], *model.decoder[1:]):
        for parameter in cells.parameters():
            torch.nn.init.zeros_(parameter)
    assert model(ids(), ids(T=7, seed=2)).logits.std(1).min() > 0
