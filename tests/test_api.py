"""The public entry points over the whole registry."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing import assert_close

import regard
from regard.core.tally import Tally
from regard.spec import ATTENTION
from regard.testing.cases import Case, holes, inputs

SPECS = [spec for name in ATTENTION.names() for spec in ATTENTION.find(name).examples]


def plain_function(spec: str) -> bool:
    """Whether a mechanism is a function of q, k and v alone; `regard.attend` must refuse the others."""
    q = torch.zeros(1, 4, 2, 4)
    for causal in (False, True):
        try:
            regard.attend(spec, q, q, q, causal=causal)
            return True
        except ValueError as error:
            if "parameters of its own" in str(error):
                return False
    raise AssertionError(f"{spec} is refused in every role")


@pytest.mark.parametrize("spec", SPECS)
def test_attend_is_the_layer_without_its_projections(spec):
    """The layer with its q, k and v computed by hand equals `attend` on them, in every role, with padding."""
    if not plain_function(spec):
        layer = Case(spec, regard.facts(spec).roles[0]).build()
        own = any(not name.startswith(("project.", "output.")) for name, _ in layer.named_parameters())
        assert own or set(getattr(layer, "inputs", ())) != {"q", "k", "v"}
        return
    for role in regard.facts(spec).roles:
        case = Case(spec, role)
        layer = case.build()
        parts = list(getattr(layer, "parts", [layer]))
        # the draws of a layer are its own; attend has one fixed draw for all
        if any(True for part in parts for _ in part.buffers()):
            torch.manual_seed(0)
            bare = regard.api._bare(str(regard.spec.parse(spec)), 4, 4, 4, role, torch.float64, torch.device("cpu"))
            layer.load_state_dict({**layer.state_dict(), **dict(bare.named_buffers())})
        given = inputs(case, B=6)
        source = given.get("memory", given["x"])
        q, k, v = (
            torch.cat([part.project_heads(name, given["x"] if name == "q" else source) for part in parts], 1)
            for name in "qkv"
        )
        keep = holes(source.shape[1])
        o = regard.attend(spec, q, k, v, keep=keep, causal=role == "causal")
        share = 4 // len(parts)
        y = sum(
            part.output(o[:, i * share : (i + 1) * share].transpose(1, 2).flatten(2)) for i, part in enumerate(parts)
        )
        masks = {"memory_keep": keep} if role == "cross" else {"keep": keep}
        assert_close(y, layer(**given, **masks))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if "causal" in regard.facts(spec).roles and plain_function(spec)]
)
def test_attend_of_the_last_tokens(spec, padded):
    """As with a cache: the last queries over all keys are the last rows of the whole, whatever stands before them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, heads, 33, 4, dtype=torch.float64) for heads in (4, 4, 4))
    keep = holes(33) if padded else None
    whole = regard.attend(spec, q, k, v, keep=keep, causal=True)
    for T in (1, 3, 32):
        assert_close(regard.attend(spec, q[:, :, -T:], k, v, keep=keep, causal=True), whole[:, :, -T:])


