"""ViT of Hugging Face with the same weights: logits, maps and gradients."""

import pytest
import torch
from torch.testing import assert_close
from transformers import ViTConfig, ViTForImageClassification

from regard.models import Vit, VitConfig

SIZES = {"image": (24, 16), "patch": 4, "width": 32, "heads": 4, "inner": 48, "layers": 3, "classes": 7}


def pair(activation: str, epsilon: float) -> tuple[Vit, ViTForImageClassification]:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=SIZES["image"],
        patch_size=4,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=48,
        num_hidden_layers=3,
        num_labels=7,
        hidden_act="gelu" if activation == "gelu" else "gelu_pytorch_tanh",
        layer_norm_eps=epsilon,
        attn_implementation="eager",
    )
    theirs = ViTForImageClassification(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ours = Vit(VitConfig(**SIZES, norm_epsilon=epsilon, feedforward=f"dense(activation={activation!r})")).eval()
    ours.load_state_dict(renamed({name: part.detach() for name, part in theirs.named_parameters()}))
    return ours, theirs


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their names by ours; what they keep as [1, 1, E] without the axes."""
    names = {
        "first": "embeddings.cls_token",
        "position.table": "embeddings.position_embeddings",
        "stem.weight": "embeddings.patch_embeddings.projection.weight",
        "stem.bias": "embeddings.patch_embeddings.projection.bias",
        "norm.weight": "layernorm.weight",
        "norm.bias": "layernorm.bias",
    }
    layers = {
        "norms.0": ("layernorm_before",),
        "norms.1": ("layernorm_after",),
        "attention.project.q": ("attention.attention.query", "attention.q_proj"),
        "attention.project.k": ("attention.attention.key", "attention.k_proj"),
        "attention.project.v": ("attention.attention.value", "attention.v_proj"),
        "attention.output": ("attention.output.dense", "attention.o_proj"),
        "feedforward.inner": ("intermediate.dense", "mlp.fc1"),
        "feedforward.outer": ("output.dense", "mlp.fc2"),
    }
    found = {ours: state[f"vit.{theirs}"] for ours, theirs in names.items()}
    # older versions have other names
    stem = "vit.encoder.layer" if any("encoder.layer." in name for name in state) else "vit.layers"
    for index in range(SIZES["layers"]):
        for ours, choices in layers.items():
            for part in ("weight", "bias"):
                names = [f"{stem}.{index}.{theirs}.{part}" for theirs in choices]
                found[f"blocks.{index}.{ours}.{part}"] = next(state[name] for name in names if name in state)
    found |= {f"answer.output.{part}": state[f"classifier.{part}"] for part in ("weight", "bias")}
    found["first"], found["position.table"] = found["first"][0, 0], found["position.table"][0]
    return found


@pytest.mark.parametrize(("activation", "epsilon"), [("gelu", 1e-6), ("gelu_tanh", 1e-12)])
def test_logits_maps_and_gradients(activation, epsilon):
    ours, theirs = pair(activation, epsilon)
    images = torch.randn(3, 3, *SIZES["image"], generator=torch.Generator().manual_seed(1))
    ours_in, theirs_in = (images.clone().requires_grad_() for _ in range(2))
    logits, expected = ours(ours_in).logits, theirs(theirs_in, output_attentions=True)
    assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours.maps(images), expected.attentions, strict=True):
        assert_close(mine, other, rtol=1e-4, atol=1e-6)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    (expected.logits * weights).sum().backward()
    assert_close(ours_in.grad, theirs_in.grad, rtol=1e-4, atol=1e-5)
    gradients = renamed({name: part.grad for name, part in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-4)
