"""What proves a feed-forward layer: one function for each property. There is no skip list: where a layer is exempt, it
has declared so in its facts, and then the opposite is checked."""

import copy
import io
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.core.rows import Rows, pack
from regard.core.state import Out
from regard.core.tally import Tally
from regard.layers.feedforward.base import FeedForward, Sizes
from regard.spec import FEEDFORWARD
from regard.testing.cases import holes, refused, same

WIDTH, INNER = 8, 16


@dataclass(frozen=True)
class Case:
    """A layer in a role."""

    spec: str
    role: Literal["self", "causal"]
    make: Callable[[Sizes], FeedForward] | None = None  # a broken one, in the tests of the checks themselves

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> FeedForward:
        torch.manual_seed(seed)
        sizes = Sizes(width, 2 * width, self.role)
        layer = FEEDFORWARD.build(self.spec, sizes) if self.make is None else self.make(sizes)
        with torch.no_grad():
            for parameter in layer.parameters():
                # none may be zero or one, and routers must have opinions
                parameter.add_(0.5 * torch.randn_like(parameter))
            for buffer in layer.buffers():
                buffer.add_(torch.rand_like(buffer))
        return layer.to(dtype).eval()

    def __str__(self) -> str:
        return f"{self.spec}-{self.role}"


def cases(names: Iterable[str] | None = None) -> list[Case]:
    """Every example of the named layers, or of all."""
    found = []
    for name in FEEDFORWARD.names() if names is None else names:
        for spec in FEEDFORWARD.find(name).examples:
            # the role decides what can be built (check_role), never what is computed
            found.append(Case(spec, regard.facts(spec, "feedforward").roles[-1]))
    return found


def tokens(B: int = 3, T: int = 7, *, seed: int = 1, width: int = WIDTH) -> Tensor:
    return torch.randn(B, T, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def told(layer: FeedForward, x: Tensor, keep: Tensor | None = None, seed: int = 5) -> tuple[Tensor, Out]:
    """The real tokens' answers one after the other, and all that `forward_packed` gives; the same draws every time."""
    torch.manual_seed(seed)
    if keep is None:
        out = layer.forward_packed(x, Rows.full(x))
        return out.y.flatten(0, 1), out
    packed, rows = pack(x, keep)
    out = layer.forward_packed(packed, rows)
    return out.y[rows.real()], out


def reference(layer: FeedForward, x: Tensor, keep: Tensor | None = None) -> Out:
    """All real tokens compete, or those of a row do."""
    rows = [row if keep is None else row[keep[index]] for index, row in enumerate(x)]
    rows = [row for row in rows if len(row)]
    if layer.facts.evaluation == "row":
        return Out(torch.cat([layer.reference(row).y for row in rows]))
    return layer.reference(torch.cat(rows))


def check_reference(case: Case) -> None:
    layer = case.build()
    for training in (False, True):
        layer.train(training)
        if training and layer.facts.random:
            continue
        for B, T in ((1, 1), (1, 2), (2, 7), (1, 17)):
            x = tokens(B, T)
            y, out = told(copy.deepcopy(layer), x)
            expected = reference(layer, x)
            assert_close(y, expected.y)
            if training and layer.facts.auxiliary_loss:
                assert_close(out.auxiliary_loss, expected.auxiliary_loss)
        keep = holes(9)
        y, out = told(copy.deepcopy(layer), tokens(6, 9), keep)
        expected = reference(layer, tokens(6, 9), keep)
        assert_close(y, expected.y)
        if training and layer.facts.auxiliary_loss:
            assert_close(out.auxiliary_loss, expected.auxiliary_loss)


def check_gradient(case: Case) -> None:
    """Of the answers and the loss, for the tokens and every parameter, the router's too."""
    layer = case.build()
    for training in (False, True):
        layer.train(training)
        if training and layer.facts.random:
            continue
        results = []
        for slow in (False, True):
            x = tokens(1, 9).requires_grad_()
            leaves = [x, *layer.parameters()]
            y, out = (lambda out: (out.y, out))(layer.reference(x[0])) if slow else told(copy.copy(layer), x)
            toward = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)
            goal = (y * toward).sum() + (0 if out.auxiliary_loss is None else 3 * out.auxiliary_loss)
            results.append(torch.autograd.grad(goal, leaves, materialize_grads=True))
        names = ["x", *(name for name, _ in layer.named_parameters())]
        for name, fast, slow in zip(names, *results, strict=True):
            assert_close(fast, slow, msg=lambda text, name=name: f"{name}: {text}")


def check_learns(case: Case) -> None:
    """In training, with whatever is drawn, a gradient reaches every parameter."""
    layer = case.build().train()
    y, out = told(layer, tokens(4, 30))
    (y.square().sum() + (0 if out.auxiliary_loss is None else out.auxiliary_loss)).backward()
    lost = [name for name, part in layer.named_parameters() if part.grad is None or not part.grad.any()]
    assert not lost, f"no gradient reaches {lost}"


