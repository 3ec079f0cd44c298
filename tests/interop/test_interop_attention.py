"""Our mechanisms inside Hugging Face models: the same numbers as our own model with the same weights."""

import pytest
import torch
import transformers
from published import LLAMA, ids, published
from torch.testing import assert_close

import regard
from regard.interop import huggingface
from regard.interop.transformers import register, suitable
from regard.models import build

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
KEEP = torch.tensor([[1] * 5 + [0] * 4, [1] * 9, [0] * 3 + [1] * 6, [1, 0, 0, 1, 1, 0, 1, 1, 0]]).bool()
POSITIONS = (KEEP.cumsum(1) - 1).clamp(min=0)
# every suitable mechanism, with windows and blocks below the nine tokens of a row
SPECS = [
    "softmax",
    "local(window=2)",
    "strided(stride=3)",
    "sparse(stride=2)",
    "globals(tokens=2)",
    "bigbird(block=2, random=1)",
    "linear",
    "performer(features=8)",
    "efficient",
    "dot",
    "clustered(clusters=3)",
    "image(block=2, memory=3)",
    "heads(local(window=2), softmax)",
]


def both(name: str, spec: str, tmp_path):
    """A model of theirs that runs our mechanism, and ours with the same weights."""
    model = published(name)
    model.save_pretrained(tmp_path / "model")
    found = huggingface.read(tmp_path / "model")
    own = build(type(found.config)(**{**vars(found.config), "attention": spec}))
    tensors = dict(found.tensors)
    if spec.startswith("heads("):
        # parts hold some of the heads each
        for key in [key for key in tensors if ".attention." in key]:
            tensor = tensors.pop(key)
            head, tail = key.split(".attention.")
            shares = tensor.chunk(2, 1 if tail == "output.weight" else 0)
            if tail == "output.bias":
                shares = (tensor, torch.zeros_like(tensor))
            for part, share in enumerate(shares):
                tensors[f"{head}.attention.parts.{part}.{tail}"] = share
    state = own.state_dict()
    # random draws are not parameters: those of `attend`
    role = {"encoder": "self", "decoder": "causal"}[own.config.kind]
    for key in set(state) - set(tensors):
        layer = regard.api._bare(
            str(regard.spec.parse(spec)), 4, own.config.kv_heads or 4, 4, role, torch.float32, torch.device("cpu")
        )
        tensors[key] = dict(layer.named_buffers())[key.split(".attention.")[1]]
    own.load_state_dict(tensors)
    model.set_attn_implementation(*register(spec))
    return model, own.eval()


def test_all_suitable_mechanisms_are_here():
    assert set(suitable()) <= {regard.spec.parse(spec).name for spec in SPECS}
    assert register() == [f"regard:{name}" for name in suitable()]


CAUSAL = [spec for spec in SPECS if "causal" in regard.facts(spec).roles]
# Llama turns queries and keys, which our own layer takes only where their product is what counts
TURNED = [spec for spec in CAUSAL if "rotation" in regard.facts(spec).positions]


@pytest.mark.parametrize(
    ("name", "spec"), [*(("gpt2", spec) for spec in CAUSAL), *(("llama", spec) for spec in TURNED)]
)
@torch.no_grad()
def test_decoders(name, spec, tmp_path):
    """Padding on the left, on the right and between, and with a cache in uneven steps."""
    model, own = both(name, spec, tmp_path)
    tokens = torch.cat([ids(model), ids(model, seed=3)[:1]])
    wanted = own(tokens, keep=KEEP).logits
    found = model(tokens, attention_mask=KEEP.long(), position_ids=POSITIONS).logits
    assert_close(torch.where(KEEP[..., None], found, 0), wanted, **CLOSE)
    cache, steps = transformers.DynamicCache(config=model.config), []
    for first, last in ((0, 4), (4, 5), (5, 9)):
        out = model(
            tokens[:, first:last],
            attention_mask=KEEP[:, :last].long(),
            position_ids=POSITIONS[:, first:last],
            past_key_values=cache,
        )
        steps.append(out.logits)
    assert_close(torch.where(KEEP[..., None], torch.cat(steps, 1), 0), wanted, **CLOSE)
    assert_close(model(tokens[1:2]).logits, wanted[1:2], **CLOSE)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "self" in regard.facts(spec).roles])
@torch.no_grad()
def test_encoder(spec, tmp_path):
    model, own = both("bert", spec, tmp_path)
    tokens = torch.cat([ids(model), ids(model, seed=3)[:1]])
    found = model(tokens, attention_mask=KEEP.long(), position_ids=POSITIONS).logits
    assert_close(torch.where(KEEP[..., None], found, 0), own(tokens, keep=KEEP).logits, **CLOSE)


