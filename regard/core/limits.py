"""Bounds on sizes, checked before memory is allocated. They are far above what is ever trained, and below what fills a
machine: a number in a file from elsewhere must not do that."""

import dataclasses
import os
from typing import Any

# by the names of fields in configs; what is not here is bounded by MOST
SIZES = {
    "layers": 4096,
    "decoder_layers": 4096,
    "seed_layers": 4096,
    "blocks": 4096,
    "width": 2**20,
    "latent_width": 2**20,
    "head_width": 2**20,
    "hidden": 2**20,
    "inner": 2**22,
    "heads": 2**16,
    "kv_heads": 2**16,
    "vocabulary": 2**24,
    "target_vocabulary": 2**24,
    "generated": 10_000_000,
    "length": 2**24,
    "maximum_length": 2**24,
    "beam": 10_000,
    "nbest": 10_000,
    "threads": 1024,
    "maximum": 2**20,
    "minimum": 2**20,
    "maximum_extra": 2**20,
    "keep": 100_000,
    "seed": 2**63 - 1,
}
MOST = 2**40
BYTES = 4  # per parameter in float32


def check_sizes(config: Any, section: str = "") -> None:
    """Refuses a config with a whole number above its bound; `section` is said before the name of the field."""
    for field in dataclasses.fields(config):
        value, most = getattr(config, field.name), SIZES.get(field.name, MOST)
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, int) and number > most:
                raise ValueError(f"{section}{field.name} must be at most {most:,}, got {number:,}")


def physical_memory() -> int | None:
    """Bytes of memory that the machine has, where it says so."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def check_memory(parameters: int, what: str) -> None:
    """Refuses what has more parameters than the machine has memory for."""
    has = physical_memory()
    if has is not None and BYTES * parameters > has:
        raise ValueError(
            f"{what} has {parameters:,} parameters, {BYTES * parameters / 1e9:,.1f} GB in float32, and this machine "
            f"has {has / 1e9:,.1f} GB of memory: choose smaller sizes"
        )
