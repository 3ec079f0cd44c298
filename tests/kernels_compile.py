"""Compiles the kernels in Triton for a GPU that need not be there; run by test_experts.py, for here they are not
interpreted."""

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

from regard.kernels import moves_triton as moves

HOPPER = GPUTarget("cuda", 90, 32)


def compiled(kernel: JITFunction, given: dict[str, str], fixed: dict[str, int | bool | None]) -> None:
    names = kernel.arg_names
    types = {name: "constexpr" if name in fixed else given[name] for name in names}
    values = {(names.index(name),): value for name, value in fixed.items()}
    assert compile(ASTSource(kernel, signature=types, constexprs=values), target=HOPPER).asm["cubin"], kernel


for dtype in ("*bf16", "*fp32"):
    rows = {"x": "*fp32", "y": dtype, "out": dtype, "at": "*i64", "used": "*u8", "kept": "*u8", "factor": "*fp32"}
    rows |= {"rows": "i32", "weights": dtype, "ends": "*i32"}
    wide = {"WIDTH": 2500, "BLOCK": 2048}
    compiled(moves._taken, rows, wide | {"MASKED": True, "WEIGHTED": True})
    compiled(moves._taken, rows, wide | {"MASKED": False, "WEIGHTED": False, "used": None, "factor": None})
    compiled(moves._added, rows, wide | {"COPIES": 2, "MASKED": True, "WEIGHTED": True})
    compiled(moves._products, rows, wide | {"MASKED": True})
    compiled(moves._clear_empty, rows, {"SIZE": 1 << 20, "BLOCK": 1024, "PARTS": 64})
