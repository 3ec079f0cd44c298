"""Compiles the kernels in Triton for a GPU that need not be there; run by test_experts.py, for here they are not
interpreted. For rows in bfloat16 and small tiles, which compile in a fraction of the time; with the argument `all`, for
both dtypes and the tiles that run."""

import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

from regard.kernels import experts_triton_kernels as kernels

HOPPER = GPUTarget("cuda", 90, 32)


def compiled(kernel: JITFunction, given: dict[str, str], fixed: dict[str, int | bool | None]) -> None:
    names = kernel.arg_names
    types = {name: "constexpr" if name in fixed else given[name] for name in names}
    values = {(names.index(name),): value for name, value in fixed.items()}
    assert compile(ASTSource(kernel, signature=types, constexprs=values), target=HOPPER).asm["cubin"], kernel


ALL = "all" in sys.argv

for dtype in ("*bf16", "*fp32") if ALL else ("*bf16",):
    rows = {"x": "*fp32", "y": dtype, "out": dtype, "at": "*i64", "used": "*u8", "kept": "*u8", "factor": "*fp32"}
    rows |= {"rows": "i32", "weights": dtype, "ends": "*i32", "starts": "*i64", "size": "i64"}
    wide = {"WIDTH": 2500, "BLOCK": 2048}
    compiled(kernels.take_kernel, rows, wide | {"MASKED": True, "WEIGHTED": True})
    compiled(kernels.take_kernel, rows, wide | {"MASKED": False, "WEIGHTED": False, "used": None, "factor": None})
    compiled(kernels.add_kernel, rows, wide | {"COPIES": 2, "MASKED": True, "WEIGHTED": True, "starts": None})
    compiled(kernels.add_kernel, rows, wide | {"COPIES": 0, "MASKED": False, "WEIGHTED": True, "kept": None})
    compiled(kernels.products_kernel, rows, wide | {"MASKED": True})
    compiled(kernels.clear_empty_kernel, rows, {"SIZE": 1 << 20, "BLOCK": 1024, "PARTS": 64})
    compiled(kernels.copy_kernel, rows, {"BLOCK": 4096})
    router = {"x": dtype, "weight": "*fp32", "seed": "*i64", "out": "*fp32", "copy": "*bf16", "base": dtype}
    router |= {"rows": "i32", "jitter": "fp32"}
    sizes = {"WIDTH": 1024, "OUTPUTS": 100, "ROWS": 128 if ALL else 32, "COLUMNS": 128 if ALL else 32}
    compiled(kernels.logits_kernel, router, sizes | {"DEEP": 32, "NOISY": True})
    compiled(kernels.logits_kernel, router, sizes | {"DEEP": 32, "NOISY": False, "seed": None})
    back = router | {"grad": "*bf16", "weight": "*bf16", "out": dtype}
    compiled(kernels.of_tokens_kernel, back, sizes | {"DEEP": 64, "NOISY": True})
noisy = dict.fromkeys(("logits", "noise", "top", "of_top", "of_chosen", "parts", "out"), "*fp32")
noisy |= {"real": "*u8", "expert": "*i64", "rows": "i32", "floor": "fp32"}
for more in ({"MASKED": True}, {"MASKED": False, "real": None}):
    sizes = (
        {"EXPERTS": 100, "BLOCK": 128, "ROWS": 32, "K": 3} if ALL else {"EXPERTS": 10, "BLOCK": 16, "ROWS": 4, "K": 2}
    )
    sizes |= more
    compiled(kernels.noisy_top_kernel, noisy, sizes)
    compiled(kernels.of_noisy_logits_kernel, noisy, sizes)
