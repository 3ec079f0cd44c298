"""Compiles the kernels of parts_triton.py for a GPU that need not be there; run by test_parts_triton.py, for here they
are not interpreted. Without an argument a few of them, with "all" those of every mechanism, dtype and width."""

import re
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from regard.kernels import parts_triton
from regard.kernels.parts_triton_backward import keys_kernel, queries_kernel
from regard.kernels.parts_triton_forward import forward_kernel
from regard.kernels.runs import Bound, Common, Far, Pass

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024  # bytes of shared memory that a program may have
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
KERNELS = {
    "forward": (forward_kernel, {"FLAT": False, "SPLITS": 1}),
    "queries": (queries_kernel, {"FLAT": False, "SPLITS": 1, "FIRST": True}),
    "keys": (keys_kernel, {"FLAT": False, "SPLITS": 1, "EIGHTS": True, "OF_FAR": False, "UNBOUNDED": True}),
    "far": (keys_kernel, {"FLAT": True, "SPLITS": 8, "EIGHTS": True, "OF_FAR": True, "UNBOUNDED": False}),
}
PLACES = {"q0_at", "k0_at", "end_at", "since", "until", "last_at", "stride_at", "lists", "list_starts", "list_rows"}
SUMS = {"lse", "deltas", "slopes", "table", "before", "before_k", "before_v", "sums_k", "sums_v"}
GIVEN = {"q", "k", "v", "far_k", "far_v", "o", "grad_o", "out", "out_k", "out_v", "lse", "deltas"}


PLAIN = Common()


def compiled(
    kind: str, part: Pass, given: set[str], *, dtype=torch.bfloat16, D: int = 64, common: Common = PLAIN
) -> None:
    """One kernel, with these of the optional tensors."""
    kernel, more = KERNELS[kind]
    far, plain = 0 if part.far is None else part.far.length, "related" not in given and not part.listed
    sizes = parts_triton.tile(kind, D, dtype, far, plain, common.distance < 0)
    q = torch.empty(1, 4, 4096, D, dtype=dtype, device="meta")
    constants = parts_triton._constants(q, q[:, :2], q[:, :2], None, part, sizes, common) | more
    types, values, hints = {}, {}, {}
    for n, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name], values[n,] = "constexpr", constants[name]
        elif name in PLACES | SUMS | {"related", "out_related"} and name not in GIVEN | given:
            types[name], values[n,] = "constexpr", None
        elif name in PLACES:
            types[name] = "*i64"
        elif name in SUMS:
            types[name] = "*fp32"
        elif name in GIVEN | {"related", "out_related"}:
            types[name] = TYPES[dtype]
        else:
            types[name] = "fp32" if name in ("scale", "natural") else "i32"
        if types[name].startswith("*") or re.search("_(b|h|t|split)$", name):
            hints[n,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=types, constexprs=values, attrs=hints)
    made = compile(source, target=HOPPER, options=parts_triton._launch(sizes))
    assert made.asm["cubin"], kernel
    assert made.metadata.shared <= SHARED, (kernel, made.metadata.shared)


WINDOW = Pass(Bound(plus=-256), Bound(plus=1))
LONGFORMER = Pass(Bound(plus=-256), Bound(plus=257), Far(16))
BLOCKS = Pass(Bound(0, 64, 64, -64), Bound(0, 64, 64, 128), Far(128, inner=64), block=64, listed=3)
SLOTS = Pass(
    Bound(every=512, times=512, plus=-512), Bound(plus=1), Far(4096, Bound(-512, 512, 128), span=512, apart=384)
)
FIXED = Pass(Bound(0, 128, 128), Bound(plus=1), Far(4096, Bound(0, 128, 8), inner=8))
STRIDED = Pass(high=Bound(plus=1), fold=128)
compiled("forward", LONGFORMER, {"end_at"})
compiled("queries", LONGFORMER, {"end_at"})
compiled("keys", LONGFORMER, {"end_at", "sums_k", "sums_v"})
if sys.argv[1:] == ["all"]:
    for width in (32, 64, 128, 256):
        for dtype in TYPES:
            for kind in ("forward", "queries", "keys"):
                compiled(kind, WINDOW, set(), dtype=dtype, D=width)
    lists = {"end_at", "last_at", "stride_at", "lists", "list_starts", "list_rows"}
    etc, xl = Common(distance=12, globals=256, segment=6), Common(distance=-1)
    for kind in KERNELS:
        compiled(kind, BLOCKS, lists | ({"sums_k", "sums_v"} if kind == "keys" else set()))
        compiled(kind, LONGFORMER, {"slopes", "related", "out_related"}, common=etc)
        compiled(kind, FIXED, set())
        compiled(kind, FIXED, set(), D=128)
    for kind in KERNELS:
        compiled(kind, SLOTS, {"related", "out_related"}, common=xl)
    for kind in ("forward", "queries", "keys"):
        compiled(kind, STRIDED, {"q0_at", "k0_at", "before", "before_k", "before_v"})
        compiled(kind, WINDOW, {"related", "out_related"}, common=xl)
        compiled(kind, WINDOW, {"since", "until", "table"})
