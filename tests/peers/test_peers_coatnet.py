"""CoAtNet of timm with the same weights and statistics: logits and gradients, in evaluation and in training."""

import pytest
import torch
from timm_peer import timm
from torch.testing import assert_close

from regard.models import Coatnet, CoatnetConfig

LAYERS, WIDTH = (1, 2, 2, 2), 16


def pair(image: int) -> tuple[Coatnet, torch.nn.Module]:
    torch.manual_seed(0)
    cfg = timm.models.maxxvit.MaxxVitCfg(
        embed_dim=tuple(WIDTH << i for i in range(4)), depths=LAYERS, stem_width=8, head_hidden_size=WIDTH << 3
    )
    theirs = timm.models.maxxvit.MaxxVit(cfg, img_size=image, num_classes=7)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, buffer in theirs.named_buffers():
            if "running" in name:
                buffer.add_(0.2 * torch.rand_like(buffer))
    sizes = {"image": (image, image), "stem_width": 8, "width": WIDTH, "inner": 4 * WIDTH, "layers": LAYERS}
    ours = Coatnet(CoatnetConfig(**sizes, classes=7))
    ours.load_state_dict(renamed(dict(theirs.state_dict())))
    return ours, theirs


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their tensors by our names."""
    ends = {"stem.conv1": "stem.0", "stem.norm1": "stem.1", "stem.conv2": "stem.3"}
    ends |= {"head.norm": "norm", "head.pre_logits.fc": "hidden_layer", "head.fc": "output"}
    convolutions = {"shortcut.expand": "shortcut", "pre_norm": "norm", "conv1_1x1": "expand", "norm1": "expand_norm"}
    convolutions |= {"conv2_kxk": "depthwise", "norm2": "depthwise_norm", "se.fc1": "excite.inner"}
    convolutions |= {"se.fc2": "excite.outer", "conv3_1x1": "project"}
    layers = {"shortcut.expand": "shortcut", "norm1.norm": "norms.0", "norm1": "norms.0", "norm2": "norms.1"}
    layers |= {"attn.proj": "attention.output", "attn.rel_pos.relative_position_bias_table": "attention.table"}
    layers |= {"mlp.fc1": "feedforward.inner", "mlp.fc2": "feedforward.outer"}
    found = {}
    for name, tensor in state.items():
        part, _, kind = name.rpartition(".")
        if not name.startswith("stages."):
            found[f"{ends[part]}.{kind}"] = tensor
            continue
        _, stage, _, block, *rest = name.split(".")
        stage, block, rest = int(stage), int(block), ".".join(rest)
        part, _, kind = rest.rpartition(".")
        if stage < 2:
            flat = ".excite." in f".{convolutions[part]}."
            own = f"convolve.{sum(LAYERS[:stage]) + block}.{convolutions[part]}.{kind}"
            found[own] = tensor[:, :, 0, 0] if flat and tensor.dim() == 4 else tensor
            continue
        own = f"halve.{stage - 2}" if block == 0 else f"stages.{stage - 2}.{block - 1}"
        tensor = tensor.flatten(1) if tensor.dim() == 4 else tensor
        if part == "attn.qkv":
            # theirs by head, then query, key and value
            for letter, third in zip("qkv", tensor.unflatten(0, (-1, 3, 32)).unbind(1), strict=True):
                found[f"{own}.attention.project.{letter}.{kind}"] = third.flatten(0, 1)
        elif rest in layers:
            found[f"{own}.{layers[rest]}"] = tensor
        else:
            found[f"{own}.{layers[part]}.{kind}"] = tensor
    return found


@pytest.mark.parametrize("training", [False, True])
def test_logits_and_gradients(training):
    """In double precision: keys have gradients of zero for their biases, which are rounding only."""
    ours, theirs = (model.double().train(training) for model in pair(64))
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours_in, theirs_in = (images.clone().requires_grad_() for _ in range(2))
    logits, expected = ours(ours_in).logits, theirs(theirs_in)
    assert_close(logits, expected)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_close(ours_in.grad, theirs_in.grad)
    for name, other in renamed({name: part.grad for name, part in theirs.named_parameters()}).items():
        assert_close(ours.get_parameter(name).grad, other)
    for name, buffer in renamed({n: b for n, b in theirs.state_dict().items() if "running" in n}).items():
        assert_close(ours.get_buffer(name), buffer)
