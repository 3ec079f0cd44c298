"""Published models of images, random and small: ours give their numbers, and they give ours."""

import importlib
import json
import re
import shutil

import pytest
import torch
import transformers
from painted import painted, write_folders
from PIL import Image
from safetensors.torch import load_file, save_file
from timm_peer import timm
from torch.testing import assert_close
from verbs import refused

from regard import cli, models
from regard.interop import huggingface
from regard.interop import timm as timm_folders
from regard.interop.runs import export_run, import_model
from regard.tasks.images import ImageClassifier, ImageData, ImagesConfig, Task
from regard.tasks.train import train
from regard.training.config import TrainingConfig
from regard.training.display import Display
from regard.training.run import Run

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
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 3, 1],
    "num_heads": [1, 2, 4],
    "window_size": 4,
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
    "swin": ("SwinForImageClassification", SWIN),
    "swin, other": (
        "SwinForImageClassification",
        SWIN
        | {"qkv_bias": False, "hidden_act": "relu", "mlp_ratio": 1.5, "num_channels": 1, "image_size": [32, 64]}
        | {"use_absolute_embeddings": True, "depths": [2, 2], "num_heads": [2, 4], "drop_path_rate": 0.3},
    ),
    "swin, bare": ("SwinModel", SWIN),
}
TIMM_VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 5}
TIMM_SWIN = {"img_size": 32, "patch_size": 2, "embed_dim": 8, "depths": (2, 3, 1), "num_heads": (1, 2, 4)}
TIMM_SWIN |= {"window_size": 4, "num_classes": 5}
# name -> one of their models, its arguments
TIMM = {
    "vit": ("vit_tiny_patch16_224", TIMM_VIT),
    "vit, other": ("vit_tiny_patch16_224", TIMM_VIT | {"qkv_bias": False, "mlp_ratio": 2.3, "in_chans": 1}),
    "vit, mean": ("vit_tiny_patch16_224", TIMM_VIT | {"class_token": False, "global_pool": "avg", "fc_norm": False}),
    "vit, tanh": ("vit_tiny_patch16_224", TIMM_VIT | {"act_layer": "gelu_tanh", "img_size": (8, 16)}),
    "deit": ("deit_tiny_patch16_224", TIMM_VIT),
    "deit, distilled": ("deit_tiny_distilled_patch16_224", TIMM_VIT),
    "swin": ("swin_tiny_patch4_window7_224", TIMM_SWIN),
    "swin, small maps": ("swin_tiny_patch4_window7_224", TIMM_SWIN | {"window_size": 8, "qkv_bias": False}),
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


@pytest.mark.parametrize("name", ["vit", "deit", "swin"])
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


@pytest.mark.parametrize("name", ["vit", "deit, distilled", "swin"])
def test_gradients_are_those_of_timm(name, tmp_path):
    """With respect to the images, and the length of the gradient of all parameters."""
    kind, arguments = TIMM[name]
    model = drawn(timm.create_model(kind, **arguments)).double()
    save_file(model.state_dict(), tmp_path / "alone.safetensors")
    found = timm_folders.read(tmp_path / "alone.safetensors", heads=4)
    own = built(found).double()
    ours, theirs = (pictures(found.config).double().requires_grad_() for _ in range(2))
    weights = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
    (own(ours).logits * weights).sum().backward()
    (model(theirs) * weights).sum().backward()
    assert_close(ours.grad, theirs.grad)
    squares = [sum(part.grad.square().sum() for part in one.parameters()) for one in (own, model)]
    assert_close(*squares)


@torch.no_grad()
def test_older_names_of_swin(tmp_path):
    """The authors, and timm before 0.9, end a stage with its merging, and save what can be computed."""
    model = drawn(timm.create_model("swin_tiny_patch4_window7_224", **TIMM_SWIN))
    state = {}
    for name, tensor in model.state_dict().items():
        name = re.sub(r"layers\.(\d+)\.downsample", lambda match: f"layers.{int(match[1]) - 1}.downsample", name)
        state[name.replace("head.fc.", "head.")] = tensor
    state["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.int64)
    save_file(state, tmp_path / "swin.safetensors")
    found = timm_folders.read(tmp_path / "swin.safetensors")
    omitted, assumed = found.notes
    assert omitted == "omitted, not used here: layers.0.blocks.0.attn.relative_position_index"
    assert "32 x 32, at which the last map is one window" in assumed
    images = pictures(found.config)
    assert_close(built(found)(images).logits, model(images), **CLOSE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image_size": 40}, "windows of 4 x 4 do not divide a map of 10 x 10"),
        ({"image_size": 36}, "cannot be halved 2 times"),
        ({"image_size": [32, 16], "depths": [2, 2], "num_heads": [1, 2]}, "8 x 4 is as narrow as its windows"),
        ({"mlp_ratio": 1.3}, "must be a whole number"),
        ({"layer_norm_eps": 1e-6}, "only layer_norm_eps=1e-05"),
    ],
)
def test_swins_that_others_compute_otherwise(change, words, tmp_path):
    model = transformers.SwinForImageClassification(transformers.SwinConfig(**SWIN | change))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        huggingface.read(tmp_path)


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
    own_swin = models.SwinConfig(image=(40, 40), window=4, width=8, heads=(1, 2), inner=16, layers=(1, 1), classes=5)
    with pytest.raises(ValueError, match="do not divide a map of 10 x 10"):
        huggingface.write("nowhere", own_swin, models.build(own_swin).state_dict())
    coatnet = models.build(models.CoatnetConfig(image=(64, 64), classes=5, stem_width=8, width=16, head_width=8))
    with pytest.raises(ValueError, match=r"a model of kind 'coatnet' is none of gpt2, .*vit"):
        huggingface.write("nowhere", coatnet.config, coatnet.state_dict())
    with pytest.raises(ValueError, match="a model of kind 'vit' is none of bert"):
        huggingface.write("nowhere", own.config, own.state_dict(), family="bert")


# runs


PROCESSOR = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3], "size": {"height": 16, "width": 16}}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A folder of Hugging Face as the hub has it, and the run made of it."""
    folder = tmp_path_factory.mktemp("runs")
    model = huggingface_model("vit")
    names = ["cat", "dog", "crane", "frog", "crane"]
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {name: n for n, name in enumerate(names)}
    model.save_pretrained(folder / "theirs")
    (folder / "theirs" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    found = import_model(folder / "theirs", folder / "run")
    assert found.notes == ["classes of the same name got their number: crane (4)"]
    return folder, model


@torch.no_grad()
def test_an_imported_run_classifies(imported, tmp_path, capsys):
    folder, model = imported
    picture = Image.fromarray(painted("red", 1, (16, 16)))
    picture.save(tmp_path / "red.png")
    classifier = ImageClassifier.load(folder / "run", device="cpu")
    assert classifier.labels == ["cat", "dog", "crane", "frog", "crane (4)"]
    pixels = torch.from_numpy(painted("red", 1, (16, 16))).permute(2, 0, 1).float() / 255
    mean, deviation = (torch.tensor(PROCESSOR[name])[:, None, None] for name in ("image_mean", "image_std"))
    wanted = model((pixels - mean)[None] / deviation).logits.double().softmax(1)[0]
    answer = classifier(tmp_path / "red.png")
    assert_close(torch.tensor(list(answer.probabilities.values())).double(), wanted, **CLOSE)
    assert cli.main(["classify", str(folder / "run"), str(tmp_path / "red.png"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["label"] == answer.label


@torch.no_grad()
def test_runs_are_exported_to_both(imported, tmp_path, capsys):
    folder, model = imported
    run, images = str(folder / "run"), torch.randn(2, 3, 16, 16)
    wanted = model(images).logits
    assert cli.main(["export", run, "--format", "huggingface", "--out", str(tmp_path / "back")]) == 0
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "back").eval()
    assert_close(again(images).logits, wanted, **CLOSE)
    assert again.config.id2label[3] == "frog"
    assert json.loads((tmp_path / "back" / "preprocessor_config.json").read_text()) == PROCESSOR
    capsys.readouterr()
    # timm has its norms with epsilon 1e-6
    assert "norm_epsilon 1e-06 (here 1e-12)" in refused(
        capsys, "export", run, "--format", "timm", "--out", str(tmp_path / "timm")
    )
    assert "only translators" in refused(capsys, "export", run, "--format", "ctranslate2", "--out", str(tmp_path / "x"))


@torch.no_grad()
def test_a_file_of_timm_is_a_run(tmp_path, capsys):
    model = drawn(timm.create_model("vit_tiny_patch16_224", **TIMM_VIT))
    save_file(model.state_dict(), tmp_path / "vit_mine.safetensors")
    run, images = str(tmp_path / "run"), torch.randn(2, 3, 16, 16)
    assert cli.main(["import", str(tmp_path / "vit_mine.safetensors"), "--heads", "4", "--out", run]) == 0
    said = capsys.readouterr()
    assert "mean and deviation are 0.5, as in most vit_ of timm" in said.err
    assert "labels are numbers" in said.err
    assert "regard classify" in said.out
    classifier = ImageClassifier.load(run, device="cpu")
    assert classifier.labels == list("01234")
    assert_close(classifier.model(images).logits, model(images), **CLOSE)
    export_run(run, tmp_path / "timm", "timm")
    again = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    assert_close(again(images), model(images), **CLOSE)
    again = import_model(tmp_path / "timm", tmp_path / "again")
    assert again.notes == []
    export_run(run, tmp_path / "huggingface", "huggingface")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "huggingface").eval()
    assert_close(theirs(images).logits, model(images), **CLOSE)
    written = json.loads((tmp_path / "huggingface" / "preprocessor_config.json").read_text())
    assert (written["image_mean"], written["size"]) == ([0.5] * 3, {"height": 16, "width": 16})


def test_a_model_without_classes_is_something_to_begin_with(tmp_path, capsys):
    huggingface_model("vit, bare").save_pretrained(tmp_path / "theirs")
    run = str(tmp_path / "run")
    assert cli.main(["import", str(tmp_path / "theirs"), "--out", run]) == 0
    assert "regard train images --init" in capsys.readouterr().out
    assert "has no classes: begin with it" in refused(capsys, "classify", run, "picture.png")
    write_folders(tmp_path / "colours", 4)
    data = ImageData(images=str(tmp_path / "colours"))
    training = TrainingConfig(steps=1, metric="accuracy", tensorboard=False)
    settings = ImagesConfig(out=str(tmp_path / "tuned"), init=run, data=data, training=training)
    train(Task, settings, Display(quiet=True))
    facts = Run.open(tmp_path / "tuned").read_json("run.json")
    assert (facts["mean"], facts["labels"]) == ([0.5] * 3, ["blue", "green", "red"])
    assert facts["init"]["run"] == run


def test_what_an_import_of_images_refuses(imported, tmp_path, capsys):
    folder, _ = imported
    theirs = shutil.copytree(folder / "theirs", tmp_path / "theirs")
    out = ["--out", str(tmp_path / "run")]
    for change, words in (
        ({"do_rescale": False}, "another scale"),
        ({"rescale_factor": 1 / 127.5}, "another scale"),
        ({"image_mean": [0.1, 0.2]}, "must be 3 numbers"),
        ({"image_std": "half"}, "must be 3 numbers"),
    ):
        (theirs / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | change))
        assert words in refused(capsys, "import", str(theirs), *out)
    assert "--heads is for files of timm" in refused(capsys, "import", str(theirs), "--heads", "4", *out)
    (theirs / "preprocessor_config.json").unlink()
    assert "--tokenizer is for models of text" in refused(capsys, "import", str(theirs), "--tokenizer", ".", *out)
    config = json.loads((theirs / "config.json").read_text())
    for change, words in (
        ({"id2label": {"1": "a", "2": "b"}}, "from 0 on"),
        ({"patch_size": [4, 2]}, "must be a square"),
        ({"image_size": "large"}, "a number or two"),
        ({"hidden_act": "quick_gelu"}, "no activation is called 'quick_gelu'"),
    ):
        (theirs / "config.json").write_text(json.dumps(config | change))
        assert words in refused(capsys, "import", str(theirs), *out)
    torch.save({}, tmp_path / "model.pt")
    assert "PyTorch checkpoint" in refused(capsys, "import", str(tmp_path / "model.pt"), *out)
    assert not (tmp_path / "run").exists()
