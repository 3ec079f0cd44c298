"""Llama, Mistral and Qwen2: decoders that differ in biases and sliding windows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from regard.interop.families.base import (
    Family,
    Link,
    Values,
    dense_spec,
    link,
    link_output,
    option_value,
    published_activation,
)
from regard.models.config import ModelConfig
from regard.spec import ATTENTION, FEEDFORWARD, POSITIONS, over_layers

STRETCH = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class LlamaFamily(Family):
    """Llama and its successors."""

    bias: bool | Literal["inputs"] | None = None  # None: as the setting `attention_bias` says
    windows: bool = False  # has sliding windows

    def our_settings(self, values: Values, names: set[str]) -> Values:
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
            raise ValueError(
                f"{self.name} with rotary positions of type {kind!r} is not known here, only 'default' and 'llama3'"
            )
        base = float(rope.get("rope_theta", values.get("rope_theta", 10000.0)))
        stretch = tuple(float(rope[name]) for name in STRETCH) if kind == "llama3" else None
        bias = bool(values.get("attention_bias")) if self.bias is None else self.bias
        specs = [f"local(window={window - 1})" if window else "softmax" for window in self._windows(values)]
        return {
            "position": f"rotary(base={base})" if stretch is None else f"rotary(base={base}, stretch={stretch})",
            "bias": bias,
            "feedforward": dense_spec(values.get("hidden_act", "silu"), gated=True, bias=bool(values.get("mlp_bias"))),
            "attention": specs[0] if len(set(specs)) == 1 else specs,
            # a file without an output layer ties it to the embedding, whatever its config says
            "tied": bool(values.get("tie_word_embeddings")) or "lm_head.weight" not in names,
        }

    def _windows(self, values: Values) -> list[int | None]:
        """The number of tokens that each layer sees; None: all."""
        layers, window = values["num_hidden_layers"], values.get("sliding_window")
        if not self.windows or not values.get("use_sliding_window", True):
            window = None
        first = values.get("max_window_layers", 0)
        kinds = values.get("layer_types") or ["sliding_attention" if n >= first else "" for n in range(layers)]
        return [window if kind == "sliding_attention" else None for kind in kinds]

    def their_settings(self, config: ModelConfig, values: Values) -> Values:
        windows = [option_value(ATTENTION, spec, "window") for spec in over_layers(config.attention, config.layers)]
        window = next((window + 1 for window in windows if window), None)
        biases = option_value(FEEDFORWARD, over_layers(config.feedforward, config.layers)[0], "bias")
        rope = {"rope_type": "default", "rope_theta": option_value(POSITIONS, config.position, "base") or 1e4}
        stretch = option_value(POSITIONS, config.position, "stretch")
        if stretch is not None:
            rope |= {"rope_type": "llama3"} | dict(zip(STRETCH, stretch, strict=True))
        settings = {
            "num_key_value_heads": config.kv_heads or config.heads,
            "head_dim": config.head_width or config.width // config.heads,
            "rope_parameters": rope,
            # where libraries looked before transformers 5, which otherwise take the default and say nothing
            "rope_theta": rope["rope_theta"],
            "hidden_act": published_activation(config),
            "tie_word_embeddings": config.tied,
            "max_position_embeddings": values.get("max_position_embeddings", 2048),
            "attention_dropout": 0.0,
        }
        if stretch is not None:
            settings["rope_scaling"] = rope
        if self.bias is None:
            settings |= {"attention_bias": config.bias is True, "mlp_bias": bool(biases)}
        if self.windows:
            kinds = ["sliding_attention" if window else "full_attention" for window in windows]
            settings |= {"sliding_window": window, "use_sliding_window": window is not None, "layer_types": kinds}
        return settings

    def links(self, config: ModelConfig, values: Values) -> Iterator[Link]:
        yield from link("embed_tokens", "decoder.embedding", bias=False)
        inner = bool(values.get("mlp_bias"))
        for n in range(config.layers):
            theirs, ours = f"layers.{n}", f"decoder.blocks.{n}"
            for name in "qkv":
                there = f"{theirs}.self_attn.{name}_proj"
                yield from link(there, f"{ours}.attention.project.{name}", bias=config.bias in (True, "inputs"))
            yield from link(
                f"{theirs}.self_attn.o_proj", f"{ours}.attention.output", bias=config.bias in (True, "output")
            )
            for place, own in {"gate": "gate", "up": "inner", "down": "outer"}.items():
                yield from link(f"{theirs}.mlp.{place}_proj", f"{ours}.feedforward.{own}", bias=inner)
            yield from link(f"{theirs}.input_layernorm", f"{ours}.norms.0", bias=False)
            yield from link(f"{theirs}.post_attention_layernorm", f"{ours}.norms.1", bias=False)
        yield from link("norm", "decoder.norm", bias=False)
        yield from link_output("lm_head", config)


LLAMA_FIELDS = {
    "vocabulary": ("vocab_size", 32000),
    "width": ("hidden_size", 4096),
    "heads": ("num_attention_heads", 32),
    "kv_heads": ("num_key_value_heads", None),
    "head_width": ("head_dim", None),
    "layers": ("num_hidden_layers", 32),
    "inner": ("intermediate_size", 11008),
    "norm_epsilon": ("rms_norm_eps", 1e-6),
}
LLAMA_ALWAYS = {"kind": "decoder", "norm": "pre", "norm_kind": "rms", "scaled_embedding": False, "dropout": 0.0}
LLAMA_UNUSED = (r".*rotary_emb\.inv_freq",)

LLAMA = LlamaFamily(
    name="llama",
    architecture="LlamaForCausalLM",
    task="language",
    prefix="model.",
    fields=LLAMA_FIELDS,
    always=LLAMA_ALWAYS,
    unused=LLAMA_UNUSED,
)

MISTRAL = replace(LLAMA, name="mistral", architecture="MistralForCausalLM", bias=False, windows=True)
QWEN2 = replace(LLAMA, name="qwen2", architecture="Qwen2ForCausalLM", bias="inputs", windows=True)
