"""Published models, random and small, and how ours are compared with them."""

import torch
import transformers
from torch.testing import assert_close

from regard import models
from regard.interop import huggingface

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


CLOSE = {"rtol": 1e-5, "atol": 1e-5}
BERT = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 24,
}
LLAMA = BERT | {"num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": 60, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 4}
MARIAN = {
    "vocab_size": 60,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 24,
    "pad_token_id": 59,
    "decoder_start_token_id": 3,
    "eos_token_id": 0,
}
# name -> class, settings
PUBLISHED = {
    "gpt2": ("GPT2LMHeadModel", GPT2 | {"bos_token_id": 1, "eos_token_id": 2}),
    "gpt2, other": (
        "GPT2LMHeadModel",
        GPT2 | {"n_inner": 24, "activation_function": "relu", "layer_norm_epsilon": 0.1},
    ),
    "bert": ("BertForMaskedLM", BERT | {"type_vocab_size": 3}),
    "bert, pretraining": ("BertForPreTraining", BERT),
    "gpt2, untied": ("GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False, "eos_token_id": 2}),
    "bert, untied": ("BertForMaskedLM", BERT | {"tie_word_embeddings": False, "layer_norm_eps": 0.1}),
    "roberta, untied": ("RobertaForMaskedLM", BERT | {"tie_word_embeddings": False, "pad_token_id": 1}),
    "qwen2, full": ("Qwen2ForCausalLM", LLAMA | {"tie_word_embeddings": True, "rms_norm_eps": 0.1}),
    "bert, bare": ("BertModel", BERT | {"hidden_act": "relu"}),
    "roberta": ("RobertaForMaskedLM", BERT | {"type_vocab_size": 1, "pad_token_id": 1}),
    "roberta, bare": ("RobertaModel", BERT | {"pad_token_id": 3, "layer_norm_eps": 1e-5}),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": 60, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 40},
    ),
    "marian": ("MarianMTModel", MARIAN | {"scale_embedding": True, "activation_function": "swish"}),
    "marian, apart": (
        "MarianMTModel",
        MARIAN | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 50, "pad_token_id": 49},
    ),
    "pegasus": ("PegasusForConditionalGeneration", MARIAN | {"activation_function": "relu", "scale_embedding": True}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama, other": (
        "LlamaForCausalLM",
        LLAMA
        | {"head_dim": 6, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 1e-3},
    ),
    "llama, stretched": (
        "LlamaForCausalLM",
        LLAMA
        | {"head_dim": 16}
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 5, "head_dim": 4}),
    "qwen2": (
        "Qwen2ForCausalLM",
        LLAMA
        | {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    ),
}


def published(name: str):
    """A model of theirs in which every number counts: norms and biases too are drawn."""
    kind, settings = PUBLISHED[name]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings)).eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if "embed_positions" not in part:
                parameter.copy_(torch.randn(parameter.shape) * 0.3 + (1 if parameter.dim() == 1 else 0))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape))
    return model


def ours(model: huggingface.Model) -> torch.nn.Module:
    built = models.build(model.config)
    built.load_state_dict(model.tensors)
    return built.eval()


# padding on the right, none, and on the left: there positions are said, as Hugging Face counts padding too
KEEP = torch.tensor([[1] * 5 + [0] * 4, [1] * 9, [0] * 3 + [1] * 6]).bool()
POSITIONS = (KEEP.cumsum(1) - 1).clamp(min=0)


def ids(model, T: int = 9, seed: int = 1, most: int | None = None) -> torch.Tensor:
    """None of them is padding, of which RoBERTa reads its positions."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, most or 59, (3, T), generator=generator)


def theirs(model, tokens, target=None, keep=KEEP, target_keep=None, segments=None) -> torch.Tensor:
    """Logits, or vectors where there is no head; zeros at padding."""
    padded = model.config.pad_token_id or 0
    inputs = {"input_ids": torch.where(keep, tokens, padded), "attention_mask": keep.long()}
    name = model.config.model_type
    if name in ("marian", "pegasus"):
        inputs |= {"decoder_input_ids": target, "decoder_attention_mask": target_keep.long()}
    elif name not in ("roberta", "distilbert"):
        inputs["position_ids"] = POSITIONS
    if segments is not None:
        inputs["token_type_ids"] = segments
    found = model(**inputs)
    answer = found.prediction_logits if "prediction_logits" in found else found.get("logits", found[0])
    return torch.where((target_keep if target is not None else keep)[..., None], answer, 0)


TARGET_KEEP = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 6 + [0]]).bool()


def compare(model, own: torch.nn.Module) -> None:
    """With padding on both sides, segments, a pooler, and (decoders) step by step."""
    kind, tokens = own.config.kind, ids(model)
    keep = KEEP
    if model.config.model_type in ("distilbert", "marian", "pegasus"):
        # they count padding and cannot be told otherwise
        keep = torch.cat([KEEP[:2], KEEP[:1]])
    if kind == "encoder-decoder":
        target = ids(model, 7, 2, most=50)
        wanted = theirs(model, tokens, target, keep=keep, target_keep=TARGET_KEEP)
        assert_close(own(tokens, target, keep=keep, target_keep=TARGET_KEEP).logits, wanted, **CLOSE)
        state = own.start(3, memory=own.encode(tokens, keep=keep))
        steps = []
        for first, last in ((0, 3), (3, 4), (4, 7)):
            logits, state = own.extend(target[:, first:last], state, keep=TARGET_KEEP[:, first:last])
            steps.append(logits)
        assert_close(torch.cat(steps, 1), wanted, **CLOSE)
        return
    if kind == "decoder":
        wanted = theirs(model, tokens)
        assert_close(own(tokens, keep=keep).logits, wanted, **CLOSE)
        state, steps = own.start(3), []
        for first, last in ((0, 4), (4, 5), (5, 9)):
            logits, state = own.extend(tokens[:, first:last], state, keep=keep[:, first:last])
            steps.append(logits)
        assert_close(torch.cat(steps, 1), wanted, **CLOSE)
        return
    for segments in [None] if own.config.segments < 2 else [None, ids(model, seed=4) % own.config.segments]:
        wanted = theirs(model, tokens, keep=keep, segments=segments)
        if own.config.head == "none":
            found = own.encode(tokens, keep=keep, segments=segments).x
            for row in range(3):
                assert_close(found[row, : keep[row].sum()], wanted[row, keep[row]], **CLOSE)
        else:
            assert_close(own(tokens, keep=keep, segments=segments).logits, wanted, **CLOSE)
    body = getattr(model, model.base_model_prefix, model)
    if getattr(body, "pooler", None) is not None:
        right = KEEP[:2].long()
        inputs = {"input_ids": torch.where(KEEP[:2], tokens[:2], model.config.pad_token_id), "attention_mask": right}
        assert_close(own.pooled(tokens[:2], keep=KEEP[:2]), body(**inputs).pooler_output, **CLOSE)
