"""Compiles kernels for a GPU that need not be there: of a step of decoding, of sorted chunks and norms, of what
centroids pick, of additive logits, of pairs of random features; with `all` also of the loss, of entmax, and of
summaries. Run by test_captured.py, test_chunks.py, test_additive.py and test_pairs.py, for here they are not
interpreted. Arguments: `ring`, `chunks`, `picks`, `additive`, `pairs`; `all` for more sizes of each."""

import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

from regard.kernels import (
    additive_triton,
    chunks_triton_kernels,
    cross_entropy_triton,
    entmax_triton_kernels,
    norm_triton_kernels,
    pairs_triton,
    picks_triton_kernels,
    ring_triton,
    ring_triton_kernels,
    summaries_triton,
)

HOPPER = GPUTarget("cuda", 90, 32)
ALL = "all" in sys.argv
BF16 = ("q", "k", "v", "keys", "values", "o", "each", "grad", "dk", "dv", "high", "low", "x", "y")
POINTERS = dict.fromkeys(BF16, "*bf16") | dict.fromkeys(("sums", "lse", "total", "delta"), "*fp32")
POINTERS |= {"seen": "*i64", "ends": "*i64", "order": "*i32", "scale": "fp32", "log2e": "fp32"}


def compiled(kernel: JITFunction, fixed: dict[str, int | bool | str | None], **types: str) -> str:
    """The kernel as Triton's own passes leave it (TTIR), once it is machine code as well."""
    names = kernel.arg_names
    given = POINTERS | types
    kinds = {name: "constexpr" if name in fixed else given.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in fixed.items()}
    made = compile(ASTSource(kernel, signature=kinds, constexprs=values), target=HOPPER)
    assert made.asm["cubin"], kernel
    return made.asm["ttir"]


