import gc
import os

# Some virtual machines advertise AMX without granting it; bf16 matrix products then die with an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Runs go to a GPU where there is one, and the tests are made for a CPU, but for those marked `gpu`: `make test-gpu`.
# Kernels in Triton are interpreted here.
os.environ.update({} if os.environ.get("REGARD_GPU") == "1" else {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"})

import failures
import pytest
import torch
from interpreted import quick_interpreter  # noqa: F401  (a fixture)
from unrun import (  # noqa: F401  (hooks of pytest)
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_testnodedown,
    pytest_unconfigure,
)

import regard.testing.plugin  # noqa: F401  (the asserts of the suite show their values)
from regard.kernels import choose

# the asserts of helpers say as much as those of tests
pytest.register_assert_rewrite(
    "checkpoints", "lengths", "planted", "published", "reviews", "scans", "sets", "shown", "training_runs", "verbs"
)
torch.set_num_threads(1)


def pytest_configure(config):
    failures.pytest_configure(config)
    if os.environ.get("REGARD_GPU") == "1":
        # what PyTorch has to say of a machine with a GPU is shown, and fails no test
        config.addinivalue_line("filterwarnings", "default")


def pytest_collection_finish():
    # tests and what they import stay until the end: the garbage collector, which PyTorch's compiler calls once a graph,
    # need not look through all of it each time
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


def pytest_itemcollected(item):
    on_gpu = os.environ.get("REGARD_GPU") == "1"
    if (item.get_closest_marker("gpu") is not None) != on_gpu:
        item.add_marker(pytest.mark.skip(reason="of the CPU" if on_gpu else "needs a GPU: make test-gpu"))


@pytest.fixture
def kernels(request):
    """The choice of kernels, for tests parametrized with it."""
    with choose.use(request.param):
        yield request.param