@pytest.mark.parametrize("spec", ["softmax", "linear", "performer(features=8)"])
@torch.no_grad()
def test_encoder_decoder(spec):
    """Cross-attention reads the padding of the source, also where both sequences are equally long; softmax as theirs
    does."""
    model = published("marian")
    own = model.config._attn_implementation
    model.set_attn_implementation(*register(spec))
    tokens, target, keep = ids(model), ids(model, 9, 2), KEEP[:3]
    inputs = {"decoder_input_ids": target, "input_ids": tokens}
    wanted = torch.cat(
        [
            model(input_ids=tokens[row : row + 1, keep[row]], decoder_input_ids=target[row : row + 1]).logits
            for row in range(2)
        ]
    )
    assert_close(model(**inputs, attention_mask=keep.long()).logits[:2], wanted, **CLOSE)
    if spec == "softmax":
        model.set_attn_implementation(own)
        assert_close(wanted, model(**inputs, attention_mask=keep.long()).logits[:2], **CLOSE)


@torch.no_grad()
def test_generate_with_padding_on_the_left():
    """Hugging Face's own generate, batched, gives each prompt what it gives it alone."""
    model = published("llama")
    model.set_attn_implementation(*register("local(window=3)"))
    tokens = ids(model)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    found = model.generate(tokens[1:], attention_mask=KEEP[1:3].long(), **options)
    alone = model.generate(tokens[2:3, 3:], **options)
    assert found[1, 9:].tolist() == alone[0, 6:].tolist()


def test_gradients():
    model = published("gpt2").train()
    model.config.attn_pdrop = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    found = []
    for name in (model.config._attn_implementation, *register(["softmax", "performer(features=8)"])):
        model.set_attn_implementation(name)
        model.zero_grad()
        torch.where(
            KEEP[:3, :, None], model(ids(model), attention_mask=KEEP[:3].long()).logits, 0
        ).square().sum().backward()
        found.append([part.grad.clone() for part in model.parameters()])
    theirs, softmax, performer = found
    assert_close(softmax, theirs, rtol=1e-4, atol=1e-4)
    assert any((one - other).abs().max() > 1e-3 for one, other in zip(performer, theirs, strict=True))


def test_refused_in_words():
    with pytest.raises(ValueError, match="parameters of its own"):
        register("additive")
    with pytest.raises(ValueError, match="unknown attention 'lokal'"):
        register("lokal(window=2)")
    (name,) = register("local(window=2)")
    tokens = torch.randint(4, 59, (2, 9))

    def model(kind: str, **settings):
        built = getattr(transformers, kind)
        made = built(built.config_class(**settings)).eval()
        made.set_attn_implementation(name)
        return made

    with pytest.raises(ValueError, match="a mask of its own"):
        model("MistralForCausalLM", **LLAMA | {"sliding_window": 4})(tokens)
    llama = model("LlamaForCausalLM", **LLAMA)
    with pytest.raises(ValueError, match="a mask of its own"):
        llama(tokens, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]), use_cache=False)
    with pytest.raises(ValueError, match="takes an attention_mask"):
        llama(tokens, attention_mask=torch.ones(2, 1, 9, 9))
    static = transformers.StaticCache(config=llama.config, max_cache_len=20)
    with pytest.raises(ValueError, match="not static"):
        llama(tokens, past_key_values=static)
    published_gpt = published("gpt2").train()
    published_gpt.set_attn_implementation(name)
    with pytest.raises(ValueError, match="no attention dropout"):
        published_gpt(tokens)
    marian = published("marian")
    marian.set_attn_implementation(name)
    with pytest.raises(ValueError, match="no cross-attention"):
        marian(input_ids=tokens, decoder_input_ids=tokens)


@torch.no_grad()
def test_without_the_mask_function_padding_would_count():
    """The reason for `keep_mask`: seen with transformers 5.22."""
    from transformers import AttentionInterface, AttentionMaskInterface

    (name,) = register("softmax")
    model, tokens = published("llama"), ids(None)
    model.set_attn_implementation(name)
    wanted = model(tokens, attention_mask=KEEP[:3].long(), position_ids=POSITIONS[:3]).logits
    AttentionInterface.register("alone", AttentionInterface._global_mapping[name])
    assert "alone" not in AttentionMaskInterface._global_mapping
    model.set_attn_implementation("alone")
    found = model(tokens, attention_mask=KEEP[:3].long(), position_ids=POSITIONS[:3]).logits
    assert (found[2, 3:] - wanted[2, 3:]).abs().max() > 1e-3
    del AttentionInterface._global_mapping["alone"]


def test_the_scale_of_their_logits_is_kept():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register(["softmax"])
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    module = torch.nn.Identity()
    y, _ = ALL_ATTENTION_FUNCTIONS["regard:softmax"](module, q, k, v, None, scaling=1.5, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.5)
    assert_close(y, expected.transpose(1, 2))
