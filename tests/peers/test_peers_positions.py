"""Position schemes against public implementations with the same weights."""

import pytest
import torch
from torch.testing import assert_close
from transformers import GPTNeoXConfig, LlamaConfig, T5Config, Wav2Vec2BertConfig, XLNetConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.perceiver import modeling_perceiver
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

import regard
from regard.core.rows import Rows
from regard.core.shape import Shape
from regard.spec import POSITIONS

B, H, T, D = 2, 4, 37, 8
E = H * D


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def layer_of(position, role="self", **sizes):
    return regard.attention("softmax", width=E, heads=H, role=role, position=position, **sizes)


def scheme(spec, heads=H, role="causal"):
    return POSITIONS.build(spec, Shape.of(width=heads * D, heads=heads, role=role))


def load(layer, **weights):
    """Copies tensors to the parameters of the names given, "__" for a dot; all of them have to be named."""
    named = dict(layer.named_parameters())
    assert {name.replace("__", ".") for name in weights} == set(named)
    with torch.no_grad():
        for name, weight in weights.items():
            named[name.replace("__", ".")].copy_(weight)


@pytest.mark.parametrize("start", [0, 500])
def test_rotary_is_llamas(start):
    q, k = torch.randn(B, H, T, D), torch.randn(B, H, T, D)
    at = torch.arange(start, start + T)[None]
    config = LlamaConfig(
        hidden_size=E, num_attention_heads=H, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, at)
    ours = scheme("rotary(base=500000.0)")
    # their angles are rounded to float32
    room = {"rtol": 1e-5, "atol": 1e-5 + 2e-7 * start}
    for got, expected in zip(
        (ours.rotate(q, at), ours.rotate(k, at)), modeling_llama.apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        assert_close(got, expected, **room)


def test_partial_rotary_is_gpt_neox():
    q, k = torch.randn(B, H, T, D), torch.randn(B, H, T, D)
    at = torch.arange(T)[None]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = GPTNeoXConfig(hidden_size=E, num_attention_heads=H, rope_parameters=rope)
    cos, sin = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(q, at)
    assert cos.shape[-1] == D // 4
    expected, _ = modeling_gpt_neox.apply_rotary_pos_emb(q, k, cos, sin)
    assert_close(scheme("rotary(fraction=0.25)").rotate(q, at), expected, rtol=1e-5, atol=1e-5)


def test_interleaved_rotary_is_gptjs():
    q = torch.randn(B, H, T, D)
    sin, cos = modeling_gptj.create_sinusoidal_positions(T, D)[None].chunk(2, -1)
    expected = modeling_gptj.apply_rotary_pos_emb(q.transpose(1, 2), sin, cos).transpose(1, 2)
    assert_close(
        scheme("rotary(layout='interleaved')").rotate(q, torch.arange(T)[None]), expected, rtol=1e-5, atol=1e-5
    )


def test_shaw_keys_are_wav2vec2_berts():
    k = 5
    config = Wav2Vec2BertConfig(
        hidden_size=E,
        num_attention_heads=H,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=k,
        right_max_position_embeddings=k,
        attn_implementation="eager",
    )
    peer = Wav2Vec2BertSelfAttention(config).double().eval()
    ours = layer_of(f"shaw(distance={k}, values=False)", bias=True).double()
    load(
        ours,
        project__q__weight=peer.linear_q.weight,
        project__q__bias=peer.linear_q.bias,
        project__k__weight=peer.linear_k.weight,
        project__k__bias=peer.linear_k.bias,
        project__v__weight=peer.linear_v.weight,
        project__v__bias=peer.linear_v.bias,
        output__weight=peer.linear_out.weight,
        output__bias=peer.linear_out.bias,
        position__key_table=peer.distance_embedding.weight[None],
    )
    x = torch.randn(B, T, E, dtype=torch.float64)
    assert_close(ours(x), peer(x)[0])


@pytest.mark.parametrize("clamp", [None, 6])
@pytest.mark.parametrize("role", ["self", "causal"])
def test_xl_is_xlnets(role, clamp):
    config = XLNetConfig(d_model=E, n_head=H, d_inner=E, n_layer=1, vocab_size=8, dropout=0.0, clamp_len=clamp or -1)
    peer = XLNetRelativeAttention(config).double().eval()
    for weight in peer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    ours = layer_of("xl" if clamp is None else f"xl(clamp={clamp})", role).double()

    def matrix(weight):
        return weight.flatten(1).T

    load(
        ours,
        project__q__weight=matrix(peer.q),
        project__k__weight=matrix(peer.k),
        project__v__weight=matrix(peer.v),
        output__weight=peer.o.flatten(1),
        position__project__weight=matrix(peer.r),
        position__u=peer.r_w_bias,
        position__v=peer.r_r_bias,
    )
    x = torch.randn(B, T, E, dtype=torch.float64)
    # float64 sinusoids of the distances T .. 1 - T; their own are float32
    distance = torch.arange(T, -T, -1).double().clamp(-(clamp or T), clamp or T)
    frequency = 10000 ** (-torch.arange(0, E, 2).double() / E)
    r = XLNetModel.positional_embedding(distance, frequency, B)
    hidden = torch.ones(T, T, dtype=torch.float64).triu(1)[..., None, None] if role == "causal" else None
    h = x.transpose(0, 1)
    projected = [torch.einsum("ibh,hnd->ibnd", h, weight) for weight in (peer.q, peer.k, peer.v)]
    core = peer.rel_attn_core(*projected, torch.einsum("ibh,hnd->ibnd", r, peer.r), attn_mask=hidden)
    assert_close(ours(x), torch.einsum("ibnd,hnd->bih", core, peer.o))


@pytest.mark.parametrize("role", ["self", "causal"])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (32, 1000), (64, 128), (16, 100), (8, 12)])
def test_buckets_are_t5s(role, buckets, distance):
    gap = torch.arange(-3000, 3001)[None]
    expected = T5Attention._relative_position_bucket(gap, role == "self", buckets, distance)
    assert_close(scheme(f"buckets(buckets={buckets}, distance={distance})", role=role).bucket(gap), expected)


