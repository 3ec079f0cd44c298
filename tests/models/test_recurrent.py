"""The recurrent models: decoding equals training, padding changes nothing, and the formulas are those of the papers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.core.rows import Memory
from regard.core.state import select
from regard.models.recurrent import Recurrent, RecurrentConfig
from regard.models.registry import presets
from regard.spec import ATTENTION

SMALL = {"vocabulary": 50, "width": 12, "hidden": 16, "layers": 2, "heads": 4, "dropout": 0.0}
SPECS = [ATTENTION.find(name).examples for name in ATTENTION.names()]
CROSS = [spec for examples in SPECS for spec in examples if "cross" in regard.facts(spec).roles]
KINDS = [
    {"attention": "dot", "input_feeding": True},
    {"attention": "dot", "input_feeding": False},
    {"attention": None},
]


def build(**options) -> Recurrent:
    """In float64, with no parameter at zero, where it would hide what it does."""
    torch.manual_seed(0)
    model = Recurrent(RecurrentConfig(**(SMALL | options))).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.std() == 0:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def ids(B: int = 3, T: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(50, (B, T), generator=torch.Generator().manual_seed(seed))


KEEP = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 1], [1] * 9, [1, 0, 0, 0, 0, 1, 0, 0, 0]]).bool()
TARGET_KEEP = torch.tensor([[1] * 7, [1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 1, 1, 1]]).bool()


def in_pieces(model: Recurrent, target: Tensor, cuts: list[int], memory, keep: Tensor | None = None) -> Tensor:
    state, pieces = model.start(len(target), memory=memory), []
    for first, last in zip([0, *cuts], [*cuts, target.shape[1]], strict=True):
        part = None if keep is None else keep[:, first:last]
        logits, state = model.extend(target[:, first:last], state, keep=part)
        pieces.append(logits)
    return torch.cat(pieces, 1)


def check(model: Recurrent) -> None:
    """Decoding in pieces equals the whole, and each row equals itself alone."""
    source, target = ids(), ids(T=7, seed=2)
    whole = model(source, target, keep=KEEP, target_keep=TARGET_KEEP).logits
    assert not whole[~TARGET_KEEP].any()
    memory = model.encode(source, keep=KEEP)
    for cuts in ([3, 4], [1, 2, 3, 4, 5, 6], []):
        assert_close(in_pieces(model, target, cuts, memory, TARGET_KEEP), whole)
    full = model(source, target, keep=KEEP).logits
    for cuts in ([1, 2, 3, 4, 5, 6], [4, 5]):
        assert_close(in_pieces(model, target, cuts, memory), full)
    for row in range(3):
        alone = model(source[row : row + 1, KEEP[row]], target[row : row + 1, TARGET_KEEP[row]]).logits
        assert_close(whole[row : row + 1, TARGET_KEEP[row]], alone)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("layers", [1, 3])
def test_decoding_equals_training(cell, kind, layers):
    check(build(cell=cell, layers=layers, **kind))


@pytest.mark.parametrize("spec", CROSS)
def test_every_attention(spec):
    """Any mechanism that reads a memory decodes as it trains, and one step of training moves every parameter."""
    model = build(attention=spec, layers=1)
    check(model)
    logits = model.train()(ids(), ids(T=7, seed=2), keep=KEEP, target_keep=TARGET_KEEP).logits
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    F.cross_entropy(logits[TARGET_KEEP], ids(T=7, seed=3)[TARGET_KEEP]).backward()
    torch.optim.SGD(model.parameters(), 1.0).step()
    assert not [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_no_parameter_is_idle(cell, kind):
    model = build(cell=cell, target_vocabulary=50, tied=False, **kind)
    model(ids(), ids(T=7, seed=2), keep=KEEP).logits.square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_a_mechanism_that_cannot_cross_refuses():
    with pytest.raises(ValueError, match="'local' cannot take role 'cross'"):
        build(attention="local")


def place(tokens: Tensor, at: list[int], length: int) -> tuple[Tensor, Tensor]:
    """One row of tokens at these places, noise elsewhere."""
    row, keep = ids(1, length, seed=5), torch.zeros(1, length, dtype=torch.bool)
    row[0, at], keep[0, at] = tokens, True
    return row, keep


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("at", [[0, 1, 2, 3], [4, 5, 6, 7], [0, 3, 4, 7]], ids=["right", "left", "interior"])
def test_the_kind_of_padding_changes_nothing(kind, at):
    model = build(**kind)
    source, target = ids(1, 4), ids(1, 4, seed=2)
    padded, keep = place(source, at, 8)
    padded_target, target_keep = place(target, [7 - place for place in reversed(at)], 8)
    logits = model(padded, padded_target, keep=keep, target_keep=target_keep).logits
    assert_close(logits[target_keep][None], model(source, target).logits)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_padded_token_leaves_the_state_alone(cell, kind):
    model = build(cell=cell, **kind)
    _, state = model.extend(ids(T=2), model.start(3, memory=model.encode(ids())))
    keep = torch.tensor([[False, False], [True, False], [False, True]])
    logits, after = model.extend(torch.tensor([[7, 8], [9, 7], [8, 9]]), state, keep=keep)
    assert not logits[~keep].any()
    assert logits[keep].any(1).all()
    _, one = model.extend(torch.tensor([[9], [9], [9]]), state)
    for new, old, moved in zip(leaves(after), leaves(state), leaves(one), strict=True):
        assert torch.equal(new[0], old[0])
        assert_close(new[1:], moved[1:])
        assert not torch.equal(new[1:], old[1:])


def leaves(state) -> list[Tensor]:
    """The decoder's own part."""
    return [*state.hidden, *([] if state.fed is None else [state.fed])]


