"""Compiles kernels for a GPU that need not be there: of a step of decoding, of sorted chunks, of norms. Run by
test_captured.py and test_chunks.py, for here they are not interpreted. Arguments: `ring`, `chunks`, or both; `all` for
more sizes of each."""

import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

from regard.kernels import chunks_triton_kernels, norm_triton_kernels, ring_triton, ring_triton_kernels

HOPPER = GPUTarget("cuda", 90, 32)
ALL = "all" in sys.argv
BF16 = ("q", "k", "v", "keys", "values", "o", "each", "grad", "dk", "dv", "high", "low", "x", "y")
POINTERS = dict.fromkeys(BF16, "*bf16") | dict.fromkeys(("sums", "lse", "total", "delta"), "*fp32")
POINTERS |= {"seen": "*i64", "ends": "*i64", "order": "*i32", "scale": "fp32", "log2e": "fp32"}


def compiled(kernel: JITFunction, fixed: dict[str, int | bool | None], **types: str) -> None:
    names = kernel.arg_names
    given = POINTERS | types
    kinds = {name: "constexpr" if name in fixed else given.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in fixed.items()}
    assert compile(ASTSource(kernel, signature=kinds, constexprs=values), target=HOPPER).asm["cubin"], kernel


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


for name, work in (("ring", ring), ("chunks", chunks)):
    if name in sys.argv:
        work()
