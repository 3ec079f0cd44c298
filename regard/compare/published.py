"""Numbers of papers, with their source and how sure we are of them. They stand in a column of their own, and are never
ranked with what was measured here: other code, data order, budget and machine."""

from typing import NamedTuple


class Published(NamedTuple):
    """Scores of one row of a published table."""

    row: str
    values: tuple[float | None, ...]
    word: str = ""  # the spec that stands for it here


class PublishedTable(NamedTuple):
    """A published table."""

    title: str
    source: str
    tag: str  # "checked": read in the source; "recalled": from memory, a hint and no oracle
    columns: tuple[str, ...]
    rows: tuple[Published, ...]


ARENA = PublishedTable(
    "Long Range Arena, accuracy in %",
    "Tay et al. 2020, arXiv 2011.04006; README of google-research/long-range-arena",
    "checked",
    ("ListOps", "Text", "Image", "Path"),
    (
        Published("Transformer", (36.37, 64.27, 42.44, 71.40), "softmax"),
        Published("Local", (15.82, 52.98, 41.46, 66.63), "local"),
        Published("Linear", (16.13, 65.90, 42.34, 75.30), "linear"),
        Published("Reformer", (37.27, 56.10, 38.07, 68.50), "reformer"),
        Published("Sparse", (17.07, 63.58, 44.24, 71.71), "sparse"),
        Published("Sinkhorn", (33.67, 61.20, 41.23, 67.45), "sinkhorn"),
        Published("Linformer", (35.70, 53.94, 38.56, 76.34), "linformer"),
        Published("Performer", (18.01, 65.40, 42.77, 77.05), "performer"),
        Published("Synthesizer", (36.99, 61.68, 41.61, 69.45), "synthesizer"),
        Published("Longformer", (35.63, 62.85, 42.22, 69.71), "longformer"),
        Published("BigBird", (36.05, 64.02, 40.83, 74.87), "bigbird"),
    ),
)
MAD = PublishedTable(
    "MAD, accuracy in %",
    "the DeltaNet authors' table (Yang et al. 2024)",
    "checked",
    ("compress", "fuzzy", "recall", "memorize", "noisy", "selective", "mean"),
    (
        Published("Transformer", (51.6, 29.8, 94.1, 85.2, 86.8, 99.6, 74.5), "softmax"),
        Published("Hyena", (45.2, 7.9, 81.7, 89.5, 78.8, 93.1, 66.0)),
        Published("Mamba", (52.7, 6.7, 90.4, 89.5, 90.1, 86.3, 69.3)),
        Published("GLA", (38.8, 6.9, 80.8, 63.3, 81.6, 88.6, 60.0)),
        Published("DeltaNet", (42.2, 35.7, 100.0, 52.8, 100.0, 100.0, 71.8)),
    ),
)
WMT = PublishedTable(
    "Table 2 of Attention Is All You Need: BLEU, and training cost as hours x GPUs x rated speed",
    "Vaswani et al. 2017, arXiv 1706.03762",
    "checked",
    ("EN-DE", "EN-FR", "FLOPs EN-DE", "FLOPs EN-FR"),
    (
        Published("ByteNet", (23.75, None, None, None)),
        Published("Deep-Att + PosUnk", (None, 39.2, None, 1.0e20)),
        Published("GNMT + RL", (24.6, 39.92, 2.3e19, 1.4e20)),
        Published("ConvS2S", (25.16, 40.46, 9.6e18, 1.5e20)),
        Published("MoE", (26.03, 40.56, 2.0e19, 1.2e20)),
        Published("Deep-Att + PosUnk, ensemble", (None, 40.4, None, 8.0e20)),
        Published("GNMT + RL, ensemble", (26.30, 41.16, 1.8e20, 1.1e21)),
        Published("ConvS2S, ensemble", (26.36, 41.29, 7.7e19, 1.2e21)),
        Published("Transformer, base", (27.3, 38.1, 3.3e18, 3.3e18)),
        Published("Transformer, big", (28.4, 41.8, 2.3e19, 2.3e19)),
    ),
)
TABLE_1 = PublishedTable(
    "Table 1 of Attention Is All You Need: per layer, n tokens of width d, kernel k, neighbourhood r",
    "Vaswani et al. 2017, arXiv 1706.03762: self-attention n^2 d, 1, 1; recurrent n d^2, n, n; convolutional k n d^2, "
    "1, log_k n; restricted self-attention r n d, 1, n / r. The paper leaves the projections out",
    "recalled",
    (),
    (),
)
