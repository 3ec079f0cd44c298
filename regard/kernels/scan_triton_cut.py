"""How the scans of scan_triton.py are cut into programs, and how those are launched."""

import os
from collections.abc import Sequence
from typing import NamedTuple, overload

import torch
import triton
from torch import Tensor

from regard.kernels.scan_triton_tiles import TOKENS

# Factors of gradients that must not be rounded to bfloat16 are two of them each. With tf32x3 kernels have twice the
# instructions, and 1 to 2 KB of a thread's registers in memory. The interpreter knows only that name for it.
EXACT = "tf32x3" if os.environ.get("TRITON_INTERPRET") == "1" else "bf16x3"
HELD = 16384  # numbers of a state that a program holds; half of it where factors are float32
FEATURES = 64  # of a state that a program holds, twice as many where values are wide
REGISTERS = 65536  # of a multiprocessor; a thread has up to 255 of them
SEGMENTED = 1.5  # the time of a pass over segments, with that for their first states, in times of one without
POISON = False  # tests fill what is about to be written with NaN
SEGMENTS: int | None = None  # tests and tuning fix their number


class Tuning(NamedTuple):
    chunk: int  # tokens
    warps: int
    stages: int
    registers: int | None = None  # at most, of a thread

    @property
    def programs(self) -> int:
        """How many a multiprocessor runs at once, as far as registers allow."""
        return max(1, REGISTERS // (32 * self.warps * (self.registers or 255)))

    def launch(self) -> dict[str, int | None]:
        return {"C": self.chunk, "num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


# for bfloat16 and states of 64 x 64, measured on an H200
TUNED = {
    "forward": Tuning(64, 4, 3),
    "queries": Tuning(64, 4, 2),
    "keys": Tuning(32, 4, 3),
    "sums": Tuning(64, 4, 3),
}
QUERIES_WITH_DECAY = Tuning(64, 4, 3)
# for wider states
WIDE = {
    "forward": Tuning(32, 8, 2),
    "queries": Tuning(32, 8, 3),
    "keys": Tuning(32, 8, 3),
    "sums": Tuning(64, 8, 2),
}


class Cut(NamedTuple):
    """How a call is cut into programs."""

    block_k: int  # features of a program
    block_v: int  # columns of V of a program
    parts_k: int  # programs along K
    parts_v: int  # programs along V
    segments: int
    span: int  # tokens of a segment

    @property
    def parts(self) -> int:
        return self.parts_k * self.parts_v


def tuned(kernel: str, K: int, V: int, dtype: torch.dtype, decay: int = 0) -> Tuning:
    wide = is_wide(K, V, dtype)
    if decay in (2, 3):
        # a decay of each feature weights every product by itself
        return Tuning(TOKENS.value, 8 if blocks(K, V, dtype)[0] > 64 else 4, 1)
    if decay == 4:
        # all kernels of a call take the same units, those of a chunk of 64
        return Tuning(64, 8 if wide or dtype != torch.bfloat16 else 4, 1 if dtype != torch.bfloat16 else 2)
    if dtype != torch.bfloat16:
        # float32 is multiplied by each thread for itself: with 32 tokens and 4 warps the backward kernels have 32
        # registers and 7 to 11 KB of memory for each thread, with these 255 and at most 112 bytes
        return Tuning(16, 8, 1) if wide or dtype == torch.float32 else Tuning(32, 4, 1)
    if wide:
        return WIDE[kernel]
    return QUERIES_WITH_DECAY if kernel == "queries" and decay else TUNED[kernel]


def cut(x: Tensor, V: int, dtype: torch.dtype, decay: int = 0) -> Cut:
    B, H, T, K = x.shape
    block_k, block_v = blocks(K, V, dtype)
    parts_k, parts_v = triton.cdiv(K, block_k), triton.cdiv(V, block_v)
    slots = multiprocessors(x) * tuned("forward", K, V, dtype, decay).programs
    segments = SEGMENTS or segment_count(B * H * parts_k * parts_v, slots)
    step = max(tuned(kernel, K, V, dtype, decay).chunk for kernel in TUNED)
    # a segment of few chunks is not worth its first state
    span = triton.cdiv(triton.cdiv(T, segments), step) * step
    span = span if SEGMENTS else max(span, 4 * step)
    return Cut(block_k, block_v, parts_k, parts_v, triton.cdiv(T, span), span)


def segment_count(programs: int, slots: int) -> int:
    """The number of segments per sequence that takes the shortest time on a GPU that runs `slots` programs at once: a
    round of programs that is nearly empty takes as long as a full one."""

    def time(segments: int) -> float:
        return triton.cdiv(programs * segments, slots) / segments * (1 if segments == 1 else SEGMENTED)

    return min(range(1, max(4, slots // programs) + 1), key=time)


def blocks(K: int, V: int, dtype: torch.dtype) -> tuple[int, int]:
    """Features and values of a program, powers of two."""
    held, features = HELD if dtype == torch.bfloat16 else HELD // 2, FEATURES if V <= 64 else 2 * FEATURES
    block_k = min(power_of_two(K), features)
    return block_k, min(power_of_two(V), held // block_k)


def is_wide(K: int, V: int, dtype: torch.dtype) -> bool:
    """Whether the state of a program is larger than 64 x 64."""
    block_k, block_v = blocks(K, V, dtype)
    return block_k * block_v > 4096


def power_of_two(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def blocks_each(x: Tensor, rows: int, most: int = 8) -> int:
    """How many blocks of rows of x a program takes one after the other; several programs are left for each
    multiprocessor."""
    B, H, T, _ = x.shape
    blocks = B * H * triton.cdiv(T, rows) // (4 * multiprocessors(x))
    return max(1, min(most, 1 << blocks.bit_length() - 1 if blocks else 1))


def even(x: Tensor, y: Tensor, lengths: Tensor | None, p: Cut, tuning: Tuning) -> bool:
    """Whether every tile is full, so that nothing is masked."""
    T, K = x.shape[2:]
    return lengths is None and T % tuning.chunk == 0 and K % p.block_k == 0 and y.shape[3] % p.block_v == 0


def multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1


def precision(dtype: torch.dtype) -> dict[str, bool | str]:
    return {"NARROW": dtype == torch.bfloat16, "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}


def strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


@overload
def rows(x: Tensor) -> Tensor: ...


@overload
def rows(x: Tensor | None) -> Tensor | None: ...


def rows(x: Tensor | None) -> Tensor | None:
    """Kernels step over heads and tokens as they lie, and over the numbers of one from each to the next."""
    return x if x is None or x.dim() == 3 or x.stride(3) == 1 else x.contiguous()


@overload
def dense(x: Tensor) -> Tensor: ...


@overload
def dense(x: Tensor | None) -> Tensor | None: ...


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def empty(x: Tensor, size: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    y = x.new_empty(size, dtype=dtype)
    return y.fill_(torch.nan) if POISON else y
