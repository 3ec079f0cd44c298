import os

# Some virtual machines advertise AMX without granting it; bf16 matrix products then die with an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

torch.set_num_threads(1)
