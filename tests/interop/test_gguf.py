"""GGUF files as runs: small ones that are written here, and a real one where REGARD_GGUF names it. transformers reads
the same files."""

import json
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Stored
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers import models as vocabularies
from torch.testing import assert_close
from verbs import refused

from regard import cli
from regard.interop import gguf as ours
from regard.interop.runs import import_model
from regard.tasks.language import LanguageModel

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

TEXTS = [
    "Where is the station? It's 12,000 steps from here, since 1984.",
    "  two spaces,\ttabs\n\nand\r\nline ends ",
    "naïve café 你好 🙂 don't I'LL x1y22",
    "a" * 50 + "<think> b",
]
E, H, G, INNER, LAYERS, LENGTH = 64, 4, 2, 96, 2, 128
KEY = struct.pack("<Q", 1) + b"k"  # of a setting, in a file
REAL = os.environ.get("REGARD_GGUF")


def byte_pairs(single_digits: bool) -> tuple[list[str], list[str]]:
    """Tokens and merges of a small tokenizer of GPT-2's kind, whose first two tokens are special."""
    made = Tokenizer(vocabularies.BPE())
    digits = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|begin|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS[:3], trainer)
    ids = made.get_vocab()
    merges = json.loads(made.to_str())["model"]["merges"]
    return sorted(ids, key=ids.__getitem__), [" ".join(pair) for pair in merges]


def add_tokenizer(writer: gguf.GGUFWriter, kind: str, pre: str, single_digits: bool, merged: bool) -> int:
    if kind == "gpt2":
        tokens, merges = byte_pairs(single_digits)
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges if merged else merges[:1])
        tokens.append("<think>")
        types = [3, 3] + [1] * (len(tokens) - 3) + [4]
    else:
        letters = sorted(set("".join(TEXTS[:2])) - set(" \n\r\t"))
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, "▁s", "st", "▁st"]
        types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
        writer.add_token_scores([0.0] * 259 + [-float(n) for n in range(len(tokens) - 259, 0, -1)])
        writer.add_unk_token_id(0)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0 if kind == "gpt2" else 2)
    return len(tokens)


