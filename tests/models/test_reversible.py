"""Reversible layers: the gradients of plain autograd, the same random numbers twice, and memory that depth does not
take."""

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

import regard
from regard import models
from regard.core.rows import Memory, Rows
from regard.interop import ctranslate2, matching
from regard.models.config import ModelConfig
from regard.models.reversible import Coupled
from regard.models.stack import forward_reversible
from regard.models.transformer import Transformer
from regard.spec import ATTENTION, FEEDFORWARD
from regard.tasks.classify import ClassifierOptions
from regard.tasks.language import LanguageOptions
from regard.tasks.masked import MaskedOptions
from regard.tasks.translate import TranslatorOptions

SMALL = {"vocabulary": 40, "width": 16, "heads": 4, "inner": 32, "layers": 3, "dropout": 0.0, "norm": "pre"}


def build(**options) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(**(SMALL | {"reversible": True} | options))).double()


def ids(B: int = 2, T: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(40, (B, T), generator=torch.Generator().manual_seed(seed))


KEEP = torch.tensor([[1, 0, 1, 1, 1, 1, 1, 0, 1], [1] * 9]).bool()


def step(model: Transformer, monkeypatch: pytest.MonkeyPatch, plain: bool) -> dict[str, torch.Tensor]:
    """Loss, gradients and buffers after a training step; `plain` keeps every activation, as autograd does."""
    model = copy.deepcopy(model).train()
    device = model.output.weight.device
    given = (ids(), ids(T=7, seed=2)) if model.encoder and model.decoder else (ids(),)
    given, keep = [part.to(device) for part in given], KEEP.to(device)
    with monkeypatch.context() as patch:
        if plain:
            patch.setattr(Coupled, "apply", undone_by_nobody)
        torch.manual_seed(5)
        # two passes before the way back: the layers have gone on learning when the first is run again
        total = 0
        for _ in range(2):
            logits, second, statistics = model(*given, keep=keep)
            total = total + logits.square().mean() + (0 if second is None else 0.3 * second)
        total.backward()
    found = {"loss": total.detach()} | ({} if second is None else {"second": second.detach()})
    found |= {f"counted {name}": value for name, value in (statistics or {}).items()}
    return found | {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())


def undone_by_nobody(layers, sublayers, passed, x, stream, memory, *parameters):
    a, b, losses = x, x, []
    for parts in sublayers(memory):
        for part in parts:
            out = part(b, stream)
            a, b, stream = b, a + out.y, out.stream
            losses += [] if out.auxiliary_loss is None else [out.auxiliary_loss]
        passed(a, b, out)
    return a, b, stream, sum(losses) if losses else None


def same(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    expected, got = (step(model, monkeypatch, plain) for plain in (True, False))
    for name, value in expected.items():
        assert (got[name] is None) == (value is None), name
        if value is not None:
            assert_close(got[name], value, msg=lambda text, name=name: f"{name}: {text}")
    return got


@pytest.mark.parametrize("name", ATTENTION.names())
def test_gradients_are_those_of_autograd(name, monkeypatch):
    spec = ATTENTION.find(name).examples[0]
    roles = regard.facts(spec).roles
    options = {"dropout": 0.3, "layers": 2}
    if "self" in roles and regard.facts(spec).padding == "any":
        cross = spec if "cross" in roles else "softmax"
        own = spec if "causal" in roles else "softmax"
        same(build(attention=spec, decoder_attention=own, cross_attention=cross, **options), monkeypatch)
    elif "causal" in roles:
        same(build(kind="decoder", attention=spec, **options), monkeypatch)


@pytest.mark.parametrize("name", FEEDFORWARD.names())
def test_feedforward_layers(name, monkeypatch):
    model = build(kind="encoder", feedforward=FEEDFORWARD.find(name).examples[0], dropout=0.3)
    got = same(model, monkeypatch)
    assert ("second" in got) == FEEDFORWARD.find(name).facts.auxiliary_loss


@pytest.mark.parametrize("layers", [1, 3])
def test_second_losses_and_the_aligner(layers, monkeypatch):
    spec = "compressive(segment=4, memory=4, compressed=5, rate=2)"
    got = same(build(kind="decoder", attention=[spec, "softmax"][:layers], layers=layers), monkeypatch)
    assert got["second"] > 0
    got = same(build(aligner=True, layers=layers, dropout=0.2), monkeypatch)
    assert got["aligner.query.weight"].any()


def test_what_is_learnt_without_gradients_is_learnt_once(monkeypatch):
    spec = ATTENTION.find("routing").examples[0]
    model = build(kind="decoder", attention=spec)
    got = same(model, monkeypatch)
    assert (got["decoder.blocks.0.attention.sums"] - model.decoder.blocks[0].attention.sums).abs().max() > 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["softmax", ATTENTION.find("routing").examples[0], "reformer(chunk=4, buckets=4)"])
def test_on_a_gpu(spec, monkeypatch):
    same(build(kind="decoder", attention=spec, dropout=0.3).cuda(), monkeypatch)


def test_two_sublayers_are_the_formula_of_the_paper():
    model = build(kind="encoder", layers=1).eval()
    (block,) = model.encoder.blocks
    x = torch.randn(2, 5, 16).double()
    y1 = x + block.attention(block.norms[0](x))
    y2 = x + block.feedforward.outer(torch.relu(block.feedforward.inner(block.norms[1](y1))))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert_close(forward_reversible([block], x, Rows.full(x)).y, (y1 + y2) / 2)


def test_three_sublayers_take_turns():
    model = build(layers=1).eval()
    (block,) = model.decoder.blocks
    x, memory = torch.randn(2, 5, 16).double(), torch.randn(2, 7, 16).double()
    y1 = x + block.attention(block.norms[0](x))
    y2 = x + block.cross(block.norms[1](y1), memory=memory)
    z1 = y1 + block.feedforward.outer(torch.relu(block.feedforward.inner(block.norms[2](y2))))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert_close(forward_reversible([block], x, Rows.full(x), memory=Memory(memory, None)).y, (y2 + z1) / 2)


@pytest.mark.parametrize("attention", ["softmax", "luna(length=3)"])
def test_decoding_is_the_forward_pass(attention):
    model = build(attention=attention, cross_attention=attention).eval()
    source, target, keep = ids(), ids(T=7, seed=2), torch.tensor([[1, 1, 0, 1, 1, 0, 1], [1] * 7]).bool()
    whole = model(source, target, keep=KEEP, target_keep=keep).logits
    with torch.no_grad():
        assert_close(model(source, target, keep=KEEP, target_keep=keep).logits, whole)
    state, pieces = model.start(2, memory=model.encode(source, keep=KEEP)), []
    for first, last in ((0, 3), (3, 4), (4, 7)):
        logits, state = model.extend(target[:, first:last], state, keep=keep[:, first:last])
        pieces.append(logits)
    assert_close(torch.cat(pieces, 1), whole)
    maps = model.maps(source, target, keep=KEEP, target_keep=keep, place="decoder")
    assert len(maps) == 3
    assert maps[0].shape == (2, 4, 7, 7)


def test_some_parameters_may_be_frozen_and_gradients_asked_for():
    model = build(kind="encoder")
    model.encoder.blocks[1].feedforward.inner.weight.requires_grad_(False)
    weight = model.encoder.blocks[0].feedforward.outer.weight
    (found,) = torch.autograd.grad(model(ids()).logits.square().mean(), [weight])
    assert weight.grad is None
    model(ids()).logits.square().mean().backward()
    assert_close(found, weight.grad)
    assert model.encoder.blocks[1].feedforward.inner.weight.grad is None


def test_half_precision_chosen_from_outside():
    model, grads = build(kind="encoder", dropout=0.2).float(), []
    for reversible in (True, False):
        model.zero_grad()
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16), pytest.MonkeyPatch.context() as patch:
            if not reversible:
                patch.setattr(Coupled, "apply", undone_by_nobody)
            loss = model(ids()).logits.float().square().mean()
        loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert_close(grad, grads[1][name], rtol=0.02, atol=0.02 * grad.abs().max().item(), msg=name)