@pytest.mark.parametrize("role", ["self", "causal"])
def test_buckets_layer_is_t5s(role):
    config = T5Config(
        d_model=E, d_kv=D, num_heads=H, dropout_rate=0.0, is_decoder=role == "causal", attn_implementation="eager"
    )
    peer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double().eval()
    ours = layer_of("buckets", role).double()
    load(
        ours,
        # T5 does not scale the product of queries and keys
        project__q__weight=peer.q.weight * D**0.5,
        project__k__weight=peer.k.weight,
        project__v__weight=peer.v.weight,
        output__weight=peer.o.weight,
        position__table=peer.relative_attention_bias.weight,
    )
    x = torch.randn(B, 150, E, dtype=torch.float64)
    future = torch.full((150, 150), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    mask = future if role == "causal" else None
    assert_close(ours(x), peer(x, mask=mask)[0])


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 16, 20])
def test_alibi_is_blooms_and_mpts(heads):
    last = scheme("alibi", heads).bias(torch.arange(1 - T, 1)[None])[:, 0]
    assert_close(last, build_mpt_alibi_tensor(heads, T)[:, 0])
    # Bloom counts from the first key, which moves all logits of a query alike
    bloom = build_alibi_tensor(torch.ones(1, T), heads, torch.float32)[:, 0]
    assert_close(last - last[:, :1], bloom)


def test_fourier_features_are_the_perceivers():
    size = (7, 5)
    ours = scheme("fourier(bands=6, columns=5, apart=True, longest=36)")
    with torch.no_grad():
        pos = modeling_perceiver.build_linear_positions(size).flatten(0, 1)[None]
        theirs = modeling_perceiver.generate_fourier_features(pos, 6, size)
        x = torch.randn(B, 36, E)
        expected = x.clone()
        expected[:, 1:] += theirs @ ours.project.weight.T
        assert_close(ours.add(x, Rows.full(x)), expected, rtol=1e-5, atol=1e-5)
