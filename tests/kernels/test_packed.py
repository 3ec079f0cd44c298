"""Packed linear layers and the cheap dropout: the same numbers, faster."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from regard.kernels import packed as packing
from regard.kernels.dropout import Dropout
from regard.kernels.packed import Packed, PackedFloat, Transposed, pack_linears
from regard.models.config import ModelConfig
from regard.models.transformer import Transformer

real_is_intel = packing.is_intel.__wrapped__  # uncached
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")


def model(**options) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocabulary": 61, "width": 32, "heads": 4, "inner": 48, "layers": 2, "dropout": 0.0}
    return Transformer(ModelConfig(**(sizes | options))).eval()


def ids(B: int = 3, T: int = 7) -> torch.Tensor:
    return torch.randint(61, (B, T), generator=torch.Generator().manual_seed(B * T))


@pytest.fixture(autouse=True)
def intel(monkeypatch):
    monkeypatch.setattr(packing, "is_intel", lambda: True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("small", [0, 40 * 70])
@pytest.mark.parametrize(("precision", "error"), [("float32", 1e-6), ("bfloat16", 1e-2), ("int8", 2e-2)])
def test_layer(monkeypatch, precision, error, small, bias):
    monkeypatch.setattr(packing, "SMALL", small)
    torch.manual_seed(0)
    linear = nn.Linear(40, 70, bias=bias)
    holder = pack_linears(nn.ModuleDict({"a": linear}), precision)
    assert isinstance(holder["a"], Packed)
    for shape in ((40,), (1, 40), (5, 40), (2, 3, 40), (300, 40), (0, 40), (2, 0, 40)):
        # rows of very different size: each has a scale of its own
        x = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[(...,) + (None,) * (len(shape) - 1)]
        x = x if len(shape) > 1 else torch.randn(shape)
        expected = F.linear(x, linear.weight, linear.bias)
        with torch.inference_mode():
            found = holder["a"](x)
        assert found.shape == expected.shape
        assert found.dtype == torch.float32
        off = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert (off < 4 * error).all()
        # gradients flow through the layer that it replaces
        x.requires_grad_()
        holder["a"](x).sum().backward()
        assert_close(x.grad, linear.weight.detach().sum(0).expand_as(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_one_input(precision):
    linear = nn.Linear(1, 5)
    x = torch.randn(70, 1)
    with torch.inference_mode():
        found = pack_linears(nn.Sequential(linear), precision)[0](x)
        assert_close(found, linear(x), rtol=0.02, atol=0.02)


def test_the_layout_is_used_without_inference_mode(monkeypatch):
    layer, found = pack_linears(nn.Sequential(nn.Linear(4, 4)))[0], []
    monkeypatch.setattr(layer, "multiply", found.append)
    layer(torch.randn(1, 4))
    layer(torch.randn(1, 4, requires_grad=True))
    assert len(found) == 1, "where gradients flow, the layer that it replaces computes"


def test_a_packed_model_is_in_evaluation():
    assert not pack_linears(nn.Sequential(nn.Linear(4, 4)).train()).training


def test_an_output_without_weights_is_its_bias_in_int8():
    linear = nn.Linear(8, 4)
    linear.weight.data[1] = 0
    with torch.inference_mode():
        y = pack_linears(nn.Sequential(linear), "int8")[0](torch.randn(3, 8))
        assert_close(y[:, 1], linear.bias[1].expand(3))


def test_large_weights_take_the_layout_of_onednn(monkeypatch):
    monkeypatch.setattr(packing, "SMALL", 12)
    holder = nn.ModuleDict({"small": nn.Linear(4, 3), "large": nn.Linear(4, 4)})
    pack_linears(holder)
    assert isinstance(holder["small"], Transposed)
    assert holder["small"].layout.stride() == (1, 3)
    assert isinstance(holder["large"], PackedFloat)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert isinstance(pack_linears(nn.ModuleDict({"a": nn.Linear(4, 4)}))["a"], Transposed)
    with pytest.raises(ValueError, match="'int8' needs oneDNN"):
        pack_linears(nn.ModuleDict({"a": nn.Linear(4, 4)}), "int8")


@pytest.mark.parametrize(("library", "maker"), [(False, True), (True, False)])
def test_small_weights_are_for_mkl_on_a_processor_of_intel(monkeypatch, library, maker):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: library)
    monkeypatch.setattr(packing, "is_intel", lambda: maker)
    assert isinstance(pack_linears(nn.ModuleDict({"a": nn.Linear(4, 4)}))["a"], PackedFloat)


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ("vendor_id\t: GenuineIntel\nmodel name\t: INTEL(R) XEON(R)", True),
        ("vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC", False),
    ],
)
@pytest.mark.parametrize("has_proc", [False, True])
def test_whose_the_processor_is(monkeypatch, described, expected, has_proc):
    def read(path):
        if not has_proc:
            raise FileNotFoundError(path)
        return described

    monkeypatch.setattr(packing.Path, "read_text", read)
    monkeypatch.setattr(packing.platform, "processor", lambda: "" if has_proc else described)
    assert real_is_intel() is expected


class Shapes(TorchDispatchMode):
    """Remembers the numbers of rows that oneDNN is given."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_linear_pointwise" in str(function):
            self.found.add(args[0].numel() // args[0].shape[-1])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_onednn_meets_few_numbers_of_rows(monkeypatch, precision):
    """It compiles code for each, and keeps it."""
    monkeypatch.setattr(packing, "SMALL", 0)
    linear = nn.Linear(16, 8)
    layer = pack_linears(nn.Sequential(linear), precision)[0]
    with torch.inference_mode(), Shapes() as shapes:
        for rows in [0, *range(1, 140), 1000, 4000]:
            x = torch.randn(rows, 16)
            assert_close(layer(x), linear(x), rtol=1.6e-2, atol=0.05 if precision == "bfloat16" else 1e-5)
    assert shapes.found == {*range(65), *range(72, 145, 8), 1024, 4096}


def test_rows_are_padded_by_a_sixteenth_at_most():
    sizes = {rows: packing.padded_count(rows) for rows in range(5000)}
    assert all(rows <= size <= max(rows + 7, 1.0625 * rows) for rows, size in sizes.items())
    assert len(set(sizes.values())) < 160


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_rows_do_not_depend_on_each_other(precision):
    holder = pack_linears(nn.ModuleDict({"a": nn.Linear(40, 70)}), precision)
    x = torch.randn(6, 40)
    with torch.inference_mode():
        alone = holder["a"](x[:1])
        x[1:] *= 1000
        assert_close(holder["a"](x)[:1], alone, rtol=1e-5, atol=1e-6)


def test_zeros_stay_numbers():
    holder = pack_linears(nn.ModuleDict({"a": nn.Linear(8, 4)}), "int8")
    with torch.inference_mode():
        assert_close(holder["a"](torch.zeros(2, 8)), holder["a"].bias.expand(2, 4))


@pytest.mark.parametrize(
    ("precision", "small", "error"),
    [("float32", packing.SMALL, 1e-5), ("float32", 0, 1e-5), ("bfloat16", 0, 0.05), ("int8", 0, 0.1)],
)
def test_model(monkeypatch, precision, small, error):
    """Every linear layer is swapped, weights and names stay, and forward, decoding and maps still agree."""
    monkeypatch.setattr(packing, "SMALL", small)
    plain, packed = model(), pack_linears(model(), precision)
    assert not [name for name, module in packed.named_modules() if isinstance(module, nn.Linear)]
    assert list(packed.state_dict()) == list(plain.state_dict())
    assert not [name for name, parameter in packed.named_parameters() if parameter.requires_grad]
    source, target = ids(), ids(T=5)
    with torch.inference_mode():
        expected = plain(source, target).logits
        whole = packed(source, target).logits
        assert (whole - expected).norm() < error * expected.norm()
        state = packed.start(3, memory=packed.encode(source))
        steps = []
        for t in range(5):
            logits, state = packed.extend(target[:, t : t + 1], state)
            steps.append(logits)
        assert (torch.cat(steps, 1) - expected).norm() < error * expected.norm()
        assert packed.maps(source, target)[0].shape == (3, 4, 5, 7)
    if precision == "int8":
        assert not torch.equal(whole, expected)


def test_refusals():
    with pytest.raises(ValueError, match="float32 model on the CPU"):
        pack_linears(model().double())
    with pytest.raises(ValueError, match="'int8', got 'int4'"):
        pack_linears(model(), "int4")


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout(p):
    torch.manual_seed(0)
    layer, x = Dropout(p), torch.ones(501, 401, requires_grad=True)
    y = layer(x)
    kept = y != 0
    share = 1 - kept.double().mean().item()
    # six standard deviations
    assert abs(share - p) < 6 * (p * (1 - p) / x.numel()) ** 0.5
    assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - p)), rtol=1e-4, atol=0)
    # neither rows nor columns are struck as a whole, nor neighbours together
    assert kept.double().mean(0).std() < 3 * (p * (1 - p) / 501) ** 0.5
    assert kept.double().mean(1).std() < 3 * (p * (1 - p) / 401) ** 0.5
    for gap in (1, 2, 3, 4):
        pairs = (~kept.flatten()[gap:] & ~kept.flatten()[:-gap]).double().mean().item()
        assert abs(pairs - p * p) < 6 * (p * p / x.numel()) ** 0.5
    y.sum().backward()
    assert_close(x.grad, y.detach())
    assert not torch.equal(layer(x), y)
    torch.manual_seed(0)
    assert torch.equal(layer(x), y)
    assert layer.eval()(x) is x or torch.equal(layer(x), x)


def test_dropout_keeps_type_and_shape():
    for shape in ((), (0, 3), (1,), (5, 1, 3)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            y = Dropout(0.3)(torch.ones(shape, dtype=dtype))
            assert y.shape == shape
            assert y.dtype == dtype


@pytest.mark.parametrize(("precision", "kind"), [("bfloat16", PackedFloat), ("int8", packing.PackedInteger)])
def test_small_weights_have_the_precision_that_is_asked_for(precision, kind):
    layer = pack_linears(nn.Sequential(nn.Linear(8, 8)), precision)[0]
    assert type(layer) is kind