def ring() -> None:
    common = {"H": 12, "D": 64, "BLOCK_D": 64}
    for splits in (1, 16) if ALL else (16,):
        for group, rows in ((1, 1), (4, 16))[: 2 if ALL else 1]:
            more = {"SPLITS": splits, "G": 12 // group, "GROUP": group, "ROWS": rows, "BLOCK": ring_triton.BLOCK}
            compiled(ring_triton_kernels.read_kernel, common | more | ({"sums": None} if splits == 1 else {}))
    compiled(ring_triton_kernels.merge_kernel, common | {"SPLITS": 16, "SPLIT_BLOCK": 16})


def chunks() -> None:
    for causal in (True, False) if ALL else (True,):
        sizes = {"D": 64, "BLOCK_D": 64, "R": 2}
        masked = {} if causal else {"ends": None}
        chunk = sizes | masked | {"M": 64, "BLOCK_M": 64, "CAUSAL": causal}
        compiled(chunks_triton_kernels.forward_kernel, chunk)
        compiled(chunks_triton_kernels.backward_kernel, chunk)
        tokens = {"D": 64, "BLOCK_D": 64, "TOKENS": 64}
        compiled(chunks_triton_kernels.merge_kernel, tokens | {"R": 2})
        compiled(chunks_triton_kernels.delta_kernel, tokens)
        compiled(chunks_triton_kernels.buckets_kernel, tokens | {"R": 2, "COLUMNS": 32}, out="*i32")
    rows = {"D": 64, "BLOCK": 64, "ROWS": 64}
    compiled(norm_triton_kernels.forward_kernel, rows, scale="*fp32", epsilon="fp32")
    compiled(norm_triton_kernels.backward_kernel, rows, scale="*fp32", out="*bf16")


def picks() -> None:
    numbers = {"x": "*fp32", "out": "*i64", "counts": "*i64"}
    sizes = ((16384, 128), (65536, 512)) if ALL else ((1024, 16),)
    for block, count in sizes:
        compiled(picks_triton_kernels.largest_kernel, {"RAGGED": True, "BLOCK": block, "COUNT": count}, **numbers)
    pointers = {"codes": "*bf16", "centroids": "*bf16", "lengths": "*i64", "group": "*i64"}
    pointers |= {"votes": "*fp32", "members": "*fp32", "at": "*i64", "total": "*fp32"}
    fixed = {
        "RAGGED": True,
        "LAST": False,
        "PRECISION": "tf32",
        "CLUSTERS": 64,
        "BITS": 32,
        "TOKENS": 128,
        "ROUNDS": 16,
    }
    compiled(picks_triton_kernels.assign_kernel, fixed, **pointers)
    tile = {"WIDTH": 64, "ROWS": 64}
    compiled(picks_triton_kernels.take_kernel, tile, **pointers)
    compiled(picks_triton_kernels.add_kernel, tile, **pointers)


def others() -> None:
    if not ALL:
        return
    wide = ("missed", "spread", "betas", "ts", "totals", "means", "of_beta", "w", "out", "dw")
    types = dict.fromkeys(wide, "*fp32") | {"target": "*i64", "firsts": "*i32", "counts": "*i32", "smoothing": "fp32"}
    types |= dict.fromkeys(("logits", "p", "dp", "dq", "of_k", "of_v", "sums_k", "sums_v"), "*bf16")
    types |= {f"{name}_{axis}": "i32" for name in (*"qkvpgsdo", "dq", "dk", "dv", "dp", "gk", "gv") for axis in "bht"}
    loss = {"IGNORED": -100, "TRAINS": True, "BLOCK": 8192}
    compiled(cross_entropy_triton.rows_kernel, loss, **types)
    compiled(cross_entropy_triton.rows_kernel, loss | {"spread": None}, **types)
    tile = {"D": 64, "BLOCK_D": 64, "E": 64, "BLOCK_E": 64, "CAUSAL": True, "ROWS": 64, "KEYS": 64}
    compiled(entmax_triton_kernels.forward_kernel, tile | {"STEPS": 24}, **types)
    compiled(entmax_triton_kernels.queries_kernel, tile, **types)
    compiled(entmax_triton_kernels.keys_kernel, tile | {"KEYS": 32}, **types)
    chunk = {"D": 64, "R": 8, "C": 64, "BLOCK_D": 64, "BLOCK_R": 16, "BLOCK_C": 64}
    compiled(summaries_triton.forward_kernel, chunk, **types)
    compiled(summaries_triton.backward_kernel, chunk, **types)


def additive() -> None:
    """None of its sums over products is one of matrices, whose float32 is TF32."""
    kernels = (additive_triton.forward_kernel, additive_triton.queries_kernel, additive_triton.keys_kernel)
    types = {name: "*i64" for name in ("firsts", "limits")} | {"deltas": "*fp32"}
    types |= {name: "*fp32" for name in ("q", "k", "v", "w", "offset", "o", "grad", "dq", "dk", "dv", "parts")}
    for size in (32, 128, 16) if ALL else (32,):
        pairs = {
            "D": size,
            "BLOCK_D": size,
            "E": size,
            "BLOCK_E": size,
            "LANES": 32,
            "STEP": 64 // size if size <= 32 else 1,
        }
        for kernel in kernels if ALL else kernels[:1]:
            assert "tt.dot" not in compiled(kernel, pairs | {"CAUSAL": True}, **types), kernel


def pairs() -> None:
    types = {"W": "*fp32", "real": "*i1", "tops_q": "*fp32", "tops_k": "*fp32", "norms": "*fp32"}
    for narrow in (True, False) if ALL else (True,):
        rows = dict.fromkeys(("q", "k", "v", "o", "grad", "dq", "dk", "dv"), "*bf16" if narrow else "*fp32")
        for size in (16, 32) if ALL else (32,):
            tile = {"H": 4, "D": size, "BD": size, "E": size, "BE": size, "R": 256, "BT": size, "BS": size}
            kinds = {"BR": 32 if narrow else 16, "CAUSAL": True, "RAGGED": True, "NARROW": narrow, "SPLIT": True}
            for kernel in (pairs_triton.forward_kernel, pairs_triton.backward_kernel)[: 2 if ALL else 1]:
                compiled(kernel, tile | kinds, **types, **rows)


for name, work in (
    ("ring", ring),
    ("chunks", chunks),
    ("picks", picks),
    ("picks", others),
    ("additive", additive),
    ("pairs", pairs),
):
    if name in sys.argv:
        work()
