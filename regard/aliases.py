"""Other names that people use: each stands for a name of ours, or for one with options.

A spec may be written with them; what a run saves, and whatever is printed, has the name of ours.
"""

ALIASES: dict[str, dict[str, str]] = {
    "attention": {
        "bahdanau": "additive",
        "conv": "convolution",
        "conv1d": "convolution",
        "favor": "performer",
        "flash": "softmax",
        "flash_attention": "softmax",
        "full": "softmax",
        "full_attention": "softmax",
        "gru": "recurrent",
        "isab": "set",
        "linear_attention": "linear",
        "linear_transformer": "linear",
        "local_attention": "local",
        "lsh": "reformer",
        "lstm": "recurrent(cell='lstm')",
        "luong": "multiplicative(scaled=False)",
        "mha": "softmax",
        "mlp_mixer": "mixer",
        "multihead": "softmax",
        "nystromformer": "nystrom",
        "rnn": "recurrent",
        "routing_transformer": "routing",
        "scaled_dot_product": "softmax",
        "sdpa": "softmax",
        "self_attention": "softmax",
        "sliding_window": "local",
        "sliding_window_attention": "local",
        "sparse_transformer": "sparse",
        "swa": "local",
        "transformer_xl": "xl",
        "vanilla": "softmax",
        "window": "local",
        "windowed": "local",
    },
    "feedforward": {
        "expert_choice": "choice",
        "ffn": "dense",
        "geglu": "dense(activation='gelu', gated=True)",
        "mixture_of_experts": "moe",
        "mlp": "dense",
        "pkm": "productkey",
        "product_key": "productkey",
        "reglu": "dense(activation='relu', gated=True)",
        "st_moe": "stmoe",
        "swiglu": "dense(activation='silu', gated=True)",
        "switch_transformer": "switch",
    },
    "position": {
        "absolute": "learned",
        "fourier_features": "fourier",
        "learnable": "learned",
        "learnt": "learned",
        "no": "none",
        "nope": "none",
        "relative": "shaw",
        "rope": "rotary",
        "rotary_embedding": "rotary",
        "sin": "sinusoidal",
        "sincos": "sinusoidal",
        "sine": "sinusoidal",
        "sinusoid": "sinusoidal",
        "t5": "buckets",
        "transformer_xl": "xl",
    },
}

# Values of options that were spelled otherwise in earlier versions: kind, name, option, old value, value of today.
OLD_VALUES: dict[str, dict[str, dict[str, dict[str, str]]]] = {
    "attention": {
        "compressed": {"first": {"learnt": "learned"}},
        "entmax": {"alpha": {"learnt": "learned"}},
    },
}

# What is no name of a mechanism here but a setting beside it.
SETTINGS = {
    "gqa": "grouped-query attention is softmax with kv_heads (model.kv_heads) fewer than heads",
    "mqa": "multi-query attention is softmax with kv_heads=1 (model.kv_heads 1)",
    "grouped_query": "grouped-query attention is softmax with kv_heads (model.kv_heads) fewer than heads",
    "multi_query": "multi-query attention is softmax with kv_heads=1 (model.kv_heads 1)",
    "causal": "causal is a role: regard.attention('softmax', role='causal', ...)",
    "cross": "cross is a role: regard.attention('softmax', role='cross', ...)",
}
