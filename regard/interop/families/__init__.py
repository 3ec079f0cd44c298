"""Published architectures as settings of one Transformer: base.py is the contract, then one file per group of families.

A model of ours belongs to a family if its config can be written there and read back the same (matching.py).
"""

from typing import Any

from regard.interop.families.base import Family
from regard.interop.families.bert import BERT, DISTILBERT, ROBERTA
from regard.interop.families.gpt2 import GPT2
from regard.interop.families.llama import LLAMA, MISTRAL, QWEN2
from regard.interop.families.marian import MARIAN, PEGASUS
from regard.interop.families.swin import SWIN, TIMM_SWIN
from regard.interop.families.vit import DEIT, TIMM_VIT, VIT

# where several would do, the first is taken
FAMILIES: tuple[Family, ...] = (
    GPT2,
    BERT,
    DISTILBERT,
    ROBERTA,
    MARIAN,
    PEGASUS,
    LLAMA,
    MISTRAL,
    QWEN2,
    VIT,
    DEIT,
    SWIN,
)
TIMM_FAMILIES: tuple[Family, ...] = (TIMM_VIT, TIMM_SWIN)


def find(model_type: Any) -> Family:
    """The family of this `model_type`."""
    for family in FAMILIES:
        if family.name == model_type:
            return family
    raise ValueError(
        f"models of type {model_type!r} are not known here; known: {', '.join(family.name for family in FAMILIES)}"
    )
