"""Swin of Hugging Face and of timm with the same weights, on maps that windows divide: logits and gradients."""

import pytest
import torch
from timm_peer import timm
from torch.testing import assert_close
from transformers import SwinConfig as TheirConfig
from transformers import SwinForImageClassification

from regard.models import Swin, SwinConfig

LAYERS, HEADS = (2, 3, 2), (2, 4, 8)


def build_ours(image: int, window: int) -> Swin:
    sizes = {"image": (image, image), "patch": 2, "window": window, "width": 16, "inner": 64, "classes": 7}
    return Swin(SwinConfig(**sizes, heads=HEADS, layers=LAYERS)).eval()


def shake(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def pair(image: int, window: int) -> tuple[Swin, SwinForImageClassification]:
    torch.manual_seed(0)
    sizes = {"image_size": image, "patch_size": 2, "embed_dim": 16, "window_size": window, "num_labels": 7}
    theirs = SwinForImageClassification(
        TheirConfig(**sizes, depths=list(LAYERS), num_heads=list(HEADS), drop_path_rate=0.0)
    ).eval()
    shake(theirs)
    ours = build_ours(image, window)
    ours.load_state_dict(renamed({name: part.detach() for name, part in theirs.named_parameters()}))
    return ours, theirs


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their tensors by our names."""
    words = {
        "attention.q_proj": "attention.project.q",
        "attention.k_proj": "attention.project.k",
        "attention.v_proj": "attention.project.v",
        "attention.o_proj": "attention.output",
        "attention.relative_position_bias.relative_position_bias_table": "attention.table",
        "layernorm_before": "norms.0",
        "layernorm_after": "norms.1",
        "mlp.fc1": "feedforward.inner",
        "mlp.fc2": "feedforward.outer",
        "swin.embeddings.patch_embeddings.projection": "stem",
        "swin.embeddings.norm": "stem_norm",
        "swin.layernorm": "norm",
        "classifier": "output",
        "downsample.reduction": "reduce",
        "downsample.norm": "norm",
        ".blocks.": ".",
    }
    found = {}
    for name, tensor in state.items():
        stage = "swin.encoder.layers."
        name = name.replace(stage, "merge." if ".downsample." in name else "stages.")
        for theirs, ours in words.items():
            name = name.replace(theirs, ours)
        found[name] = tensor
    return found


@pytest.mark.parametrize(("image", "window"), [(32, 4), (32, 2)])
def test_logits_and_gradients(image, window):
    """Windows that divide every map."""
    ours, theirs = pair(image, window)
    images = torch.randn(2, 3, image, image, generator=torch.Generator().manual_seed(1))
    ours_in, theirs_in = (images.clone().requires_grad_() for _ in range(2))
    logits, expected = ours(ours_in).logits, theirs(theirs_in).logits
    assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_close(ours_in.grad, theirs_in.grad, rtol=1e-3, atol=1e-5)
    gradients = renamed({name: part.grad for name, part in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4)


def timm_pair(image: int, window: int) -> tuple[Swin, torch.nn.Module]:
    torch.manual_seed(0)
    sizes = {"img_size": image, "patch_size": 2, "embed_dim": 16, "window_size": window, "num_classes": 7}
    theirs = timm.models.swin_transformer.SwinTransformer(**sizes, depths=LAYERS, num_heads=HEADS, drop_path_rate=0.0)
    shake(theirs.eval())
    words = {
        "attn.proj.": "attention.output.",
        "attn.relative_position_bias_table": "attention.table",
        "norm1": "norms.0",
        "norm2": "norms.1",
        "mlp.fc1": "feedforward.inner",
        "mlp.fc2": "feedforward.outer",
        "patch_embed.proj": "stem",
        "patch_embed.norm": "stem_norm",
        "head.fc": "output",
        ".blocks.": ".",
        "layers.": "stages.",
    }
    state = {}
    for name, tensor in theirs.named_parameters():
        if ".downsample." in name:
            # there at the beginning of the next stage
            _, stage, _, part, kind = name.split(".")
            state[f"merge.{int(stage) - 1}.{part.replace('reduction', 'reduce')}.{kind}"] = tensor.detach()
            continue
        for word, own in words.items():
            name = name.replace(word, own)
        parts = tensor.detach().chunk(3) if "attn.qkv" in name else [tensor.detach()]
        for letter, part in zip("qkv", parts, strict=False):
            state[name.replace("attn.qkv", f"attention.project.{letter}")] = part
    ours = build_ours(image, window)
    ours.load_state_dict(state)
    return ours, theirs


@pytest.mark.parametrize(("image", "window"), [(32, 4), (16, 4), (16, 8)])
def test_maps_that_are_smaller_than_a_window(image, window):
    ours, theirs = timm_pair(image, window)
    images = torch.randn(2, 3, image, image, generator=torch.Generator().manual_seed(1))
    assert_close(ours(images).logits, theirs(images), rtol=1e-4, atol=1e-5)


def test_a_map_that_windows_do_not_divide_is_cut_and_not_padded():
    """There they read the padding, which has the bias of the keys for a key."""
    ours, theirs = timm_pair(24, 4)
    images = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    assert (ours(images).logits - theirs(images)).abs().max() > 1e-3
