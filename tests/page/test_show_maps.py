"""Parts of maps equal the whole; what the page is told equals what the library computes."""

import copy

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.core.rows import Memory, Rows
from regard.decoding import DecodingConfig
from regard.models.perceiver import PerceiverAR, PerceiverARConfig
from regard.page import maps, pictures, subjects, wire
from regard.page.beams import watch
from regard.page.cancel import Cancelled, cancellable
from regard.page.engine import Engine
from regard.page.maps import LayerCall
from regard.page.subjects import of_model, of_translator, open_run
from regard.spec import ATTENTION, POSITIONS
from regard.tasks.opened import Opened
from regard.tasks.translate import Translator

SENTENCE = "My brother lives in Berlin."
SPECS = [spec for name in ATTENTION.names() for spec in ATTENTION.find(name).examples[:2]]


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patience:
        # machines that test may be slow
        patience.setattr(pictures.Deadline.__init__, "__defaults__", (600,))
        yield Engine({"shipped": lambda: open_run(None, "shipped")})


@pytest.fixture(scope="module")
def translator():
    return Translator.load()


def given(spec, role, *, T=36, S=29, heads=8, width=32, kv_heads=None, position=None, dtype=torch.float64):
    torch.manual_seed(0)
    sizes = {"width": width, "heads": heads, "role": role, "kv_heads": kv_heads, "position": position}
    layer = regard.attention(spec, **sizes).to(dtype).eval()
    x = torch.randn(1, T, width, dtype=dtype)
    memory = Memory(torch.randn(1, S, width, dtype=dtype), None) if role == "cross" else None
    return LayerCall(layer=layer, x=x, rows=Rows.full(x), memory=memory)


@pytest.mark.parametrize("spec", SPECS)
def test_rows_and_columns_are_those_of_the_map(spec):
    for role in regard.facts(spec).roles:
        for kv_heads in (None, 4):
            try:
                one = given(spec, role, kv_heads=kv_heads)
            except ValueError:
                continue
            whole = maps.whole_map(one)
            queries = [0, 3, 4, 5, 9, 35]
            torch.testing.assert_close(maps.rows(one, queries), whole[:, queries])
            last = min(23, one.columns)
            torch.testing.assert_close(maps.columns(one, 5, last), whole[..., 5:last])
            assert one.columns == whole.shape[2]


@pytest.mark.parametrize("position", [spec for name in POSITIONS.names() for spec in POSITIONS.find(name).examples[:1]])
@pytest.mark.parametrize("role", ["self", "causal"])
def test_rows_hold_with_positions(position, role):
    for spec in ("softmax", "additive", "entmax", "local(window=4)"):
        try:
            one = given(spec, role, position=position)
        except ValueError:
            continue
        torch.testing.assert_close(maps.rows(one, range(8, 20)), maps.whole_map(one)[:, 8:20])
        torch.testing.assert_close(maps.columns(one, 8, 20), maps.whole_map(one)[..., 8:20])