def write_file(
    path: Path,
    architecture: str = "llama",
    stored: Stored = Stored.F32,
    *,
    tokenizer: str = "gpt2",
    pre: str = "smollm",
    single_digits: bool = True,
    merged: bool = True,
    tied: bool = True,
    extra: dict[str, np.ndarray] | None = None,
    settings: dict[str, object] | None = None,
    endian: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """A model of random numbers, its matrices stored in some type. `settings` are added, or not written if None."""
    writer = gguf.GGUFWriter(path, architecture, endianess=endian)
    size = add_tokenizer(writer, tokenizer, pre, single_digits, merged)
    sizes = {
        "context_length": LENGTH,
        "embedding_length": E,
        "feed_forward_length": INNER,
        "block_count": LAYERS,
        "attention.head_count": H,
        "attention.head_count_kv": G,
        "rope.dimension_count": E // H,
        "vocab_size": size,
        "rope.freq_base": 5000.0,
        "attention.layer_norm_rms_epsilon": 1e-3,
    }
    given = {f"{architecture}.{name}": value for name, value in sizes.items()} | (settings or {})
    for name, value in given.items():
        kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
        if value is not None:
            getattr(writer, f"add_{kinds[type(value)]}")(name, value)
    draw = np.random.default_rng(0)
    D = E // H
    shapes = {"token_embd.weight": (size, E), "output_norm.weight": (E,)}
    shapes |= {} if tied else {"output.weight": (size, E)}
    for n in range(LAYERS):
        shapes |= {f"blk.{n}.{name}.weight": (E,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{n}.attn_{name}.weight": (rows, E) for name, rows in {"q": E, "k": G * D, "v": G * D}.items()}
        shapes |= {f"blk.{n}.ffn_{name}.weight": (INNER, E) for name in ("gate", "up")}
        shapes |= {f"blk.{n}.attn_output.weight": (E, E), f"blk.{n}.ffn_down.weight": (E, INNER)}
        if architecture == "qwen2":
            shapes |= {f"blk.{n}.attn_{name}.bias": (rows,) for name, rows in {"q": E, "k": G * D, "v": G * D}.items()}
    tensors = {name: draw.normal(size=shape).astype(np.float32) * 0.3 for name, shape in shapes.items()} | (extra or {})
    for name, tensor in tensors.items():
        kind = stored if tensor.ndim == 2 else Stored.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def check_against_transformers(path: Path, run: Path, texts: list[str], atol: float) -> LanguageModel:
    """Logits and tokens are those of transformers for the same file."""
    import_model(path, run)
    language = LanguageModel.load(run, device="cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert language.tokenizer.encode(text) == ids
        inputs = torch.tensor([ids])
        with torch.no_grad():
            assert_close(language.model(inputs).logits, theirs.eval()(inputs).logits, rtol=0, atol=atol)
    return language


@pytest.mark.parametrize(
    ("architecture", "stored", "pre", "tied"),
    [
        ("llama", Stored.Q8_0, "smollm", True),
        ("qwen2", Stored.Q4_0, "qwen2", False),
        ("llama", Stored.F16, "llama-bpe", True),
    ],
)
def test_models_are_those_that_transformers_reads(architecture, stored, pre, tied, tmp_path):
    path = write_file(tmp_path / "model.gguf", architecture, stored, pre=pre, tied=tied)
    language = check_against_transformers(path, tmp_path / "run", TEXTS, 1e-4)
    assert (language.length, language.model.config.kv_heads, language.model.config.tied) == (LENGTH, G, tied)
    # a text of Llama 3 begins with a special token, one of the others does not
    assert language.start == (1 if pre == "llama-bpe" else None)
    for text in TEXTS:
        assert language.tokenizer.decode(language.tokenizer.encode(text)) == text
    assert not {0, 1} & set(language.tokenizer.encode("<|end|> <|begin|>"))


def test_sentencepiece_tokens(tmp_path, capsys):
    """A SentencePiece tokenizer in the file; the run goes out to a folder of Hugging Face with the same logits."""
    path = write_file(tmp_path / "model.gguf", tokenizer="llama")
    language = check_against_transformers(path, tmp_path / "run", ["the station is 12 steps away", "st 你"], 1e-4)
    assert language.start == 1
    assert language.tokenizer.names(language.tokenizer.encode("the  st")) == ["▁", "t", "h", "e", "▁", "▁st"]
    bare = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.remove_extra_whitespaces": True}
    _, other = ours.read(write_file(tmp_path / "bare.gguf", tokenizer="llama", settings=bare))
    assert other.names(other.encode("the  st")) == ["t", "h", "e", "▁st"]
    assert cli.main(["export", str(tmp_path / "run"), "--format", "huggingface", "--out", str(tmp_path / "out")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([language.encode("the station")])
    with torch.no_grad():
        assert_close(theirs(ids).logits, language.model(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("pre", "others", "text", "tokens"),
    [
        # each digit is a token of its own, even if merges would join them
        ("smollm", {"single_digits": False}, "since 1984", ["1", "9", "8", "4"]),
        ("qwen2", {"single_digits": False}, "since 1984", ["1", "9", "8", "4"]),
        ("gpt-2", {"single_digits": False}, "since 1984", ["Ġ1", "984"]),
        # a word that is a token is one, even if no merges lead to it
        ("llama-bpe", {"merged": False}, " the", ["Ġthe"]),
        ("gpt-2", {"merged": False}, " the", ["h", "e"]),
    ],
)
def test_words(pre, others, text, tokens, tmp_path):
    _, found = ours.read(write_file(tmp_path / "model.gguf", pre=pre, **others))
    assert found.names(found.encode(text))[-len(tokens) :] == tokens


def test_the_token_before_a_text(tmp_path):
    """As the file says, whatever is usual."""
    for pre, begins in (("llama-bpe", False), ("smollm", True)):
        said = {"tokenizer.ggml.add_bos_token": begins}
        import_model(write_file(tmp_path / f"{pre}.gguf", pre=pre, settings=said), tmp_path / pre)
        assert LanguageModel.load(tmp_path / pre, device="cpu").start == (1 if begins else None)


def llama3_factors(factor: float) -> np.ndarray:
    """What llama.cpp writes for Llama 3.1, by its own loop."""
    found = []
    for i in range(0, E // H, 2):
        wave = 2 * np.pi * 5000.0 ** (i / (E // H))
        smooth = (8192 / wave - 1) / (4 - 1)
        between = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if wave < 8192 / 4 else factor if wave > 8192 else between)
    return np.array(found, dtype=np.float32)


def test_rotary_positions_of_llama3(tmp_path):
    """The file holds factors; they become the settings that give them, or are refused."""
    factors = llama3_factors(8.0)
    assert len(set(factors)) > 2
    model, _ = ours.read(write_file(tmp_path / "a.gguf", extra={"rope_freqs.weight": factors}))
    assert "stretch=(8.0, 1.0, 4.0, 8192.0)" in model.config.position
    factors[-2] *= 1.1
    with pytest.raises(ValueError, match="other factors"):
        ours.read(write_file(tmp_path / "b.gguf", extra={"rope_freqs.weight": factors}))


REFUSED = {
    "architecture": ({"architecture": "gemma3"}, "architecture 'gemma3', which is not known here: llama, qwen2"),
    "big-endian": ({"endian": gguf.GGUFEndian.BIG}, "big-endian"),
    "split": ({"settings": {"split.count": 3}}, "one of 3 files"),
    "experts": ({"settings": {"llama.expert_count": 8}}, "llama.expert_count = 8"),
    "unknown setting": ({"settings": {"llama.attention.scale": 2.0}}, "llama.attention.scale = 2.0"),
    "scaled positions": ({"settings": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type = 'yarn'"),
    "partial rotary": ({"settings": {"llama.rope.dimension_count": 8}}, "a head has 16 channels"),
    "no epsilon": ({"settings": {"llama.attention.layer_norm_rms_epsilon": None}}, "does not give llama.attention"),
    "heads by layer": ({"settings": {"llama.attention.head_count": [4, 4]}}, "expected a number from 0"),
    "no heads": ({"settings": {"llama.attention.head_count": 0, "llama.rope.dimension_count": None}}, "heads"),
    "other width": ({"settings": {"llama.feed_forward_length": 100}}, "gives [96, 64]"),
    "more layers": ({"settings": {"llama.block_count": 3}}, "lacks the tensor"),
    "huge": ({"settings": {"llama.block_count": 2**31}}, "must be at most"),
    "strange tensor": ({"extra": {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}}, "'blk.0.attn_q_norm.weight'"),
    "infinite": ({"extra": {"output_norm.weight": np.full(E, np.inf, np.float32)}}, "NaN or infinite"),
    "tokenizer": ({"tokenizer": "bert"}, "a tokenizer of kind 'bert', which is not known here: gpt2, llama"),
    "words": ({"pre": "default"}, "by 'default', which is not known here; known: gpt-2"),
    "token id": ({"settings": {"tokenizer.ggml.padding_token_id": 9999}}, "the padding token has the id 9999"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused(case, tmp_path, capsys):
    given, words = REFUSED[case]
    path = write_file(tmp_path / "model.gguf", **given)
    assert words in refused(capsys, "import", str(path), "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_damaged_files(tmp_path):
    """Cut anywhere, or with any byte of its metadata changed: a file is read, or refused in words."""
    path = write_file(tmp_path / "model.gguf")
    whole, bad = path.read_bytes(), tmp_path / "bad.gguf"
    header = next(iter(gguf.GGUFReader(path).tensors)).data_offset
    draw = np.random.default_rng(1)
    for cut in [0, 3, 4, 7, 8, 23, 24, *draw.integers(24, len(whole) - 1, 40).tolist(), len(whole) - 1]:
        bad.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"bad\.gguf"):
            ours.read(bad)
    read, messages = 0, []
    for at in draw.integers(4, header, 120).tolist():
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << draw.integers(8))]) + whole[at + 1 :])
        try:
            read += bool(ours.read(bad))
        except ValueError as error:
            messages.append(str(error))
    assert read
    assert len(messages) > 20


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (KEY + struct.pack("<IIQ", 9, 0, 2**60), "it needs"),  # a list of 2^60 bytes
        (KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 3000 + bytes(64), "recursion depth"),
        (KEY + struct.pack("<IIQ", 9, 0, 2**14) + bytes(2**14 + 64), "more than 9,000 parts"),
        (struct.pack("<Q", 2**62), "it needs"),  # a name without an end
    ],
    ids=["long list", "nested lists", "many values", "long name"],
)
def test_hostile_metadata(data, words, tmp_path, monkeypatch):
    """Lengths that would fill the memory, and lists in lists."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + data)
    monkeypatch.setattr(ours, "MOST_PARTS", 9000)
    with pytest.raises(ValueError, match=words):
        ours.read(tmp_path / "bad.gguf")


def test_other_words(tmp_path, capsys):
    """Flags of other formats are refused, and a name is not enough. Settings that change nothing are taken."""
    neutral = {"llama.expert_count": 0, "llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 1.0}
    path = write_file(tmp_path / "model.gguf", settings=neutral)
    for flag, value in (("--tokenizer", str(tmp_path)), ("--heads", "3")):
        assert flag in refused(capsys, "import", str(path), "--out", str(tmp_path / "run"), flag, value)
    (tmp_path / "text.gguf").write_text("no model at all")
    assert "it begins with b'no m'" in refused(capsys, "import", str(tmp_path / "text.gguf"))
    assert cli.main(["import", str(path), "--out", str(tmp_path / "run")]) == 0
    assert "stored 20 as F32; here they are float32" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.skipif(not REAL, reason="REGARD_GGUF names no file")
def test_real_file(tmp_path):
    """A published model gives the logits and the tokens that transformers gives for it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.gguf").symlink_to(Path(REAL).resolve())
    check_against_transformers(tmp_path / "model" / "model.gguf", tmp_path / "run", TEXTS, 1e-3)
