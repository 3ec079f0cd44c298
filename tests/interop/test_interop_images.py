"""Published models of images, random and small: ours give their numbers, and they give ours."""

import importlib

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from timm_peer import timm
from torch.testing import assert_close

from regard import models
from regard.interop import huggingface
from regard.interop import timm as timm_folders

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}
# name -> class, settings
HUGGINGFACE = {
    "vit": ("ViTForImageClassification", VIT),
    "vit, other": (
        "ViTForImageClassification",
        VIT
        | {"qkv_bias": False, "hidden_act": "gelu_new", "image_size": [8, 16], "num_channels": 1, "num_labels": 2}
        | {"layer_norm_eps": 1e-3},
    ),
    "vit, bare": ("ViTModel", VIT),
    "deit": ("DeiTForImageClassificationWithTeacher", VIT),
    "deit, one answer": ("DeiTForImageClassification", VIT),
}
TIMM_VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 5}
# name -> one of their models, its arguments
TIMM = {
    "vit": ("vit_tiny_patch16_224", TIMM_VIT),
    "vit, other": ("vit_tiny_patch16_224", TIMM_VIT | {"qkv_bias": False, "mlp_ratio": 2.3, "in_chans": 1}),
    "vit, mean": ("vit_tiny_patch16_224", TIMM_VIT | {"class_token": False, "global_pool": "avg", "fc_norm": False}),
    "vit, tanh": ("vit_tiny_patch16_224", TIMM_VIT | {"act_layer": "gelu_tanh", "img_size": (8, 16)}),
    "deit": ("deit_tiny_patch16_224", TIMM_VIT),
    "deit, distilled": ("deit_tiny_distilled_patch16_224", TIMM_VIT),
}


@torch.no_grad()
def drawn(model: torch.nn.Module) -> torch.nn.Module:
    """A model in which every number counts: norms and biases too are drawn."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3 + (1 if parameter.dim() == 1 else 0))
    return model.eval()


def built(found: huggingface.Model) -> torch.nn.Module:
    own = models.build(found.config)
    own.load_state_dict(found.tensors)
    return own.eval()


def pictures(config) -> torch.Tensor:
    return torch.randn(3, config.channels, *config.image, generator=torch.Generator().manual_seed(1))


def huggingface_model(name: str):
    kind, settings = HUGGINGFACE[name]
    model_class = getattr(transformers, kind)
    return drawn(model_class(model_class.config_class(**settings)))


@pytest.mark.parametrize("name", HUGGINGFACE)
@torch.no_grad()
def test_hugging_face_there_and_back(name, tmp_path):
    """Imported: their numbers. Exported again: they load it without a word, and still give the same numbers."""
    model = huggingface_model(name)
    model.save_pretrained(tmp_path / "theirs")
    found = huggingface.read(tmp_path / "theirs")
    own = built(found)
    images, bare = pictures(found.config), found.config.classes is None
    wanted = model(images)[0]
    assert_close(own.encode(images).x if bare else own(images).logits, wanted, **CLOSE)
    family = huggingface.write(tmp_path / "back", own.config, own.state_dict(), family=found.family.name)
    assert family.name == model.config.model_type
    again, info = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert {key for key in info["missing_keys"] if "pooler" not in key} == set()
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert bare or again.config.id2label.keys() == model.config.id2label.keys()
    assert_close(again.eval()(images)[0], wanted, **CLOSE)


@pytest.mark.parametrize("name", ["vit", "deit"])
def test_the_names_of_tensors_in_memory_are_read_too(name, tmp_path):
    """Since version 5 they are others than those in files; the state dict may have been saved as it is."""
    model = huggingface_model(name)
    model.save_pretrained(tmp_path)
    before = huggingface.read(tmp_path).tensors
    in_files = load_file(tmp_path / "model.safetensors").keys()
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_file(tmp_path / "model.safetensors").keys() != in_files
    after = huggingface.read(tmp_path).tensors
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", TIMM)
@torch.no_grad()
def test_timm_there_and_back(name, tmp_path):
    kind, arguments = TIMM[name]
    model = drawn(timm.create_model(kind, **arguments))
    hub = importlib.import_module("timm.models._hub")
    hub.save_for_hf(model, str(tmp_path / "theirs"), model_args=arguments, safe_serialization=True)
    save_file(model.state_dict(), tmp_path / "alone.safetensors")
    found = timm_folders.read(tmp_path / "theirs")
    own = built(found)
    images = pictures(found.config)
    wanted = model(images)
    assert_close(own(images).logits, wanted, **CLOSE)
    if name == "vit, tanh":
        with pytest.raises(ValueError, match="8 patches, which are no square"):
            timm_folders.read(tmp_path / "alone.safetensors", heads=4)
    else:
        assert_close(built(timm_folders.read(tmp_path / "alone.safetensors", heads=4))(images).logits, wanted, **CLOSE)
    facts = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "label_names": list("abcde")}
    timm_folders.write(tmp_path / "back", own.config, own.state_dict(), facts)
    again = timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval()
    assert_close(again(images), wanted, **CLOSE)
    assert again.pretrained_cfg["label_names"] == facts["label_names"]
    assert tuple(again.pretrained_cfg["std"]) == facts["std"]


def test_what_timm_has_and_we_do_not(tmp_path):
    for options, words in (
        ({"init_values": 0.1}, r"such as 'blocks\.0\.ls1\.gamma'"),
        ({"class_token": False, "global_pool": "avg"}, r"lacks the tensor 'norm\.weight'"),
        ({"reg_tokens": 2}, "no square"),
        ({"qk_norm": True}, r"such as 'blocks\.0\.attn\.k_norm"),
    ):
        model = timm.create_model("vit_tiny_patch16_224", **TIMM_VIT | options)
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            timm_folders.read(tmp_path / "model.safetensors", heads=4)
    plain = timm.create_model("vit_tiny_patch16_224", **TIMM_VIT)
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="how many heads a layer of width 16 has: give --heads"):
        timm_folders.read(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "width", "heads"), [("vit_tiny", 192, 3), ("vit_large", 1024, 16), ("vit_huge_patch14", 1280, 16)]
)
def test_heads_by_width_are_those_of_timm(name, width, heads):
    with torch.device("meta"):
        model = timm.create_model(timm.list_models(f"{name}*224")[0], depth=1)
    assert (model.embed_dim, model.blocks[0].attn.num_heads) == (width, heads)
    assert timm_folders._heads(width, "file") == heads


def test_what_no_family_computes_says_so():
    for options, words in (
        ({"attention": "linear"}, "attention softmax"),
        ({"pooling": "sequence"}, "pooling first"),
        ({"stem": "convolution"}, "stem patch"),
        ({"position": "rotary"}, "position learned"),
    ):
        sizes = {"image": (16, 16), "width": 16, "heads": 4, "inner": 40, "layers": 2, "classes": 5}
        own = models.build(models.VitConfig(**sizes | {"pooling": "mean"} | options))
        with pytest.raises(ValueError, match=f"no published family .* differs in.*{words}"):
            huggingface.write("nowhere", own.config, own.state_dict())
    with pytest.raises(ValueError, match="a model of kind 'vit' is none of bert"):
        huggingface.write("nowhere", own.config, own.state_dict(), family="bert")