def test_compiled():
    model = build(kind="encoder").float()
    expected = torch.autograd.grad(model(ids()).logits.square().mean(), list(model.parameters()))
    torch._dynamo.reset()
    loss = torch.compile(model, backend="aot_eager")(ids()).logits.square().mean()
    for got, grad in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        assert_close(got, grad)


def held(layers: int, reversible: bool) -> int:
    """Bytes that a forward pass leaves allocated."""
    torch.manual_seed(0)
    sizes = {"width": 32, "layers": layers, "reversible": reversible, "dropout": 0.1}
    model = Transformer(ModelConfig(kind="encoder", **(SMALL | sizes)))
    tokens = ids(4, 256)
    model(tokens)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        logits = model(tokens).logits  # noqa: F841
    events = seen.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def test_memory_does_not_grow_with_the_layers():
    one = 4 * 256 * 32 * 4  # bytes of a tensor between layers
    assert held(8, False) - held(2, False) > 6 * 10 * one
    assert held(8, True) - held(2, True) < one


def test_post_norm_is_refused():
    with pytest.raises(ValueError, match="norm='pre'"):
        ModelConfig(norm="post", reversible=True)
    with pytest.raises(ValueError, match="norm='pre'"):
        TranslatorOptions(reversible=True).resolve(vocabulary=100)


def test_every_task_takes_it():
    wish = {"reversible": True, "norm": "pre"}
    assert TranslatorOptions(**wish).resolve(vocabulary=100).reversible
    assert LanguageOptions(**wish).resolve(vocabulary=40).reversible
    assert MaskedOptions(**wish).resolve(vocabulary=40).reversible
    assert models.build(ClassifierOptions(**wish, width=16, heads=2).resolve(vocabulary=40, classes=2)).stack.reversible
    with pytest.raises(ValueError, match=r"'funnel' has no model\.reversible"):
        ClassifierOptions(preset="funnel", **wish).resolve(vocabulary=40, classes=2)


def test_no_other_program_takes_it_for_an_ordinary_model():
    config = ModelConfig(vocabulary=40, norm="pre", reversible=True)
    with pytest.raises(ValueError, match="another reversible: True"):
        ctranslate2._check(config)
    with pytest.raises(ValueError, match=r"reversible False \(here True\)"):
        matching.choose_family(config, {})
