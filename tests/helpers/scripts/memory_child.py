"""Prints: whether memory is kept; the pages that the system clears for 16 tensors, one after the other, after three of
them; whether gaps of 1,600 MiB are handed back, how many MiB that makes, and whether again."""

import resource

import torch

from regard.core.allocator import hand_back_memory, keep_memory


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


kept = keep_memory()
for number in range(19):
    if number == 3:
        before = faults()
    torch.ones(10 << 20)
pages = faults() - before
# large ones among small ones that stay: what they leave are gaps
gaps, stay = [], []
for size in range(40):
    gaps.append(torch.ones(10 << 20))
    stay.append(torch.ones(1000 + size))
gaps.clear()
full, handed = resident(), hand_back_memory()
print(int(kept), pages, int(handed), (full - resident()) >> 20, int(hand_back_memory()))