def check_padding(case: Case) -> None:
    x, keep = tokens(6, 9), holes(9)
    layer = case.build()
    y = layer(x, keep=keep)
    assert not y[~keep].any()
    for row in range(6):
        if keep[row].any():
            assert_close(y[row : row + 1, keep[row]], layer(x[row : row + 1, keep[row]]))
    if not layer.facts.random and layer.facts.training != "row":
        # padded tokens take no capacity and count for no loss: as if there were none
        layer.train()
        padded, whole = copy.deepcopy(layer), copy.deepcopy(layer)
        y, out = told(padded, x, keep)
        alone, plain = told(whole, x[keep][None])
        assert_close(y, alone)
        assert (out.auxiliary_loss is None) == (plain.auxiliary_loss is None)
        assert out.auxiliary_loss is None or assert_close(out.auxiliary_loss, plain.auxiliary_loss) is None
        for name, value in (out.statistics or {}).items():
            assert_close(value, (plain.statistics or {})[name])
        assert_close(list(padded.buffers()), list(whole.buffers()))
    # what stands in the padding reaches nothing, to the last bit
    for training in (False, True):
        results = []
        for fill in (0.0, 7.0, 1e30, math.inf, math.nan):
            layer = case.build(dtype=torch.float32).train(training)
            filled = torch.where(keep[..., None], x, fill).float().requires_grad_()
            torch.manual_seed(5)
            packed, rows = pack(filled, keep)
            out = layer.forward_packed(packed, rows)
            (out.y[rows.real()].square().sum() + (0 if out.auxiliary_loss is None else out.auxiliary_loss)).backward()
            grads = [torch.zeros(()) if part.grad is None else part.grad for part in layer.parameters()]
            found = [out.y[rows.real()].detach(), filled.grad, *grads, *layer.buffers()]
            results.append(found + list((out.statistics or {}).values()))
        for result in results:
            for got, expected in zip(result, results[0], strict=True):
                assert got.isfinite().all()
                same(got, expected)


def check_company(case: Case) -> None:
    """Outside training: a row is the same in any company, and a token too unless the layer says that rows compete."""
    layer = case.build()
    moved = 0.0
    for seed in range(3):
        x = tokens(3, 12, seed=seed)
        y = layer(x)
        for row in range(3):
            assert_close(layer(x[row : row + 1]), y[row : row + 1])
        moved = max(moved, *((layer(x[:, t : t + 1]) - y[:, t : t + 1]).abs().max().item() for t in range(12)))
    if layer.facts.evaluation == "token":
        assert moved < 1e-9, f"declared as a matter of the token alone, but it moves by {moved}"
    else:
        assert moved > 1e-9, "declared as a matter of the row, but each token goes its own way"


def check_coupling(case: Case) -> None:
    """In training: which tokens can change the answer of another, exactly those that are declared."""
    layer = case.build().train()
    at, others = (1, 9), {"earlier": False, "later": False, "rows": False}
    for seed in range(40):
        x = tokens(3, 12, seed=seed)
        base, _ = told(copy.deepcopy(layer), x)
        base = base.view(3, 12, -1)[at]
        for kind, other in (
            ("earlier", (slice(1, 2), slice(0, 9))),
            ("later", (slice(1, 2), slice(10, None))),
            ("later", (slice(2, 3), slice(None))),
            ("rows", (slice(0, 1), slice(None))),
            ("rows", (slice(2, 3), slice(None))),
        ):
            changed = x.clone()
            changed[other] = tokens(3, 12, seed=100 + seed)[other]
            # a row behind is later, unless rows keep to themselves
            y, _ = told(copy.deepcopy(layer), changed)
            others[kind] |= bool((y.view(3, 12, -1)[at] - base).abs().max() > 1e-9)
    expected = {
        "token": {"earlier": False, "later": False, "rows": False},
        "row": {"earlier": True, "later": True, "rows": False},
        "earlier": {"earlier": True, "later": False, "rows": True},
        "batch": {"earlier": True, "later": True, "rows": True},
    }
    assert others == expected[layer.facts.training], f"{layer.facts.training!r} is declared, found {others}"


def check_random(case: Case) -> None:
    layer, x = case.build(), tokens(4, 30)
    same(told(layer, x, seed=1)[0], told(layer, x, seed=2)[0])
    layer.train()
    moved = [not torch.equal(told(layer, x, seed=1)[0], told(layer, x, seed=seed)[0]) for seed in range(2, 12)]
    assert any(moved) == layer.facts.random
    same(told(layer, x, seed=1)[0], told(layer, x, seed=1)[0])


