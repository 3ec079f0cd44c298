"""Compiles the scan kernels for a Hopper GPU that need not be there, and fails where one asks for more shared memory
than it has; run by test_scan_triton.py, for there they are interpreted. With "all": as many kinds as there are."""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

from regard.kernels import (
    random_features_triton_kernels,
    scan_triton_backward,
    scan_triton_forward,
    scan_triton_sums,
    scan_triton_tiles,
    sums_triton,
)
from regard.kernels import scan_triton_cut as cuts

HOPPER, SHARED = GPUTarget("cuda", 90, 32), 227 * 1024
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
STATES = ("S", "z", "S_before", "z_before", "S_after", "z_after", "S_start", "z_start", "dS", "dz")
STATES += ("S_begin", "z_begin", "S_end", "z_end")
WIDE = (*STATES, "tops", "parts", "parts_den", "decay", "den", "e", "shrink", "of_q", "of_k")


def compiled(kernel: JITFunction, dtype: torch.dtype, fixed: dict, tuning: cuts.Tuning) -> None:
    given = dict.fromkeys("qkvgoxy", NAMES[dtype]) | dict.fromkeys(("dq", "dk", "dv"), NAMES[dtype])
    given |= dict.fromkeys(WIDE, "*fp32") | {"first": "*i32", "lengths": "*i32", "safe": "*i32", "floor": "fp32"}
    given |= {
        "W": "*fp32",
        "gate": NAMES[dtype],
        "dW": "*fp32",
        "d_gate": "*fp32",
        "share": "fp32",
        "top": "*fp32",
        "out": NAMES[dtype],
        "feature": NAMES[dtype],
        "grad": NAMES[dtype],
    }
    given |= {
        "dx": NAMES[dtype],
        "scale": "fp32",
        "logits": NAMES[dtype],
        "rest": NAMES[dtype],
        "last": "i32",
        "count": "i32",
    }
    given |= {f"{tensor}_{axis}": "i32" for tensor in (*"qkvgxyd", "gate") for axis in "bht"}
    given |= dict.fromkeys(("T", "batch", "segments", "span"), "i32")
    options, fixed = tuning.launch(), {name: value for name, value in fixed.items() if name in kernel.arg_names}
    fixed |= {"C": options.pop("C")} if "C" in kernel.arg_names else {}
    types = {name: "constexpr" if name in fixed else given[name] for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    done = compile(ASTSource(kernel, signature=types, constexprs=values), target=HOPPER, options=options)
    assert done.asm["cubin"]
    assert done.metadata.shared <= SHARED, f"{kernel}: {done.metadata.shared} bytes of shared memory, for {fixed}"


def family(
    dtype: torch.dtype, K: int, V: int, *, decay: int = 0, norm: int = 1, packed: bool = False, learns: bool = False
) -> None:
    block_k, block_v = cuts.blocks(K, V, dtype)
    fixed = {"H": 4, "GROUP": 2, "K": K, "V": V, "BK": block_k, "BV": block_v, "MAP": 1, "NORM": norm, "DECAY": decay}
    fixed |= {
        "RESET": packed,
        "RAGGED": packed,
        "EVEN": not packed,
        "STATE": True,
        "FINAL": True,
        **cuts.precision(dtype),
    }
    fixed |= {"ENDS": True, "LINKED": True, "GIVEN": False, "LEARNS": learns, "REVERSE": False}
    fixed |= {} if packed else {"first": None, "lengths": None}
    fixed |= {} if decay in (1, 2) else {"decay": None}
    fixed |= {} if decay > 2 else {"tops": None, "safe": None, "logits": None}
    exact = learns and dtype != torch.float32
    back = fixed | ({"NARROW": False, "PRECISION": cuts.EXACT} if exact else {})
    narrow = torch.float16 if exact else dtype

    def tuned(kernel: str, dtype: torch.dtype) -> cuts.Tuning:
        return cuts.tuned(kernel, K, V, dtype, decay)

    compiled(scan_triton_forward.scan_forward, dtype, fixed, tuned("forward", dtype))
    compiled(scan_triton_forward.scan_sums, dtype, fixed | {"den": None, "e": None}, tuned("sums", dtype))
    compiled(scan_triton_forward.scan_sums, dtype, back | {"REVERSE": True, "shrink": None}, tuned("sums", narrow))
    by_identity = decay == 0 and dtype == torch.bfloat16 and not cuts.is_wide(K, V, dtype)
    compiled(scan_triton_backward.scan_queries, dtype, back | {"BY_IDENTITY": by_identity}, tuned("queries", narrow))
    compiled(scan_triton_backward.scan_keys, dtype, back, tuned("keys", narrow))
    if not decay:
        for kernel in (scan_triton_sums.absorb_keys, scan_triton_sums.read_rows, scan_triton_sums.read_queries):
            block_k, block_v, tuning = sums_triton._tiles(K, V, dtype)
            compiled(kernel, dtype, fixed | {"BK": block_k, "BV": block_v, "BLOCKS": 8}, tuning)


if sys.argv[1:] == ["all"]:
    link = {"K": 64, "V": 64, "WIDE": 64, "BLOCK": 256, "REVERSE": True, "STATE": True, "FINAL": True}
    compiled(scan_triton_forward.link_segments, torch.float32, link, cuts.Tuning(16, 2, 1))
    for dtype in NAMES:
        for K, V in ((16, 16), (64, 64), (128, 128), (256, 64), (256, 256)):
            family(dtype, K, V)
            family(dtype, K, V, decay=1, packed=True, learns=True)
        family(dtype, 64, 64, decay=2, learns=True)
        family(dtype, 128, 128, decay=2, norm=3, packed=True)
        family(dtype, 64, 64, decay=3, norm=3)
        family(dtype, 128, 128, decay=4, norm=3)
    sums = {"H": 4, "V": 64, "BV": 64, "NORM": 1, "PARTS": 2, "ROWS": 32}
    compiled(scan_triton_sums.add_parts, torch.bfloat16, sums, cuts.Tuning(16, 4, 1))
    compiled(scan_triton_sums.row_gradients, torch.bfloat16, sums, cuts.Tuning(16, 4, 1))
    tops = {"H": 4, "K": 64, "BK": 64, "RAGGED": True, "GROUPS": 8}
    compiled(scan_triton_tiles.group_maxima, torch.bfloat16, tops, cuts.Tuning(16, 4, 1))
    rows = {"H": 4, "D": 64, "BD": 64, "R": 256, "NARROW": True, "SPLIT": True, "BLOCKS": 8}
    for more in ({"OWN": False}, {"OWN": True, "out": None}):
        compiled(
            random_features_triton_kernels.exp_features,
            torch.bfloat16,
            rows | {"BR": 256} | more,
            cuts.Tuning(64, 8, 2),
        )
    compiled(random_features_triton_kernels.exp_gradient, torch.bfloat16, rows | {"BR": 128}, cuts.Tuning(64, 8, 2))
    for dtype, tuning in ((torch.bfloat16, cuts.Tuning(64, 4, 2)), (torch.float32, cuts.Tuning(16, 4, 1))):
        rows |= {"R": 64, "BR": 64, "NARROW": dtype == torch.bfloat16}
        compiled(random_features_triton_kernels.trigonometric_features, dtype, rows, tuning)
        compiled(random_features_triton_kernels.trigonometric_gradient, dtype, rows, tuning)
elif sys.argv[1:] == ["softmax"]:
    family(torch.bfloat16, 64, 64, decay=4, norm=3)
    family(torch.bfloat16, 64, 64, decay=3, norm=3)
else:
    family(torch.bfloat16, 16, 16, decay=1, packed=True)