def test_a_source_without_tokens():
    """Zero states and an empty memory, whatever stands in the padding; the other rows do not notice."""
    model = build()
    keep = KEEP.clone()
    keep[1] = False
    target = ids(T=4, seed=2)
    logits = model(ids(), target, keep=keep).logits
    assert torch.equal(logits[1], model(ids(seed=8), target, keep=keep).logits[1])
    assert not model.encode(ids(), keep=keep).x[1].any()
    assert_close(logits[2:], model(ids()[2:], target[2:], keep=keep[2:]).logits)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_beams_share_a_memory(cell, kind):
    model = build(cell=cell, **kind)
    source, target = ids(B=3), ids(B=6, T=4, seed=3)
    memory = model.encode(source, keep=KEEP)
    _, state = model.extend(target[:, :2], model.start(6, memory=memory, capacity=4))
    order = torch.tensor([1, 0, 2, 2, 5, 4])
    logits, _ = model.extend(target[:, 2:], state.reorder(order))
    rows = torch.cat([target[order, :2], target[:, 2:]], 1)
    expected = model(source.repeat_interleave(2, 0), rows, keep=KEEP.repeat_interleave(2, 0)).logits[:, 2:]
    assert_close(logits, expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_selected_rows_take_their_memory_along(kind):
    model = build(**kind)
    source, target = ids(), ids(T=4, seed=3)
    _, state = model.extend(target[:, :2], model.start(3, memory=model.encode(source, keep=KEEP)))
    order = torch.tensor([2, 0, 0, 1])
    copied = [part.clone() for part in leaves(state)]
    logits, _ = model.extend(target[order, 2:], select(state, order))
    assert_close(logits, model(source[order], target[order], keep=KEEP[order]).logits[:, 2:])
    assert all(torch.equal(part, copy) for part, copy in zip(leaves(state), copied, strict=True))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_whole_at_once_equals_steps(cell, layers):
    """A model that feeds, with nothing fed on, is the one that runs over the whole target at once."""
    steps, whole = (
        build(cell=cell, layers=layers, attention="additive", input_feeding=feeds) for feeds in (True, False)
    )
    weights = steps.state_dict()
    weights["decoder.weight_ih_l0"] = weights["decoder.weight_ih_l0"][:, : SMALL["width"]].clone()
    whole.load_state_dict(weights)
    target = ids(T=7, seed=2)
    with torch.no_grad():
        before = steps(ids(), target, keep=KEEP).logits
        steps.decoder.weight_ih_l0[:, SMALL["width"] :] = 0
    logits = steps(ids(), target, keep=KEEP).logits
    assert_close(logits, whole(ids(), target, keep=KEEP).logits)
    assert (logits - before)[:, 0].abs().max() < 1e-12 < (logits - before)[:, 1:].abs().min(-1)[0].min()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradients_through_steps_equal_those_through_the_whole(kind):
    model = build(**kind)
    target, gradients = ids(T=5, seed=2), []
    for logits in (model(ids(), target).logits, in_pieces(model, target, [1, 2, 4], model.encode(ids()))):
        model.zero_grad()
        logits.sin().sum().backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert_close(*gradients)


# the formulas, one sentence, one token, one unit of attention at a time


def cell_step(weights: dict[str, Tensor], name: str, cell: str, x: Tensor, old: tuple[Tensor, ...]):
    """Hochreiter & Schmidhuber 1997 with forget gates; Cho et al. 2014 with the reset behind the product."""
    W, U = weights[f"weight_ih_{name}"], weights[f"weight_hh_{name}"]
    b, d = weights[f"bias_ih_{name}"], weights[f"bias_hh_{name}"]
    h = old[0]
    size = len(h)
    from_x, from_h = (
        [M[k * size : k * size + size] @ v + a[k * size : k * size + size] for k in range(len(M) // size)]
        for M, v, a in ((W, x, b), (U, h, d))
    )

    def sigma(z: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(-z))

    if cell == "lstm":
        i, f, g, o = (p + q for p, q in zip(from_x, from_h, strict=True))
        c = sigma(f) * old[1] + sigma(i) * torch.tanh(g)
        return sigma(o) * torch.tanh(c), c
    r, z = (sigma(from_x[k] + from_h[k]) for k in (0, 1))
    n = torch.tanh(from_x[2] + r * from_h[2])
    return ((1 - z) * n + z * h,)


def formula(model: Recurrent, source: list[int], target: list[int]) -> tuple[Tensor, Tensor | None]:
    """Logits [T, V] and attention [T, S] of one sentence."""
    config, weights = model.config, model.state_dict()
    parts = {
        side: {k.split(".")[1]: w for k, w in weights.items() if k.startswith(side)} for side in ("encoder", "decoder")
    }
    states = 2 if config.cell == "lstm" else 1

    def embed(side: str, token: int) -> Tensor:
        return weights[f"{side}_embedding.weight"][token] * math.sqrt(config.width)

    xs, first = [embed("source", token) for token in source], []
    for layer in range(config.layers):
        runs, ends = [], []
        for suffix, order in (("", range(len(xs))), ("_reverse", reversed(range(len(xs))))):
            old, run = (torch.zeros(config.hidden // 2, dtype=torch.float64),) * states, {}
            for at in order:
                old = cell_step(parts["encoder"], f"l{layer}{suffix}", config.cell, xs[at], old)
                run[at] = old[0]
            runs.append(run)
            ends.append(old)
        xs = [torch.cat([runs[0][at], runs[1][at]]) for at in range(len(xs))]
        first.append(tuple(torch.cat([ends[0][k], ends[1][k]]) for k in range(states)))

    fed, logits, seen = torch.zeros(config.width, dtype=torch.float64), [], []
    for token in target:
        x = embed("target", token)
        if config.input_feeding and config.attention:
            x = torch.cat([x, fed])
        for layer in range(config.layers):
            first[layer] = cell_step(parts["decoder"], f"l{layer}", config.cell, x, first[layer])
            x = first[layer][0]
        if config.attention:
            q, keys, values = (weights[f"cross.project.{name}.weight"] for name in "qkv")
            if config.attention == "dot":
                scores = [(q @ x) @ (keys @ m) for m in xs]
            else:
                reading, offset = weights["cross.reading"][0], weights["cross.offset"][0]
                scores = [reading @ torch.tanh(q @ x + keys @ m + offset) for m in xs]
            total = sum(torch.exp(score) for score in scores)
            shares = [torch.exp(score) / total for score in scores]
            context = weights["cross.output.weight"] @ sum(a * (values @ m) for a, m in zip(shares, xs, strict=True))
            seen.append(torch.stack(shares))
            x = torch.cat([context, x])
        fed = torch.tanh(weights["mix.weight"] @ x + weights["mix.bias"])
        logits.append(weights["output.weight"] @ fed)
    return torch.stack(logits), torch.stack(seen) if seen else None


@pytest.mark.parametrize("attention", ["dot", "additive", None])
@pytest.mark.parametrize("input_feeding", [True, False])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_formula(cell, input_feeding, attention):
    options = {"target_vocabulary": 40, "tied": False} if input_feeding else {}
    model = build(cell=cell, attention=attention, input_feeding=input_feeding, heads=1, **options)
    source, target = ids(), ids(T=7, seed=2) % 40
    logits = model(source, target, keep=KEEP, target_keep=TARGET_KEEP).logits
    maps = None if attention is None else model.maps(source, target, keep=KEEP, target_keep=TARGET_KEEP)
    for row in range(3):
        read, write = KEEP[row], TARGET_KEEP[row]
        expected, shares = formula(model, source[row, read].tolist(), target[row, write].tolist())
        assert_close(logits[row, write], expected)
        if maps is not None:
            assert_close(maps[0][row, 0][write][:, read], shares)


def test_maps_stand_where_the_tokens_stand():
    model = build(attention="additive")
    (maps,) = model.maps(ids(), ids(T=7, seed=2), keep=KEEP, target_keep=TARGET_KEEP)
    assert maps.shape == (3, 4, 7, 9)
    assert not maps.transpose(1, 3)[~KEEP].any()
    assert not maps.transpose(1, 2)[~TARGET_KEEP].any()
    assert_close(maps.sum(-1), TARGET_KEEP[:, None].expand(-1, 4, -1).double())


def test_the_bottleneck_reads_the_last_state_alone():
    model = build(attention=None)
    memory = model.encode(ids(), keep=KEEP)
    target = ids(T=4, seed=2)
    logits, _ = model.extend(target, model.start(3, memory=memory))
    blind, _ = model.extend(target, model.start(3, memory=memory._replace(x=torch.zeros_like(memory.x))))
    assert torch.equal(logits, blind)
    other = memory._replace(last=tuple(part.flip(0) for part in memory.last))
    assert not torch.allclose(logits, model.extend(target, model.start(3, memory=other))[0])
    with pytest.raises(ValueError, match="without attention has no maps"):
        model.maps(ids(), target)


def test_presets_are_small():
    """At most 3 million parameters with 10,000 shared tokens, counted from the sizes."""
    for cell, gates in {"lstm": 4, "gru": 3}.items():
        for attention, matrices in {"multiplicative": 5, "dot": 4, "additive": 4, None: 0}.items():
            config = RecurrentConfig(
                vocabulary=10_000, **presets("translation")[cell].values | {"attention": attention}
            )
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in Recurrent(config).parameters())
            E, H = config.width, config.hidden
            encoder = 2 * gates * (H // 2) * (E + H // 2 + 2)
            decoder = gates * H * (E + (E if attention else 0) + H + 2)
            scores = matrices * H * H + (2 * H if attention == "additive" else 0)
            mix = E * ((2 if attention else 1) * H + 1)
            assert count == 10_000 * E + encoder + decoder + scores + mix
            assert count <= 3_000_000
            assert config.cell == cell


def test_what_is_tied():
    def parameters(**options) -> int:
        return sum(parameter.numel() for parameter in build(**options).parameters())

    table = 50 * SMALL["width"]
    assert parameters(tied=False) - parameters() == table
    assert parameters(target_vocabulary=50) - parameters() == table
    assert parameters(target_vocabulary=50, tied=False) - parameters() == 2 * table
    assert build(target_vocabulary=31)(ids(), ids(T=4) % 31).logits.shape == (3, 4, 31)


def reversal(batch: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Source, its reversal as the decoder reads and as it should predict it, keep, and where each token came from."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 8, (batch, 1), generator=draw)
    keep = torch.arange(7) < lengths
    source = torch.where(keep, torch.randint(4, 20, (batch, 7), generator=draw), 0)
    origin = (lengths - 1 - torch.arange(7)).clamp(min=0)
    target = torch.where(keep, source.gather(1, origin), 0)
    return source, torch.cat([torch.full((batch, 1), 2), target[:, :-1]], 1), target, keep, origin


@pytest.mark.parametrize(("cell", "attention"), [("lstm", "dot"), ("gru", "additive")])
def test_learns_to_reverse_and_shows_it(cell, attention):
    torch.manual_seed(0)
    sizes = {"vocabulary": 20, "width": 32, "hidden": 48, "layers": 1, "dropout": 0.0}
    model = Recurrent(RecurrentConfig(cell=cell, attention=attention, input_feeding=cell == "lstm", **sizes))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=250)
    for step in range(250):
        source, reads, target, keep, _ = reversal(64, step)
        logits = model(source, reads, keep=keep, target_keep=keep).logits
        optimizer.zero_grad()
        F.cross_entropy(logits[keep], target[keep]).backward()
        optimizer.step()
        schedule.step()
    source, reads, target, keep, origin = reversal(100, 1000)
    with torch.no_grad():
        predicted = model.eval()(source, reads, keep=keep, target_keep=keep).logits.argmax(-1)
        (maps,) = model.maps(source, reads, keep=keep, target_keep=keep)
    assert (predicted == target)[keep].double().mean().item() > 0.95
    assert (maps[:, 0].argmax(-1) == origin)[keep].double().mean().item() > 0.93


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_dropout_is_for_training(kind):
    model = build(dropout=0.5, **kind)
    inputs = ids(), ids(T=7, seed=2)
    calm = build(**kind)(*inputs).logits
    assert_close(model(*inputs).logits, calm)
    model.train()
    torch.manual_seed(1)
    first = model(*inputs).logits
    assert not torch.allclose(first, model(*inputs).logits)
    torch.manual_seed(1)
    assert torch.equal(first, model(*inputs).logits)


def test_dropout_of_embeddings_memory_and_vectors():
    model, shares = build(dropout=0.5, layers=1, input_feeding=False).train(), {}

    def note(name: str, x: Tensor) -> None:
        shares[name] = (x == 0).double().mean().item()

    for name in ("encoder", "decoder", "output"):
        getattr(model, name).register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs[0]))
    model(ids(), ids(T=7, seed=2))
    note("memory", model.encode(ids()).x)
    assert {name for name, share in shares.items() if 0.3 < share < 0.7} == {"encoder", "decoder", "output", "memory"}


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
def test_dropout_between_the_layers_of_the_decoder(kind):
    """With all else kept, states differ from draw to draw only behind the first layer."""
    model = build(dropout=0.5, **kind).train()
    memory = model.eval().encode(ids())
    model.train()
    model._embed = lambda embedding, tokens: embedding(tokens)
    ends = [model.extend(ids(T=1, seed=2), model.start(3, memory=memory))[1].hidden[0] for _ in range(2)]
    assert torch.equal(ends[0][:, 0], ends[1][:, 0])
    assert not torch.allclose(ends[0][:, 1], ends[1][:, 1])


def test_round_trip(tmp_path):
    model = build(cell="gru", attention="performer(features=8)")
    torch.save(model.state_dict(), tmp_path / "weights")
    torch.manual_seed(7)
    other = Recurrent(model.config).double().eval()
    inputs = ids(), ids(T=7, seed=2)
    assert not torch.allclose(other(*inputs).logits, model(*inputs).logits)
    other.load_state_dict(torch.load(tmp_path / "weights", weights_only=True))
    assert torch.equal(other(*inputs).logits, model(*inputs).logits)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_autocast(cell, kind):
    model = build(cell=cell, **kind).float()
    source, target = ids(), ids(T=7, seed=2)
    exact = model(source, target, keep=KEEP, target_keep=TARGET_KEEP).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(source, target, keep=KEEP, target_keep=TARGET_KEEP).logits
        pieces = in_pieces(model, target, [3, 4], model.encode(source, keep=KEEP), TARGET_KEEP)
    rough.float().sum().backward()
    scale = exact.abs().max().item()
    assert_close(rough.float(), exact, atol=0.05 * scale, rtol=0)
    assert_close(pieces.float(), exact, atol=0.05 * scale, rtol=0)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_bad_input():
    for options, words in {
        ("cell", "rnn"): "cell must be 'lstm' or 'gru', got 'rnn'",
        ("kind", "encoder"): "kind must be 'recurrent', got 'encoder'",
        ("hidden", 15): "hidden must be even",
        ("heads", 3): "not divisible by heads 3",
        ("layers", 0): "layers must be at least 1, got 0",
        ("dropout", 1.0): "dropout must be at least 0 and below 1",
        ("target_vocabulary", 0): "target_vocabulary must be at least 1",
    }.items():
        with pytest.raises(ValueError, match=words):
            RecurrentConfig(**(SMALL | dict([options])))
    with pytest.raises(ValueError, match=r"unknown attention 'addative'.*did you mean 'additive'"):
        build(attention="addative")
    model = build()
    memory = model.encode(ids())
    with pytest.raises(ValueError, match="whole numbers"):
        model(ids(), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="keep must be boolean"):
        model(ids(), ids(), keep=torch.ones(3, 9))
    with pytest.raises(ValueError, match=r"needs memory=model.encode\(source\), got NoneType"):
        model.start(3)
    with pytest.raises(ValueError, match=r"needs memory=model.encode"):
        model.start(3, memory=Memory(memory.x, None))
    with pytest.raises(ValueError, match="memory of 3 rows serves a multiple of them, not a batch of 4"):
        model.start(4, memory=memory)
    with pytest.raises(ValueError, match="tokens have 2 rows and the state 3"):
        model.extend(ids(B=2), model.start(3, memory=memory))
    with pytest.raises(ValueError, match="target has 6 rows and source 3"):
        model(ids(), ids(B=6))