def check_loss(case: Case) -> None:
    layer, x = case.build(), tokens(4, 30)
    assert told(layer, x)[1].auxiliary_loss is None
    loss, found = told(layer.train(), x)[1][3:5]
    assert (loss is not None) == layer.facts.auxiliary_loss
    if loss is not None:
        assert loss.dim() == 0
        assert loss.isfinite()
        assert any(part.requires_grad for part in [loss])
    for value in (found or {}).values():
        assert value.isfinite().all()
        assert not value.requires_grad
    if found is not None and "load" in found:
        assert_close(found["load"].sum(), torch.ones(()))
        assert 0 <= found["dropped"] < 1


def check_role(case: Case) -> None:
    facts = case.build().facts
    for role in ("self", "causal"):
        if role in facts.roles:
            assert replace(case, role=role).build().sizes.role == role
        else:
            with refused(dict(facts.refusals)[role]):
                replace(case, role=role).build()


def grouped_flops(x, weight, *_, out_shape=None, **__):
    """Of the tokens that are sent, or of the weights' gradient: one product of all rows either way."""
    return 2 * x[0] * x[1] * weight[-1]


def cost(layer: FeedForward, T: int) -> dict[str, int]:
    """The counted work of a step of training."""
    x, saved = tokens(1, T, width=layer.sizes.width).float().requires_grad_(), {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    counted = {torch.ops.aten._grouped_mm: grouped_flops}
    with FlopCounterMode(display=False, custom_mapping=counted) as flops, Tally() as tally:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            out = layer.forward_packed(x, Rows.full(x))
        (out.y.sum() + (0 if out.auxiliary_loss is None else out.auxiliary_loss)).backward()
    weights = {part.untyped_storage().data_ptr() for part in layer.parameters()}
    kept = sum(part.untyped_storage().nbytes() for at, part in saved.items() if at not in weights)
    return {"flops": flops.get_total_flops(), "written": tally.written, "saved": kept}


def check_cost(case: Case) -> None:
    layer = case.build(dtype=torch.float32).train()
    short, long = cost(layer, 2048), cost(layer, 4096)
    grown = {name: math.log2(long[name] / short[name]) for name in short}
    assert abs(max(grown["flops"], grown["written"]) - layer.facts.time.exponent) < 0.1, grown
    assert abs(grown["saved"] - layer.facts.memory.exponent) < 0.1, grown


def check_active(case: Case) -> None:
    """No more parameters than declared have a part in the answer to a token, on average, and not far fewer."""
    layer, x = case.build(), tokens(1, 24)
    counts = []
    for t in range(24):
        layer.zero_grad()
        layer(x)[0, t].square().sum().backward()
        counts.append(sum(int((part.grad != 0).sum()) for part in layer.parameters() if part.grad is not None))
    mean = sum(counts) / len(counts)
    assert mean <= layer.active() <= sum(part.numel() for part in layer.parameters())
    # a unit that a ReLU closes is active but learns nothing, nor does what only chooses
    assert mean >= 0.1 * layer.active()


def check_low_precision(case: Case) -> None:
    """Finite, and off by no more than twice what rounding the inputs is; what chooses does so in float32."""
    x = tokens(4, 64, width=32).float()
    for dtype, size in itertools.product((torch.bfloat16, torch.float16), (1.0, 6.0)):
        low = case.build(dtype=dtype, width=32)
        layer = copy.deepcopy(low).float()
        given = (size * x).to(dtype)
        with torch.no_grad():
            got, exact = low(given), layer(given.float())
            assert got.dtype == dtype
            assert got.isfinite().all()
            moved, eps = 0.0, torch.finfo(dtype).eps
            for seed in range(4):
                # inside the layer, behind the choice, which must not move
                near = copy.deepcopy(layer)
                torch.manual_seed(seed)
                for name, part in near.named_parameters():
                    if name.split(".")[0] not in layer.choosing:
                        part.mul_(1 + eps * (2 * torch.rand_like(part) - 1))
                moved = max(moved, (near(given.float()) - exact).abs().max().item())
            assert (got.float() - exact).abs().max() <= 4 * moved + 4 * eps * exact.abs().max()
    layer = case.build(dtype=torch.float32, width=32)
    with torch.no_grad():
        exact = copy.deepcopy(layer).double()(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            got = layer(x)
        assert got.isfinite().all()
        assert_close(got.double(), exact, rtol=0.05, atol=0.05 * exact.abs().max().item())


def check_round_trip(case: Case) -> None:
    layer, other = case.build(seed=0), case.build(seed=1)
    stored = io.BytesIO()
    torch.save(layer.state_dict(), stored)
    stored.seek(0)
    other.load_state_dict(torch.load(stored, weights_only=True))
    x = tokens()
    same(other(x), layer(x))
    assert str(regard.spec.parse(case.spec)) == str(regard.spec.parse(str(regard.spec.parse(case.spec))))
    wrong = f"{case.spec[:-1]}, nonsense=1)" if "(" in case.spec else f"{case.spec}(nonsense=1)"
    with refused("has no option 'nonsense'"):
        regard.feedforward(wrong, width=WIDTH, inner=INNER)


CHECKS = {name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")}
