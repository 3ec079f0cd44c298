"""The public entry points over the whole registry."""

import pytest
import torch
from suite import Case, holes, inputs
from torch.testing import assert_close

import regard
from regard.spec import ATTENTION

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
        own = [n for n, _ in Case(spec, regard.facts(spec).roles[0]).build().named_parameters()]
        assert any("project." not in name and "output." not in name for name in own) or "global_q" in str(own)
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
            torch.cat([part.split(name, given["x"] if name == "q" else source) for part in parts], 1) for name in "qkv"
        )
        keep = holes(source.shape[1])
        o = regard.attend(spec, q, k, v, keep=keep, causal=role == "causal")
        share = 4 // len(parts)
        y = sum(
            part.output(o[:, i * share : (i + 1) * share].transpose(1, 2).flatten(2)) for i, part in enumerate(parts)
        )
        masks = {"memory_keep": keep} if role == "cross" else {"keep": keep}
        assert_close(y, layer(**given, **masks))


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
    regard.api._bare.cache_clear()
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
