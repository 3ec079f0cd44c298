"""Attention by entmax in Triton, compared with PyTorch's operators in float64: values and gradients, of alpha too."""

import pytest
import torch
from torch import Tensor

import regard
from regard.kernels import choose


def outputs(layer: torch.nn.Module, choice: choose.Choice, inputs: dict[str, Tensor | None]) -> list[Tensor]:
    x = inputs["x"].detach().requires_grad_()
    given = {name: value for name, value in inputs.items() if name != "x"}
    with choose.use(choice), choose.record() as ran:
        y = layer(x, **given)
    assert ("entmax", choice) in ran
    weights = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], weights)]


def check(device: str, dtype: torch.dtype, spec: str, role: str, T: int, ragged: bool, heads: int = 2) -> None:
    torch.manual_seed(T)
    width = 16 * heads
    exact = regard.attention(spec, width=width, heads=heads, role=role).to(device)
    layer = regard.attention(spec, width=width, heads=heads, role=role).to(device, dtype)
    layer.load_state_dict(exact.state_dict())
    exact.load_state_dict(layer.state_dict())
    exact.double()
    x, keep = (3 * torch.randn(2, T, width)).to(device, dtype), torch.ones(2, T, dtype=torch.bool, device=device)
    keep[0, T // 2 :: 2] = not ragged
    inputs = {"x": x, "keep": keep if ragged else None}
    if role == "cross":
        inputs = {"x": x, "memory": x.flip(1)[:, T // 3 :], "memory_keep": keep[:, T // 3 :] if ragged else None}
    wide = {name: v if v is None or v.dtype == torch.bool else v.double() for name, v in inputs.items()}
    calls = (layer, "triton", inputs), (layer, "torch", inputs), (exact, "torch", wide)
    names = ["the output", "x", *[name for name, _ in layer.named_parameters()]]
    for name, ours, theirs, true in zip(names, *(outputs(*call) for call in calls), strict=True):
        error, usual, size = (float(part.detach().norm()) for part in (ours - true, theirs - true, true))
        # twice the rounding of PyTorch's operators, and a little where these happen to round to nothing
        room = 2 * usual + 4 * torch.finfo(dtype).eps * size
        assert error <= room, f"{name}: an error of {error:.3g}, of {size:.3g}; PyTorch's operators have {usual:.3g}"


CASES = [
    ("entmax", "causal", 40, True),
    ("entmax", "self", 33, True),
    ("entmax(alpha=1.5)", "cross", 37, False),
    ("entmax(alpha=2.0)", "causal", 35, False),
    ("entmax(alpha=1.001)", "self", 5, False),
]


@pytest.mark.parametrize(("spec", "role", "T", "ragged"), CASES)
def test_entmax_in_triton(spec: str, role: str, T: int, ragged: bool) -> None:
    check("cpu", torch.float32, spec, role, T, ragged)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spec", "role", "T", "ragged"), [*CASES, ("entmax", "causal", 1000, True)])
def test_entmax_on_a_gpu(dtype: torch.dtype, spec: str, role: str, T: int, ragged: bool) -> None:
    # the gradient of alpha is one number of each head, and errors of few numbers differ by chance
    check("cuda", dtype, spec, role, T, ragged, heads=8)
