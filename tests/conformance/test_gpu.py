"""Every mechanism on a GPU gives what it gives on the CPU in float64: outputs, gradients, decoding."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from regard.testing.cases import CUTS, LONG, Case, cases, extended, holes

pytestmark = pytest.mark.gpu
WIDTH = 64
AWAY = "cuda"


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN may use TF32 for convolutions and recurrences of float32, and does by PyTorch's default. TF32 has 10 bits
    of a factor: where cuDNN cuts the others off, these layers come to 1 to 2.3 times the error that is allowed here."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def drawn(case: Case, device: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a layer is given, with gradients, and the masks of its padding."""
    draw = torch.Generator().manual_seed(1)
    given = {"x": torch.randn(6, LONG, WIDTH, generator=draw, dtype=torch.float64)}
    masks = {"keep": holes(LONG)}
    if case.role == "cross":
        given["memory"] = torch.randn(6, 21, WIDTH, generator=draw, dtype=torch.float64)
        masks["memory_keep"] = holes(21, seed=4)[torch.tensor([3, 2, 0, 1, 5, 4])]
    given = {name: part.to(device, dtype).requires_grad_() for name, part in given.items()}
    return given, {name: part.to(device) for name, part in masks.items()}


def whole(case: Case, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and all gradients."""
    layer = case.build(dtype=dtype, width=WIDTH).to(device)
    given, masks = drawn(case, device, dtype)
    y = layer(**given, **(masks if layer.facts.padding != "none" else {}))
    y.square().sum().backward()
    grads = [part.grad for part in (*given.values(), *layer.parameters()) if part.grad is not None]
    return [y.detach(), *grads]


def close(got: list[Tensor], wanted: list[Tensor], off: float) -> None:
    for ours, slow in zip(got, wanted, strict=True):
        assert_close(ours.double().cpu(), slow.double(), rtol=0, atol=off * max(1.0, slow.abs().max().item()))


@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-8), (torch.float32, 1e-3)], ids=["float64", "float32"])
@pytest.mark.parametrize("case", cases(), ids=str)
def test_whole(case, dtype, off):
    close(whole(case, AWAY, dtype), whole(case, "cpu", torch.float64), off)


@pytest.mark.parametrize("case", [case for case in cases() if case.role != "self"], ids=str)
def test_decoding(case):
    results = []
    for device in (AWAY, "cpu"):
        layer = case.build(width=WIDTH).to(device)
        with torch.no_grad():
            given, masks = drawn(case, device, torch.float64)
            if case.role == "cross":
                memory = {"memory": given["memory"], "memory_keep": masks["memory_keep"]}
                results.append([extended(layer, given["x"], cuts, **memory) for cuts in CUTS])
            else:
                results.append([extended(layer, given["x"], cuts, masks["keep"]) for cuts in CUTS])
    close(*results, 1e-8)
