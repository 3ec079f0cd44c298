"""The loss: equal to PyTorch's in float64, values and gradients; padding and precision change nothing."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from regard.core.model import Prediction
from regard.kernels.cross_entropy import CHUNK
from regard.models.config import ModelConfig
from regard.models.transformer import Transformer
from regard.training import loss as losses
from regard.training.compiling import compile_loss
from regard.training.loss import projected_cross_entropy, smoothed_cross_entropy, translation_loss

V, E = 23, 8


class Batch(NamedTuple):
    source: Tensor
    source_keep: Tensor | None
    target_in: Tensor
    target_out: Tensor
    target_keep: Tensor | None


class Text(NamedTuple):
    tokens: Tensor
    target: Tensor
    keep: Tensor | None


def drawn(N: int = 13, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, E, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, E, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x, weight, bias, torch.randint(V, (N,), generator=generator)


def model(**options) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocabulary": V, "width": E, "heads": 2, "inner": 16, "layers": 1, "dropout": 0.0}
    return Transformer(ModelConfig(**(sizes | options))).double()


def batch(padded: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(1)
    source, target_in, target_out = (torch.randint(V, (3, n), generator=generator) for n in (6, 5, 5))
    if not padded:
        return Batch(source, None, target_in, target_out, None)
    # holes in other places than at the end too, and an amount of its own in each row
    source_keep = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0]]).bool()
    target_keep = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]]).bool()
    return Batch(source, source_keep, target_in, target_out, target_keep)


@pytest.fixture(params=[1, 50, 10**6])
def _chunks(request, monkeypatch):
    monkeypatch.setitem(CHUNK, "cpu", request.param)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_projected_is_cross_entropy(smoothing, with_bias):
    x, weight, bias, target = drawn()
    leaves = (x, weight, bias) if with_bias else (x, weight)
    logits = F.linear(*leaves)
    expected = F.cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing)
    total, plain = projected_cross_entropy(x, weight, target, smoothing, bias if with_bias else None)
    assert_close(total, expected)
    assert_close(plain, F.cross_entropy(logits, target, reduction="sum").detach())
    assert not plain.requires_grad
    # a factor in front, as of a mean over the tokens or of a scaler
    assert_close(torch.autograd.grad(total * 3, leaves), torch.autograd.grad(expected * 3, leaves))


@pytest.mark.usefixtures("_chunks")
@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_targets_count_for_nothing(smoothing):
    """As on a GPU, where padding stays in the rows: the same sums and gradients as without those rows."""
    x, weight, bias, target = drawn()
    real = torch.arange(len(x)) % 3 != 1
    some = torch.where(real, target, losses.IGNORED)
    ours = projected_cross_entropy(x, weight, some, smoothing, bias, ignores=True)
    theirs = projected_cross_entropy(x[real], weight, target[real], smoothing, bias)
    assert_close(ours, theirs)
    assert_close(torch.autograd.grad(ours[0], (x, weight, bias)), torch.autograd.grad(theirs[0], (x, weight, bias)))
    assert_close(smoothed_cross_entropy(F.linear(x, weight, bias), some, smoothing), theirs)


def test_gradients_of_one_leaf():
    """A frozen embedding, or frozen layers below the output."""
    x, weight, _, target = drawn()
    expected = torch.autograd.grad(smoothed_cross_entropy(x @ weight.T, target, 0.1)[0], (x, weight))
    assert_close(torch.autograd.grad(projected_cross_entropy(x, weight.detach(), target, 0.1)[0], x), expected[:1])
    assert_close(torch.autograd.grad(projected_cross_entropy(x.detach(), weight, target, 0.1)[0], weight), expected[1:])
    with torch.no_grad():
        expected_loss = smoothed_cross_entropy(x @ weight.T, target, 0.1)[0]
        assert_close(projected_cross_entropy(x, weight, target, 0.1)[0], expected_loss)


def test_backward_twice():
    x, weight, _, target = drawn()
    total = projected_cross_entropy(x, weight, target, 0.1)[0]
    first = torch.autograd.grad(total, (x, weight), retain_graph=True)
    assert_close(torch.autograd.grad(total, (x, weight)), first, rtol=0, atol=0)


def test_no_result_was_written_in_place():
    """A compiler may take what a tensor was before for one more result, and autograd then follows that one."""
    x, weight, _, target = drawn()
    assert [part._version for part in projected_cross_entropy(x, weight, target, 0.1)] == [0, 0]


def test_compiled_gradients():
    """A language model with experts: the compiler sees attention, routing and products of groups, the loss is as
    ever."""
    torch.manual_seed(0)
    sizes = {"vocabulary": V, "width": E, "heads": 2, "inner": 16, "layers": 1, "dropout": 0.0}
    model = Transformer(ModelConfig(kind="decoder", feedforward="switch(experts=3, jitter=0)", **sizes))
    tokens = torch.randint(V, (3, 8), generator=torch.Generator().manual_seed(1))
    given = Text(tokens[:, :-1], tokens[:, 1:], None)
    found = []
    torch._dynamo.reset()
    for run in (losses.next_token_loss, torch.compile(losses.next_token_loss, backend="eager", dynamic=True)):
        made = run(model, given, 0.1)
        found.append((made.total, *torch.autograd.grad(made.total + made.auxiliary_loss, list(model.parameters()))))
    assert_close(found[1], found[0])


def test_equal_layers_are_compiled_once(monkeypatch):
    """Loss and gradients are as without the compiler, at two lengths, and six layers need no six graphs; what must not
    be compiled, as evaluations, is not."""
    graphs, compile_layer = [], nn.Module.compile

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", lambda layer: compile_layer(layer, backend=backend))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Transformer(ModelConfig(kind="decoder", vocabulary=V, width=E, heads=2, inner=16, layers=6, dropout=0.0))
    texts = [Text(ids[:, :-1], ids[:, 1:], None) for ids in (torch.randint(V, (2, length)) for length in (9, 12))]
    task: Any = SimpleNamespace(model=model, loss=lambda text, share: losses.next_token_loss(model, text, share))

    def results(loss) -> list[Tensor]:
        made = [loss(text, 0.1).total for text in texts]
        return [*made, *torch.autograd.grad(made[0] + made[1], list(model.parameters()))]

    eager = results(task.loss)
    # the limit is as before afterwards; undone by monkeypatch it would be gone, and other tests would fail
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        compiled = compile_loss(task)
        with torch.compiler.set_stance("force_eager"):
            assert_close(results(compiled), eager, rtol=0, atol=0)
        assert not graphs
        assert_close(results(compiled), eager)
    assert 1 <= len(graphs) <= 4


def test_smoothed_by_hand():
    """-(1 - e) log p_t - e/V sum of log p, from the formula."""
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]], dtype=torch.float64)
    target = torch.tensor([0, 1])
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    plain = -(p[0, 0].log() + p[1, 1].log())
    total, nll = smoothed_cross_entropy(logits, target, 0.3)
    assert_close(nll, plain)
    assert_close(total, 0.7 * plain - 0.1 * p.log().sum())


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_summed_in_float32(dtype):
    x, weight, _, target = drawn(N=4000, dtype=dtype)
    total, plain = projected_cross_entropy(x, weight, target, 0.1)
    assert total.dtype == plain.dtype == torch.float32
    exact_x, exact_weight = (part.detach().double().requires_grad_() for part in (x, weight))
    exact, exact_plain = smoothed_cross_entropy((exact_x @ exact_weight.T), target, 0.1)
    # the products are rounded, the sum of 4,000 losses is not
    torch.testing.assert_close(total.double(), exact, rtol=1e-4, atol=0)
    torch.testing.assert_close(plain.double(), exact_plain, rtol=1e-4, atol=0)
    grads = torch.autograd.grad(total, (x, weight))
    expected = torch.autograd.grad(exact, (exact_x, exact_weight))
    for grad, true in zip(grads, expected, strict=True):
        assert grad.dtype == dtype
        assert (grad.double() - true).norm() < 8 * torch.finfo(dtype).eps * true.norm()


def test_large_logits():
    """Far beyond where exp overflows, and targets whose probability is 0 in float32."""
    x, weight, _, target = drawn(dtype=torch.float32)
    total, plain = projected_cross_entropy(x * 1e3, weight, target, 0.1)
    exact, exact_plain = smoothed_cross_entropy((x * 1e3 @ weight.T).double(), target, 0.1)
    assert_close(total, exact.float())
    assert_close(plain, exact_plain.float())
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(total, (x, weight)))


def test_autocast():
    """Weights in float32, products in bfloat16: gradients come back in float32."""
    x, weight, _, target = drawn(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = projected_cross_entropy(x, weight, target, 0.1)
    exact = smoothed_cross_entropy(x.double() @ weight.double().T, target, 0.1)[0]
    torch.testing.assert_close(total.double(), exact, rtol=1e-2, atol=0)
    grads = torch.autograd.grad(total, (x, weight))
    assert all(grad.dtype == torch.float32 for grad in grads)
    for grad, true in zip(grads, torch.autograd.grad(exact, (x, weight)), strict=True):
        assert (grad - true).norm() < 0.05 * true.norm()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_of_a_model(padded, tied):
    translator, data = model(tied=tied), batch(padded)
    found = translation_loss(translator, data, 0.1)
    logits = translator(data.source, data.target_in, keep=data.source_keep, target_keep=data.target_keep).logits
    real = torch.ones(3, 5).bool() if data.target_keep is None else data.target_keep
    expected = F.cross_entropy(logits[real], data.target_out[real], reduction="sum", label_smoothing=0.1)
    assert_close(found.total, expected)
    assert_close(found.plain, F.cross_entropy(logits[real], data.target_out[real], reduction="sum").detach())
    assert int(found.tokens) == int(real.sum())
    assert found.auxiliary_loss is None
    leaves = list(translator.parameters())
    assert_close(torch.autograd.grad(found.total, leaves), torch.autograd.grad(expected, leaves))


def test_padding_changes_nothing():
    """Other ids at the padded places, and rows of their own, give the same sums and gradients."""
    translator, data = model(), batch()
    found = translation_loss(translator, data, 0.1)
    grads = torch.autograd.grad(found.total, list(translator.parameters()))
    other = data._replace(
        source=torch.where(data.source_keep, data.source, 7),
        target_in=torch.where(data.target_keep, data.target_in, 7),
        target_out=torch.where(data.target_keep, data.target_out, 7),
    )
    again = translation_loss(translator, other, 0.1)
    assert_close((again.total, again.plain), (found.total, found.plain), rtol=0, atol=0)
    assert_close(torch.autograd.grad(again.total, list(translator.parameters())), grads)
    alone = []
    for row in range(3):
        source, target = data.source_keep[row], data.target_keep[row]
        ids = data.source[row, source], data.target_in[row, target], data.target_out[row, target]
        alone.append(translation_loss(translator, Batch(ids[0][None], None, ids[1][None], ids[2][None], None), 0.1))
    assert_close(sum(part.total for part in alone), found.total)
    assert sum(int(part.tokens) for part in alone) == int(found.tokens)


class Logits(nn.Module):
    """A model that has no `hidden`, only logits and an auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.inside = model()

    def forward(self, source, target, keep=None, target_keep=None):
        logits = self.inside(source, target, keep=keep, target_keep=target_keep).logits
        return Prediction(logits, logits.new_tensor(5.0))


@pytest.mark.parametrize("padded", [False, True])
def test_of_a_model_without_hidden(padded):
    translator, data = Logits(), batch(padded)
    found, expected = translation_loss(translator, data, 0.1), translation_loss(translator.inside, data, 0.1)
    assert_close((found.total, found.plain, found.tokens), (expected.total, expected.plain, expected.tokens))
    assert found.auxiliary_loss == 5
    leaves = list(translator.parameters())
    assert_close(torch.autograd.grad(found.total, leaves), torch.autograd.grad(expected.total, leaves))


def test_bad_smoothing():
    with pytest.raises(ValueError, match="smoothing must be at least 0 and below 1, got 1"):
        translation_loss(model(), batch(), 1.0)
