"""Compiles the kernels of a step for a GPU that need not be there; run by test_captured.py, for here they are not
interpreted. For one key/value head a head; with the argument `all`, for grouped heads too."""

import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

from regard.kernels import ring_triton

HOPPER = GPUTarget("cuda", 90, 32)


def compiled(kernel: JITFunction, given: dict[str, str], fixed: dict[str, int | None]) -> None:
    names = kernel.arg_names
    types = {name: "constexpr" if name in fixed else given.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in fixed.items()}
    assert compile(ASTSource(kernel, signature=types, constexprs=values), target=HOPPER).asm["cubin"], kernel


given = dict.fromkeys(("q", "k", "v", "keys", "values", "o"), "*bf16")
given |= {"seen": "*i64", "sums": "*fp32", "scale": "fp32"}
common = {"H": 12, "D": 64, "BLOCK_D": 64}
for splits in (1, 16) if "all" in sys.argv else (16,):
    for group, rows in ((1, 1), (4, 16))[: 2 if "all" in sys.argv else 1]:
        more = {"SPLITS": splits, "G": 12 // group, "GROUP": group, "ROWS": rows, "BLOCK": ring_triton.BLOCK}
        compiled(ring_triton._read, given, common | more | ({"sums": None} if splits == 1 else {}))
compiled(ring_triton._merge, given, common | {"SPLITS": 16, "SPLIT_BLOCK": 16})