def test_attend_across_sequences_of_equal_length():
    """Nothing but `cross` tells that the queries are not the keys' own: their padding is another."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 6, 2, 33, 4, dtype=torch.float64)
    found = regard.attend("softmax", q, k, v, keep=holes(33), cross=True)
    longer = regard.attend("softmax", torch.cat([q, q], 2), k, v, keep=holes(33))
    assert_close(found, longer[:, :, :33])
    for wrong in ({"causal": True, "cross": True}, {"cross": False}):
        with pytest.raises(ValueError, match="contradicts"):
            regard.attend("softmax", q[:, :, :5], k, v, **wrong)


def test_attend_groups_heads():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    for spec in ("softmax", "local(window=2)", "linear", "heads(local(window=2), softmax)"):
        wide = regard.attend(spec, q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), causal=True)
        assert_close(regard.attend(spec, q, k, v, causal=True), wide)


def test_attend_is_the_same_in_every_call():
    q = torch.randn(1, 2, 5, 8)
    torch.manual_seed(1)
    first = regard.attend("performer(features=8)", q, q, q)
    regard.api._bare.__wrapped__.cache_clear()
    before = torch.get_rng_state()
    assert_close(regard.attend("performer(features=8)", q, q, q), first, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before), "attend must leave the user's random numbers alone"


def test_names_and_facts():
    assert {"softmax", "local", "linear", "linformer", "heads"} <= set(regard.names())
    assert {"rotary", "alibi", "shaw"} <= set(regard.names("position"))
    for name in regard.names():
        facts = regard.facts(ATTENTION.find(name).examples[0])
        assert facts.name == name
        assert facts.paper
        assert facts.formula
        assert facts.link
    assert regard.facts("heads(local(window=3), linear)").time.exponent == 1
    assert regard.facts("heads(heads(local(window=3), linear, softmax), linear)").time.exponent == 2


def test_rnn_decoder_step():
    """A recurrent decoder reads the same cross layers, one head, one state a step."""
    torch.manual_seed(0)
    for spec in ("dot", "additive", "multiplicative", "softmax"):
        layer = regard.attention(spec, width=12, heads=1, head_width=8, role="cross", memory_width=10, out_width=6)
        memory, h = torch.randn(3, 7, 10), torch.randn(3, 12)
        state = layer.start(3, memory=memory)
        context, state = layer.extend(h[:, None], state)
        assert context.shape == (3, 1, 6)
        assert_close(context, layer(h[:, None], memory=memory))


def test_detach_cuts_the_history():
    layer = regard.attention("local(window=3)", width=16, heads=4, role="causal")
    x = torch.randn(2, 6, 16, requires_grad=True)
    _, state = layer.extend(x[:, :3], layer.start(2))
    y, _ = layer.extend(x[:, 3:], regard.detach(state))
    y.sum().backward()
    assert not x.grad[:, :3].any()
    assert x.grad[:, 3:].any()


def test_attend_runs_in_any_mode_first():
    regard.api._bare.__wrapped__.cache_clear()
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    with torch.inference_mode():
        regard.attend("performer(features=9)", q, q, q)
    regard.attend("performer(features=9)", q, q, q).sum().backward()
    assert q.grad.isfinite().all()
    nested = regard.attend("heads(heads(softmax, linear), linear)", *[q.repeat(1, 2, 1, 1)] * 3)
    assert nested.shape == (1, 4, 5, 8)


def _map(f, parts):
    return torch.vmap(f)(*(x[None] for x in parts))[0]


def _differentiate(f, parts):
    q, k, v = parts
    found = torch.func.grad(lambda q: f(q, k, v).sum())(q)
    q = q.clone().requires_grad_()
    f(q, k, v).sum().backward()
    assert_close(found, q.grad)


def _fake(f, parts):
    with FakeTensorMode() as mode:
        o = f(*map(mode.from_tensor, parts))
    assert isinstance(o, FakeTensor)
    assert o.shape == parts[0].shape


class _Called(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, q, k, v):
        return self.f(q, k, v)


def _export(f, parts):
    return torch.export.export(_Called(f), parts, strict=False).module()(*parts)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's attention under vmap
@pytest.mark.parametrize("transform", [_map, _differentiate, _fake, _export])
def test_attend_is_transformed_before_it_was_ever_called(transform):
    """What it is first called in must not reach the layer that is kept for later calls."""
    q, k, v = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0))

    def attend(q, k, v):
        return regard.attend("softmax", q, k, v, causal=True)

    expected = attend(q, k, v)
    regard.api._bare.__wrapped__.cache_clear()
    state = torch.random.get_rng_state()
    found = transform(attend, (q, k, v))
    if found is not None:
        assert_close(found, expected)
    assert_close(attend(q, k, v), expected)
    # numbers that the caller draws next are the same with it
    assert_close(torch.random.get_rng_state(), state, rtol=0, atol=0)


def test_attend_is_first_called_under_another_default_device():
    regard.api._bare.__wrapped__.cache_clear()
    q = torch.randn(1, 2, 5, 8)
    with torch.device("meta"):
        first = regard.attend("performer(features=7)", q, q, q)
    assert_close(regard.attend("performer(features=7)", q, q, q), first)


def test_only_the_queries_trained():
    """Frozen keys and values, as with adapters: decoding with gradients must not write over what was read."""
    torch.manual_seed(0)
    for spec in ("softmax", "local(window=3)", "linear"):
        layer = regard.attention(spec, width=16, heads=4, role="causal")
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name == "project.q.weight")
        x, state, total = torch.randn(2, 6, 16), layer.start(2), 0
        for t in range(6):
            y, state = layer.extend(x[:, t : t + 1], state)
            total = total + y.square().sum()
        total.backward()
        stepwise = layer.project["q"].weight.grad.clone()
        layer.zero_grad()
        layer(x).square().sum().backward()
        assert_close(stepwise, layer.project["q"].weight.grad)


def test_padding_takes_no_room():
    layer = regard.attention("softmax", width=16, heads=4, role="causal")
    state = layer.start(2)
    keep = torch.tensor([[True, *[False] * 7], [*[False] * 7, True]])
    with torch.no_grad():
        for _ in range(50):
            _, state = layer.extend(torch.randn(2, 8, 16), state, keep=keep)
    assert state.progress.longest == 50
    short = regard.attention("location(longest=8)", width=16, heads=4, role="causal")
    _, state = short.extend(torch.randn(2, 6, 16), short.start(2), keep=torch.arange(6) < torch.tensor([[2], [1]]))
    for _ in range(3):
        _, state = short.extend(torch.randn(2, 1, 16), state)


def test_a_ragged_first_prompt_builds_no_table():
    """What is N in memory stays so where prompts differ in length."""
    T = 1024
    layer = regard.attention("softmax", width=16, heads=4, role="causal")
    keep = torch.arange(T) < torch.tensor([[T], [T // 2]])
    with torch.no_grad(), Tally() as tally:
        layer.extend(torch.randn(2, T, 16), layer.start(2), keep=keep)
    assert tally.largest < T * T


def test_a_window_far_beyond_the_text():
    x = torch.randn(1, 5, 16)
    for spec in ("local(window=1000000000)", "longformer(window=1000000000, globals=1)"):
        layer = regard.attention(spec, width=16, heads=4, role="causal", position="alibi")
        y, _ = layer.extend(x, layer.start(1))
        assert_close(y, layer(x))


def test_mixed_heads_share_what_a_stack_shares():
    spec = "heads(linformer(rank=2, longest=8, sharing='layerwise'), softmax)"
    first, second = (regard.attention(spec, width=16, heads=4) for _ in range(2))
    second.link_layers(first, False, False)
    assert second.parts[0].mix_k is first.parts[0].mix_k


@pytest.mark.parametrize("spec", ["local(window=8)", "heads(local(window=4), linear)"])
def test_attend_is_compiled_before_it_was_ever_called(spec):
    torch._dynamo.reset()
    regard.api._bare.__wrapped__.cache_clear()
    q, k, v = torch.randn(3, 2, 4, 40, 16, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(lambda q, k, v: regard.attend(spec, q, k, v, causal=True), backend="eager")
    for T in (40, 33):
        parts = [x[:, :, :T] for x in (q, k, v)]
        assert_close(compiled(*parts), regard.attend(spec, *parts, causal=True))