@pytest.mark.parametrize("spec", ["softmax", "local(window=40)", "linformer(rank=4, longest=2048)", "compressed"])
def test_tiles_put_together_are_the_map(spec):
    one = given(spec, "self", T=701, heads=2)
    whole = maps.whole_map(one)
    for level in (0, 1):
        span = 1 << level
        rows, columns = maps.tile_shape(one, level)
        down, across = -(-701 // (rows * span)), -(-one.columns // (columns * span))
        grid = [[maps.tile(one, level, row, column) for column in range(across)] for row in range(down)]
        top = float(whole.abs().max())
        for kind, pool in (("largest", torch.nn.functional.max_pool2d), ("mean", torch.nn.functional.avg_pool2d)):
            lines = [np.concatenate([decoded(tile, kind) for tile in line], 2) for line in grid]
            joined = torch.from_numpy(np.concatenate(lines, 1))
            sizes = whole if kind == "mean" else whole.abs()
            wanted = pool(sizes, span, ceil_mode=True)
            # half a step of the 8-bit root on either side
            step = 0.5 / (127 if grid[0][0].signed else 255)
            got = (joined.abs() if kind == "largest" else joined) / top
            root = (wanted / top).abs().sqrt()
            assert ((got.abs().sqrt() - root).abs() <= 1.01 * step + 1e-9).all()
    with pytest.raises(ValueError, match="no tile"):
        maps.tile(one, 0, 99, 0)
    # a cell of any size would have to be held before it is pooled
    with pytest.raises(ValueError, match="no level"):
        maps.tile(one, 2, 0, 0)


def decoded(tile, kind):
    codes = getattr(tile, kind).astype(np.float64) / (127 if tile.signed else 255)
    return np.sign(codes) * codes**2 * tile.scale


class Held(TorchDispatchMode):
    """Counts, of the tensors that operations make: the most numbers of one, and the most bytes alive together."""

    def __init__(self):
        super().__init__()
        self.alive, self.largest, self.bytes = {}, 0, 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not any(made.alias_info for made in function._schema.returns):
            for part in out if isinstance(out, list | tuple) else [out]:
                if isinstance(part, torch.Tensor):
                    self.largest = max(self.largest, part.numel())
                    storage = part.untyped_storage()
                    self.alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
            self.alive = {place: one for place, one in self.alive.items() if not one[0].expired()}
            self.bytes = max(self.bytes, sum(size for _, size in self.alive.values()))
        return out


LONG = [
    "softmax", "additive", "entmax", "longformer(window=64, globals=2)", "linear", "set", "luna", "longshort", "fnet",
    "compressive(segment=64, memory=64, compressed=16)", "clusterformer", "poolingformer", "axial(width=64)",
    "mixer(longest=4096)", "gmlp(longest=4096, attention=8)", "scaling", "compressed",
    "heads(local(window=64), softmax)",
]  # fmt: skip


@pytest.mark.parametrize("spec", LONG)
def test_a_long_map_is_never_held(spec, monkeypatch):
    N, heads, level = 4096, 4, 3
    role = regard.facts(spec).roles[0]
    one = given(spec, role, T=N, S=N, heads=heads, width=64, dtype=torch.float32)
    held, pooled = [], maps._pool

    def noted(part, span):
        held.append(part.numel())
        return pooled(part, span)

    monkeypatch.setattr(maps, "_pool", noted)
    with Held() as seen:
        made = maps.tile(one, level, 0, 0)
        row = maps.rows(one, [N - 1])
    rows, columns = maps.tile_shape(one, level)
    assert made.largest.shape == (heads, min(rows, N >> level), min(columns, one.columns >> level))
    assert row.shape == (heads, 1, one.columns)
    # of all heads together it never makes as much as the map of one holds, nor has as much as half of theirs
    assert seen.largest < N * N
    assert 0 < max(held) <= N * N // 4
    assert 0 < seen.bytes < heads * N * N * 4 // 2
    assert one.strips.size <= maps.STRIP_BYTES


@pytest.mark.parametrize("spec", ["softmax", "entmax", "local(window=4)", "fnet", "set(points=5)", "luna(length=3)"])
def test_cancelled_work_ends_anywhere(spec):
    one = given(spec, "self")
    wanted = maps.rows(one, [3, 30])
    asked = iter(range(10_000))
    with cancellable(lambda: next(asked) < 0):
        maps.rows(one, [3, 30])
    operators = next(asked) - 1
    assert operators > 10
    # in the forward pass and in the backward one
    for last in range(1, operators, max(1, operators // 10)):
        left = iter([True] * last)
        with pytest.raises(Cancelled), cancellable(lambda left=left: not next(left, False)):
            maps.rows(one, [3, 30])
    assert torch.equal(maps.rows(one, [3, 30]), wanted)
    # nor does it begin
    with pytest.raises(Cancelled), cancellable(lambda: True):
        pass


def test_recording_ends_at_a_layer(translator):
    model, ids = translator.model, torch.tensor([[5, 6, 7]])
    ran = []
    handles = [block.register_forward_hook(lambda block, *_: ran.append(block)) for block in model.encoder.blocks]
    try:
        found = maps.record_calls(lambda recorder: model.maps(ids, place="encoder", recorder=recorder), most=2)
    finally:
        for handle in handles:
            handle.remove()
    assert [one.layer for one in found] == [block.attention for block in model.encoder.blocks][:2]
    assert ran == [model.encoder.blocks[0]]
    # what was kept is what the maps are made of
    for one, whole in zip(found, model.maps(ids, place="encoder"), strict=False):
        torch.testing.assert_close(maps.whole_map(one), whole[0])


@pytest.mark.parametrize(("place", "passes"), [("encoder", [1, 0]), ("cross", [1, 1]), ("decoder", [1, 1])])
def test_a_text_is_read_in_one_pass(translator, place, passes):
    """Also where it is asked about again."""
    subject = of_translator("fresh", "fresh", translator)
    engine, model, calls = Engine({"fresh": lambda: subject}), translator.model, [0, 0]
    subject.layers(place)

    def counted(index):
        return lambda *_: calls.__setitem__(index, calls[index] + 1)

    handles = [stack.register_forward_hook(counted(n)) for n, stack in enumerate((model.encoder, model.decoder))]
    question = {"run": "fresh", "place": place, "text": "a new text", "target": "ein neuer Text"}
    try:
        assert engine.answer("read", question).meta["small"]
        engine.answer("tile", question | {"layer": 0, "level": 0, "row": 0, "column": 0})
    finally:
        for handle in handles:
            handle.remove()
    assert calls == passes


def test_what_is_read_is_what_the_library_gives(engine, translator):
    for place in ("cross", "encoder", "decoder", "aligner"):
        reply = engine.answer("read", {"run": "shipped", "place": place, "text": SENTENCE, "target": ""})
        source = torch.tensor([[*translator.source.encode(SENTENCE), translator.source.eos]])
        target = torch.tensor([[translator.target.bos, *translator.target.encode(translator(SENTENCE))]])
        wanted = translator.model.maps(source, *(() if place == "encoder" else (target,)), place=place)
        for layer, part in enumerate(wanted):
            got = torch.from_numpy(reply.arrays[f"layer{layer}"].copy())
            torch.testing.assert_close(got, part[0], atol=1e-6, rtol=0)
            shown = {"run": "shipped", "place": place, "text": SENTENCE, "layer": layer}
            row = engine.answer("rows", shown | {"first": 1}).arrays["weights"][:, 0]
            np.testing.assert_allclose(row, part[0, :, 1].detach(), atol=1e-6)
            tile = engine.answer("tile", shown | {"level": 0, "row": 0, "column": 0})
            assert tile.arrays["largest"].shape == part[0].shape
        assert len(reply.meta["queries"]) == wanted[0].shape[2]
        again = wire.decode(wire.encode(reply))
        assert again.meta == reply.meta
        assert all(np.array_equal(again.arrays[name], part) for name, part in reply.arrays.items())


def test_a_deeper_reading_serves_a_shallower_one(engine):
    one = engine.reading("shipped", "encoder", "a deep text", "", 1)
    assert len(one.layers) == 1
    two = engine.reading("shipped", "encoder", "a deep text", "", 3)
    assert engine.reading("shipped", "encoder", "a deep text", "", 2) is two
    torch.testing.assert_close(one.layers[0].x, two.layers[0].x)


@pytest.mark.parametrize("beam", [1, 4])
def test_the_tree_of_the_search_is_the_search(translator, beam):
    steps = []
    found = watch(translator, translator.source.encode(SENTENCE), beam, lambda beams: steps.append(list(beams)))
    wanted = next(translator.translate([SENTENCE], DecodingConfig(beam=beam, nbest=beam)))
    assert [part.ids for part in found] == [part.hypothesis.ids for part in wanted]
    paths = {}
    for before, beams in zip([None, *steps], steps, strict=False):
        for one in beams:
            assert one.path[:-1] == (() if before is None else before[one.parent].path)
            assert one.path[-1] == one.token
            paths[one.path] = one.logprob
    best = found[0].ids
    source = torch.tensor([[*translator.source.encode(SENTENCE), translator.source.eos]])
    with torch.no_grad():
        logits = translator.model(source, torch.tensor([[translator.target.bos, *best]])).logits[0]
    steps = logits.log_softmax(-1)[range(len(best) + 1), [*best, translator.target.eos]].cumsum(0)
    for length in range(1, len(best) + 1):
        assert paths[tuple(best[:length])] == pytest.approx(float(steps[length - 1]), abs=1e-4)
    assert found[0].logprob == pytest.approx(float(steps[-1]), abs=1e-4)


def test_the_six_steps_are_the_layer(engine, translator):
    values = {"run": "shipped", "place": "encoder", "text": SENTENCE, "layer": 1, "head": 2, "query": 1, "target": ""}
    parts = {name: torch.from_numpy(part.copy()) for name, part in engine.answer("steps", values).arrays.items()}
    D = len(parts["q"])
    torch.testing.assert_close(parts["scores"], parts["k"] @ parts["q"])
    torch.testing.assert_close(parts["scaled"], parts["scores"] / D**0.5)
    torch.testing.assert_close(parts["weights"], parts["scaled"].softmax(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(parts["sum"], parts["weights"] @ parts["v"])
    source = torch.tensor([[*translator.source.encode(SENTENCE), translator.source.eos]])
    row = translator.model.maps(source, place="encoder")[1][0, 2, 1]
    torch.testing.assert_close(parts["weights"], row, atol=1e-6, rtol=0)


def test_the_six_steps_of_mixed_heads(translator):
    torch.manual_seed(0)
    sizes = {"vocabulary": translator.source.size, "width": 32, "heads": 4, "inner": 32, "layers": 1}
    spec = "heads(local(window=1), strided(stride=2))"
    model = regard.Transformer(regard.ModelConfig(kind="encoder", attention=spec, **sizes)).eval()
    shown = Engine({"model": lambda: of_model("model", model, translator.source)})
    wanted = model.maps(torch.tensor([translator.source.encode(SENTENCE)]))[0][0]
    values = {"run": "model", "place": "encoder", "text": SENTENCE, "layer": 0, "query": 2}
    for head in range(4):
        reply = shown.answer("steps", values | {"head": head})
        parts, row = reply.arrays, wanted[head, 2].detach()
        # the keys it sees, and no others
        assert reply.meta["places"] == row.nonzero()[:, 0].tolist()
        assert (reply.meta["visible"], reply.meta["hidden"]) == (int((row > 0).sum()), int((row == 0).sum()))
        np.testing.assert_allclose(parts["weights"], row[row > 0], atol=1e-6)
        # its shares follow from the scores: the query and the keys are those of this head
        shares = np.exp(parts["scaled"] - parts["scaled"].max())
        np.testing.assert_allclose(parts["weights"], shares / shares.sum(), atol=1e-5)


def test_the_six_steps_of_a_long_causal_text(translator):
    """Only keys that are seen, the strongest of many, and the sum over all of them."""
    torch.manual_seed(0)
    sizes = {"vocabulary": translator.source.size, "width": 32, "heads": 4, "inner": 32, "layers": 1}
    model = regard.Transformer(regard.ModelConfig(kind="decoder", **sizes)).eval()
    shown = Engine({"model": lambda: of_model("model", model, translator.source)})
    text = SENTENCE * 60
    ids = torch.tensor([translator.source.encode(text)])
    assert ids.shape[1] > 256
    row = model.maps(ids)[0][0, 1, 300].detach()
    values = {"run": "model", "place": "decoder", "text": text, "layer": 0, "head": 1, "query": 300}
    reply = shown.answer("steps", values)
    assert reply.meta["hidden"] == ids.shape[1] - 301
    assert reply.meta["visible"] == 301
    assert sorted(reply.meta["places"]) == reply.meta["places"] == sorted(row.topk(64).indices.tolist())
    np.testing.assert_allclose(reply.arrays["weights"], row[reply.meta["places"]], atol=1e-6)
    given = shown.reading("model", "decoder", text, "").layers[0]
    np.testing.assert_allclose(reply.arrays["sum"], (row @ given.projected[1]["v"][0, 1]).detach(), atol=1e-5)
    first = shown.answer("steps", values | {"query": 3})
    assert first.meta["places"] == [0, 1, 2, 3]


def test_the_six_steps_show_no_later_token(translator):
    """Also of a mechanism that gives a weight of zero to tokens that can be seen."""
    sizes = {"vocabulary": translator.source.size, "width": 32, "heads": 4, "inner": 32, "layers": 1}
    model = regard.Transformer(regard.ModelConfig(kind="decoder", attention="entmax", **sizes)).eval()
    shown = Engine({"model": lambda: of_model("model", model, translator.source)})
    values = {"run": "model", "place": "decoder", "text": SENTENCE, "layer": 0, "head": 0, "query": 2}
    reply = shown.answer("steps", values)
    assert reply.meta["places"] == [0, 1, 2]
    assert reply.meta["hidden"] == len(translator.source.encode(SENTENCE)) - 3


def test_letters_that_are_bytes_are_written_again():
    pieces = ["▁", "\\xe4\\xbd", "\\xa0", "▁caf", "\\xc3", "\\xa9", "\\xf0", "\\x9f", "\\x98", "\\x80", "\\xff", "end"]
    assert subjects.regroup(pieces) == [
        "▁", "你 1/2", "你 2/2", "▁caf", "é 1/2", "é 2/2", "😀 1/4", "😀 2/4", "😀 3/4", "😀 4/4", "\\xff", "end",
    ]  # fmt: skip
    assert subjects.regroup(["▁\\xc3", "\\xa9t", "x"]) == ["▁ét 1/2", "ét 2/2", "x"]


def test_hidden_is_not_zero(translator):
    """Which zeros of a map say that a key cannot be seen: not those that a mechanism may give to one that can be."""
    sizes = {"vocabulary": translator.source.size, "width": 32, "heads": 4, "inner": 32}
    specs = {"softmax": True, "local(window=2)": True, "entmax": False, "gmlp(longest=64)": False}
    specs |= {"heads(local(window=2), entmax)": False}
    model = regard.Transformer(regard.ModelConfig(kind="encoder", attention=list(specs), layers=len(specs), **sizes))
    shown = Engine({"model": lambda: of_model("model", model, translator.source)})
    layers = shown.answer("read", {"run": "model", "place": "encoder", "text": SENTENCE, "target": ""}).meta["layers"]
    assert [layer["zeros_are_hidden"] for layer in layers] == list(specs.values())
    assert not any(layer["causal"] for layer in layers)


def test_words_with_two_meanings(engine):
    """Only pairs whose words are one token each, and sentences whose numbers can be had."""
    (run,) = engine.answer("about", {}).meta["runs"]
    assert {pair["word"] for pair in run["pairs"]} <= {"can", "like", "left", "bank"}
    pair = run["pairs"][0]
    names = {"text": pair["text"], "other": pair["other"], "word": pair["word"]}
    sides = engine.answer("moves", names | {"run": "shipped", "layer": 0}).meta["sides"]
    for side, clue in zip(sides, pair["clues"], strict=True):
        assert clue in [token.replace("▁", "").lower() for token in side["tokens"]]


def test_a_translator_is_shown_as_far_as_it_reads(engine, translator):
    values = {"run": "shipped", "text": "word " * 400, "target": "Wort"}
    across = engine.answer("read", values | {"place": "cross"}).meta
    assert len(across["keys"]) == across["longest"] == translator.longest + 1 < 400
    assert across["cut"]
    alone = engine.answer("read", values | {"place": "encoder"}).meta
    assert len(alone["keys"]) > 400
    assert not alone["cut"]


def test_the_worked_example(engine):
    parts = engine.answer("example", {}).arrays
    np.testing.assert_allclose(parts["scores"], [112, 96], atol=1e-4)
    np.testing.assert_allclose(parts["scaled"], [14, 12], atol=1e-5)
    np.testing.assert_allclose(parts["weights"], [0.880797, 0.119203], atol=1e-6)


def test_moves_add_up(engine, translator):
    values = {"run": "shipped", "text": "the bank of the river", "other": "the cashier at the bank", "word": "bank"}
    reply = engine.answer("moves", values | {"layer": 1})
    for number in (0, 1):
        np.testing.assert_allclose(reply.arrays[f"shares{number}"].sum(), 1, atol=1e-5)
    # the step is the output of the layer itself
    one = engine.reading("shipped", "encoder", "the bank of the river", "", 2).layers[1]
    with torch.no_grad():
        step = one.layer.forward_packed(one.x, one.rows).y[0, 1]
    assert reply.meta["sides"][0]["moved"] == pytest.approx(float(step.norm()), rel=1e-4)
    assert reply.meta["after"] < reply.meta["before"] < 1
    with pytest.raises(ValueError, match="not one token"):
        engine.answer("moves", values | {"layer": 1, "word": "zebra"})


@pytest.mark.parametrize(
    ("spec", "role", "pair", "reason"),
    [
        ("softmax", "self", (3, 30), "all"),
        ("softmax", "causal", (30, 3), "all"),
        ("softmax", "causal", (3, 30), "hidden"),
        ("local(window=3)", "self", (20, 22), "local"),
        ("local(window=3)", "self", (20, 24), "hidden"),
        ("local(window=20)", "self", (18, 34), "local"),
        ("longformer(window=3, globals=2)", "self", (20, 1), "global"),
        ("longformer(window=3, globals=2)", "self", (1, 20), "global"),
        ("longformer(window=3, globals=2)", "self", (20, 19), "local"),
        ("strided(stride=4)", "self", (20, 8), "stride"),
        ("strided(stride=4)", "causal", (20, 8), "stride"),
    ],
)
def test_why_a_pair_is_visible(engine, spec, role, pair, reason):
    reply = engine.answer("pattern", {"spec": spec, "role": role, "length": 36, "heads": 4})
    for head in reply.arrays["why"]:
        assert reply.meta["reasons"][head[pair]] == reason


@pytest.mark.parametrize(
    ("spec", "reason"), [("bigbird(block=2, random=1)", "random"), ("routing(clusters=3)", "content")]
)
def test_what_is_drawn_and_what_is_alike(engine, spec, reason):
    reply = engine.answer("pattern", {"spec": spec, "role": "self", "length": 36, "heads": 4})
    found = {reply.meta["reasons"][code] for code in np.unique(reply.arrays["why"])}
    assert reason in found
    assert not found & ({"random", "content", "stride", "fixed"} - {reason})


@pytest.mark.parametrize(
    ("spec", "role", "found"),
    [
        ("fnet", "self", {"all"}),
        ("gmlp(longest=256)", "self", {"all"}),
        ("gmlp(longest=256)", "causal", {"all", "hidden"}),
        ("reformer(chunk=4, buckets=4, rounds=2)", "self", {"content", "hidden"}),
        ("entmax(alpha=1.5)", "self", {"content", "hidden"}),
        ("bigbird(block=1, globals=1, random=4)", "self", {"local", "global", "random", "hidden"}),
        ("image(block=[2, 3], memory=[1, 2], width=6)", "self", {"local", "fixed", "hidden"}),
        ("longformer(window=2, globals=5, dilation=3)", "self", {"local", "global", "stride", "hidden"}),
    ],
)
def test_reasons_are_what_was_measured(engine, spec, role, found):
    """A step only where there is one, and no pair called hidden or near by chance."""
    reply = engine.answer("pattern", {"spec": spec, "role": role, "length": 36, "heads": 4})
    assert {reply.meta["reasons"][code] for code in np.unique(reply.arrays["why"])} == found


@pytest.mark.parametrize(
    ("spec", "role", "rank", "most"),
    [
        ("softmax", "self", 36, 36),
        ("softmax", "causal", 18, 18),
        ("linformer(rank=4, longest=2048)", "self", 4, 36),
        ("performer(features=8)", "self", 8, 36),
        ("performer(features=8)", "causal", 8, 18),
        ("linear", "self", 16, 36),  # the width of the heads
        ("luna(length=5)", "causal", 5, 18),
        ("local(window=3)", "causal", 3, 18),
        ("compressed(factor=4)", "self", 10, 10),
    ],
)
def test_of_how_many_patterns_a_map_is_made(engine, spec, role, rank, most):
    meta = engine.answer("pattern", {"spec": spec, "role": role, "length": 36, "heads": 4}).meta
    assert (meta["rank"], meta["most"]) == ([rank] * 4, most)


def test_what_does_not_depend_on_the_tokens(engine):
    found = {}
    for spec in ("fnet", "gmlp(longest=256)", "softmax", "synthesizer(kinds=('random',), longest=256)"):
        meta = engine.answer("pattern", {"spec": spec, "role": "self", "length": 24, "heads": 4}).meta
        found[spec] = (meta["steady"], meta["blank"])
    assert list(found.values()) == [(True, False), (True, True), (False, False), (True, False)]


@pytest.mark.parametrize("name", ATTENTION.names())
def test_every_mechanism_is_shown(engine, name):
    cls = ATTENTION.find(name)
    spec, role = cls.examples[0], cls.facts.roles[0]
    heads = 4
    reply = engine.answer("pattern", {"spec": spec, "role": role, "length": 24, "heads": heads})
    assert reply.arrays["weights"].shape[:2] == (heads, 24)
    visible = reply.arrays["why"] > 0
    assert np.array_equal(visible, reply.arrays["weights"] != 0) or cls.facts.signed
    both = engine.answer("compare", {"spec": spec, "run": "shipped", "text": SENTENCE, "layer": 0})
    assert both.arrays["mechanism"].shape[0] == both.arrays["softmax"].shape[0]


def test_softmax_beside_itself_is_the_trained_layer(engine):
    reply = engine.answer("compare", {"spec": "softmax", "run": "shipped", "text": SENTENCE, "layer": 1})
    wanted = engine.answer("read", {"run": "shipped", "place": "encoder", "text": SENTENCE, "target": ""})
    for name in ("mechanism", "softmax"):
        np.testing.assert_allclose(reply.arrays[name], wanted.arrays["layer1"], atol=1e-6)


def test_on_a_slow_machine_fewer_lengths_are_counted(monkeypatch):
    """Softmax is counted wherever the mechanism is: they are compared at the longest."""
    counted = pictures._counted

    def late(spec, role, length):
        if spec == "softmax" and length > 128:
            raise ValueError("this takes too long")
        return counted(spec, role, length)

    with monkeypatch.context() as patch:
        patch.setattr(pictures, "_counted", late)
        assert [len(part) for part in pictures.cost("linear", "causal").meta["counts"].values()] == [2, 2]
    monkeypatch.setattr(pictures, "PATIENCE", 0.0)
    assert [len(part) for part in pictures.cost("linear", "causal").meta["counts"].values()] == [1, 1]
    monkeypatch.setattr(pictures, "PATIENCE", 60.0)
    short = pictures.cost("linformer(rank=4, longest=256)", "self").meta["counts"]
    assert (len(short["softmax"]), len(short["mechanism"])) == (5, 3)
    with pytest.raises(ValueError, match="cannot read 64 tokens"):
        pictures.cost("linformer(rank=4, longest=32)", "self")


def test_the_cost_grows_as_declared(engine, monkeypatch):
    # however slow the machine is
    monkeypatch.setattr(pictures, "PATIENCE", 60)
    meta = engine.answer("cost", {"spec": "local(window=8)", "role": "self"}).meta
    counts = meta["counts"]
    assert 1.9 < counts["mechanism"][-1] / counts["mechanism"][-2] < 2.1
    assert 3.3 < counts["softmax"][-1] / counts["softmax"][-2] < 4.1


def test_positions(engine):
    sizes = {"role": "self", "length": 32, "width": 64, "heads": 4}
    table = engine.answer("position", {"spec": "sinusoidal", **sizes}).arrays["table"]
    places, rates = np.arange(32)[:, None], 10000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(table[:, 0::2], np.sin(places * rates), atol=1e-6)
    np.testing.assert_allclose(table[:, 1::2], np.cos(places * rates), atol=1e-6)
    pairs = engine.answer("position", {"spec": "rotary", **sizes}).arrays["pairs"][0]
    # the product depends on the distance alone
    np.testing.assert_allclose(pairs[0, 7], pairs[11, 18], atol=1e-6)
    pairs = engine.answer("position", {"spec": "alibi", **sizes | {"role": "causal"}}).arrays["pairs"]
    np.testing.assert_allclose(pairs[0, 20, 15], -5 * 2**-2, atol=1e-6)


def test_positions_are_those_of_the_run(translator):
    """The table of a run, where it has learned one; of another scheme, one that says it was only drawn."""
    torch.manual_seed(0)
    sizes = {"vocabulary": translator.source.size, "width": 32, "heads": 4, "inner": 32, "layers": 1}
    model = regard.Transformer(regard.ModelConfig(kind="encoder", position="learned(longest=20)", **sizes)).eval()
    shown = Engine({"model": lambda: of_model("model", model, translator.source)})
    asked = {"role": "self", "length": 64, "width": 64, "heads": 2, "run": "model"}
    reply = shown.answer("position", {"spec": "learned", **asked})
    assert (reply.meta["trained"], reply.meta["width"], reply.meta["length"]) == (True, 32, 20)
    np.testing.assert_array_equal(reply.arrays["table"], model.encoder.position.table.detach())
    for spec, trains in (("buckets", True), ("sinusoidal", False)):
        meta = shown.answer("position", {"spec": spec, **asked}).meta
        assert (meta["trained"], meta["trains"], meta["width"]) == (False, trains, 64)
    bias = regard.ModelConfig(kind="encoder", position="buckets(buckets=8, distance=12)", **sizes)
    model = regard.Transformer(bias).eval()
    shown = Engine({"model": lambda: of_model("model", model, translator.source)})
    found = shown.answer("position", {"spec": "buckets", **asked})
    table = model.encoder.blocks[0].attention.position.table.detach()
    assert found.meta["trained"]
    assert found.meta["heads"] == 4
    np.testing.assert_allclose(found.arrays["pairs"][:, 5, 5], table[0], atol=1e-6)


def test_specs_that_would_not_end_are_refused(engine):
    for spec in ("performer(features=1000000)", "softmax(", "nothing", "heads(heads(heads(heads(softmax))))"):
        with pytest.raises(ValueError, match=r"\w"):
            engine.answer("pattern", {"spec": spec, "role": "self", "length": 16, "heads": 4})


def test_what_takes_too_long_is_ended(engine, monkeypatch):
    monkeypatch.setattr(pictures.Deadline.__init__, "__defaults__", (0.2,))
    with pytest.raises(ValueError, match="too long"):
        engine.answer("pattern", {"spec": "reformer(chunk=512, rounds=255)", "role": "self", "length": 36, "heads": 4})


def test_any_model_with_a_tokenizer(translator):
    torch.manual_seed(0)
    sizes = {"vocabulary": translator.source.size, "width": 32, "heads": 4, "inner": 32, "layers": 2}
    config = regard.ModelConfig(kind="decoder", attention=["local(window=2)", "softmax"], **sizes)
    model = regard.Transformer(config).eval()
    shown = Engine({"model": lambda: of_model("model", model, translator.source)})
    reply = shown.answer("read", {"run": "model", "place": "decoder", "text": SENTENCE, "target": ""})
    wanted = model.maps(torch.tensor([translator.source.encode(SENTENCE)]))
    for layer, part in enumerate(wanted):
        torch.testing.assert_close(torch.from_numpy(reply.arrays[f"layer{layer}"].copy()), part[0])
    with pytest.raises(ValueError, match="tokenizer="):
        regard.show(model, "text")
    with pytest.raises(ValueError, match="some words"):
        regard.show(model, " ", tokenizer=translator.source)


def test_a_model_whose_layers_do_not_all_read_the_text_is_refused():
    """Perceiver AR has a stack of layers, but most of a long text is read by the first of them only."""
    sizes = {"vocabulary": 20, "width": 16, "heads": 2, "inner": 16, "layers": 1}
    model = PerceiverAR(PerceiverARConfig(latents=4, **sizes))
    opened = Opened("language", model, lambda text: [3] * len(text), lambda ids: ["a"] * len(ids), ("decoder",), 8)
    with pytest.raises(ValueError, match=r"'perceiver-ar'.*cannot show it"):
        subjects.of_opened("ar", "ar", opened)


def test_broken_weights_are_said(translator):
    torch.manual_seed(0)
    sizes = {"vocabulary": translator.source.size, "width": 32, "heads": 4, "inner": 32, "layers": 1}
    model = regard.Transformer(regard.ModelConfig(kind="encoder", **sizes)).eval()
    torch.nn.init.constant_(model.encoder.embedding.weight, float("nan"))
    shown = Engine({"model": lambda: of_model("model", model, translator.source)})
    with pytest.raises(ValueError, match="not finite"):
        shown.answer("read", {"run": "model", "place": "encoder", "text": SENTENCE})


def test_the_cache_is_bounded():
    cache = maps.Cache(100)
    for key in range(50):
        assert cache.get(key, lambda key=key: key, lambda _: 30) == key
        assert cache.size <= 100
    assert list(cache.kept) == [47, 48, 49]
    cache.get(47, lambda: 1 / 0, lambda _: 0)
    cache.get(50, lambda: 50, lambda _: 30)
    assert 47 in cache.kept


AWAY = "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS)
def test_parts_of_maps_on_a_gpu(spec):
    one = given(spec, regard.facts(spec).roles[0])
    memory = one.memory and Memory(one.memory.x.to(AWAY), None)
    x = one.x.to(AWAY)
    away = LayerCall(layer=copy.deepcopy(one.layer).to(AWAY), x=x, rows=Rows.full(x), memory=memory)
    torch.testing.assert_close(maps.rows(away, [3, 4, 30]).cpu(), maps.rows(one, [3, 4, 30]))
    torch.testing.assert_close(maps.columns(away, 2, 7).cpu(), maps.columns(one, 2, 7))
    assert maps.tile(away, 0, 0, 0).scale == pytest.approx(maps.tile(one, 0, 0, 0).scale)


@pytest.mark.gpu
def test_the_page_of_a_model_on_a_gpu(engine):
    away = Engine({"shipped": lambda: open_run(None, "shipped", AWAY)})
    text = {"run": "shipped", "text": SENTENCE}
    words = {"other": "My brother works.", "word": "brother", "layer": 1}
    questions = [("moves", text | words), ("compare", text | {"spec": "local(window=2)", "layer": 1})]
    for place in ("encoder", "decoder", "cross", "aligner"):
        here = text | {"place": place, "target": "Mein Bruder lebt in Berlin."}
        questions.append(("read", here))
        here = here | {"layer": 0}
        questions += [("rows", here | {"first": 1}), ("top", here | {"first": 0, "count": 3, "most": 2})]
        questions.append(("tile", here | {"level": 0, "row": 0, "column": 0}))
        if place != "aligner":
            questions.append(("steps", here | {"head": 1, "query": 2}))
    for name, values in questions:
        got, wanted = (wire.decode(wire.encode(one.answer(name, values))) for one in (away, engine))
        for part, numbers in wanted.arrays.items():
            if numbers.dtype == np.float32:
                np.testing.assert_allclose(got.arrays[part], numbers, atol=1e-3, err_msg=f"{name} {part}")
    steps = []
    found = away.translate("shipped", SENTENCE, 4, steps.append)
    assert (
        found["hypotheses"][0]["text"]
        == engine.translate("shipped", SENTENCE, 4, lambda step: None)["hypotheses"][0]["text"]
    )
    assert all(isinstance(step["link"], int) for step in steps if "link" in step)
    with pytest.raises(Cancelled), cancellable(iter([False] * 40 + [True] * 1000).__next__):
        away.answer("rows", text | {"place": "encoder", "text": "another text", "layer": 1, "first": 0})
