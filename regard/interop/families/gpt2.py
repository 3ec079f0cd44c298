"""GPT-2."""

from collections.abc import Iterator

from regard.interop.families.base import (
    JOINT_QKV,
    TRANSPOSED,
    Family,
    Link,
    Values,
    dense_spec,
    link,
    link_output,
    published_activation,
    table_length,
)
from regard.models.config import ModelConfig


class GPT2Family(Family):
    def our_settings(self, values: Values, names: set[str]) -> Values:
        return {
            "inner": values.get("n_inner") or 4 * values["n_embd"],
            "position": f"learned(longest={values.get('n_positions', 1024)})",
            "feedforward": dense_spec(values.get("activation_function", "gelu_new")),
        }

    def their_settings(self, config: ModelConfig, values: Values) -> Values:
        # Hugging Face reads the second name as the first
        lengths = dict.fromkeys(("n_positions", "max_position_embeddings"), table_length(config))
        sizes = lengths | {"n_inner": config.inner, "activation_function": published_activation(config)}
        return sizes | {"embd_pdrop": config.dropout, "attn_pdrop": 0.0}

    def links(self, config: ModelConfig, values: Values) -> Iterator[Link]:
        yield from link("wte", "decoder.embedding", bias=False)
        yield Link("wpe.weight", ("decoder.position.table",))
        for n in range(config.layers):
            theirs, ours = f"h.{n}", f"decoder.blocks.{n}"
            inputs = [f"{ours}.attention.project.{name}" for name in "qkv"]
            yield from link(f"{theirs}.ln_1", f"{ours}.norms.0")
            yield from link(f"{theirs}.attn.c_attn", *inputs, form=JOINT_QKV)
            yield from link(f"{theirs}.attn.c_proj", f"{ours}.attention.output", form=TRANSPOSED)
            yield from link(f"{theirs}.ln_2", f"{ours}.norms.1")
            yield from link(f"{theirs}.mlp.c_fc", f"{ours}.feedforward.inner", form=TRANSPOSED)
            yield from link(f"{theirs}.mlp.c_proj", f"{ours}.feedforward.outer", form=TRANSPOSED)
        yield from link("ln_f", "decoder.norm")
        yield from link_output("lm_head", config)


GPT2 = GPT2Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    task="language",
    prefix="transformer.",
    fields={
        "vocabulary": ("vocab_size", 50257),
        "width": ("n_embd", 768),
        "heads": ("n_head", 12),
        "layers": ("n_layer", 12),
        "norm_epsilon": ("layer_norm_epsilon", 1e-5),
        "dropout": ("resid_pdrop", 0.1),
        "tied": ("tie_word_embeddings", True),
    },
    always={"kind": "decoder", "norm": "pre", "bias": True, "scaled_embedding": False},
    required={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    unused=(r"h\.\d+\.attn\.(masked_)?bias",),
)
