"""ConvS2S and GNMT against golden outputs of their authors' code, weights included.

    python bench/oracles.py --data FOLDER

FOLDER holds `convs2s.npz`, made by fairseq's fconv (facebookresearch/fairseq 3d262bb), and `gnmt.npz`, made by NVIDIA's
GNMT (NVIDIA/DeepLearningExamples 729963dd), both in float64: ids, logits, attention and the encoder's outputs of three
padded sentences, and the weights under the names of that code (`w/...`). Prints the largest difference of each, and
fails above 1e-7 (ConvS2S, whose code rounds attention scores to float32 where there is padding) and 1e-12 (GNMT).
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from regard.core.rows import unpack
from regard.kernels.recurrence import Cells
from regard.models import Convolutional, ConvolutionalConfig, DeepRecurrent, DeepRecurrentConfig
from regard.models.convolutional import Normed


class Golden:
    """A file of golden outputs."""

    def __init__(self, path: Path):
        self.arrays = np.load(path)

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])

    def normed(self, layer: nn.Module, name: str) -> None:
        """Weight normalization; a convolution is stored [kernel, in, out] there."""
        assert isinstance(layer, Normed), name
        direction = self[f"w/{name}.weight_v"]
        layer.direction.copy_(direction.permute(2, 1, 0) if direction.dim() == 3 else direction)
        layer.gain.copy_(self[f"w/{name}.weight_g"].flatten())
        layer.bias.copy_(self[f"w/{name}.bias"])

    def cells(self, cells: Cells, name: str, suffix: str = "") -> None:
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(cells, part).copy_(self[f"w/{name}.{part}_l0{suffix}"])


@torch.no_grad()
def convs2s(golden: Golden) -> dict[str, Tensor]:
    """Differences of each output."""
    blocks = ((8, 3), (8, 3), (12, 3), (12, 1))
    config = ConvolutionalConfig(
        vocabulary=17,
        target_vocabulary=19,
        width=6,
        out_width=10,
        blocks=blocks,
        longest=30,
        dropout=0.0,
        tied=False,
    )
    model = Convolutional(config).double().eval()
    pad, sides = 1, (("encoder", model.encoder, "source"), ("decoder", model.decoder, "target"))
    for name, stack, side in sides:
        getattr(model, f"{side}_embedding").weight.copy_(golden[f"w/{name}.embed_tokens.weight"])
        # the first real token stands at row pad + 1
        table = golden[f"w/{name}.embed_positions.weight"][pad + 1 :]
        getattr(model, f"{side}_position").table.copy_(table)
        golden.normed(getattr(model, f"{name}_in"), f"{name}.fc1")
        golden.normed(getattr(model, f"{name}_out"), f"{name}.fc2")
        for number, block in enumerate(stack):
            golden.normed(block.convolution, f"{name}.convolutions.{number}")
            if block.residual is not None:
                golden.normed(block.residual, f"{name}.projections.{number}")
    for number, reading in enumerate(model.readings):
        golden.normed(reading.query, f"decoder.attention.{number}.in_projection")
        golden.normed(reading.answer, f"decoder.attention.{number}.out_projection")
    golden.normed(model.output, "decoder.fc3")
    source, target = golden["src"], golden["tgt"]
    keep = source != pad
    keys, values = unpack(model.encode(source, keep=keep).x, keep).chunk(2, -1)
    maps = torch.stack(model.maps(source, target, keep=keep)).mean(0)[:, 0]
    return {
        "logits": model(source, target, keep=keep).logits - golden["logits"],
        "attention": maps - golden["attention"],
        "keys": (keys - golden["encoder"])[keep],
        "values": (values - golden["values"])[keep],
    }


@torch.no_grad()
def gnmt(golden: Golden) -> dict[str, Tensor]:
    """Differences of each output."""
    model = DeepRecurrent(DeepRecurrentConfig(vocabulary=17, width=8, layers=4, dropout=0.0, tied=False))
    model = model.double().eval()
    model.source_embedding.weight.copy_(golden["w/encoder.embedder.weight"])
    golden.cells(model.backward_layer, "encoder.rnn_layers.0", "_reverse")
    for number, cells in enumerate(model.encoder):
        golden.cells(cells, f"encoder.rnn_layers.{number}")
    names = ["decoder.att_rnn.rnn", *(f"decoder.rnn_layers.{number}" for number in range(3))]
    for cells, name in zip(model.decoder, names, strict=True):
        golden.cells(cells, name)
    inner, score = dict(model.cross.inner.named_parameters()), "w/decoder.att_rnn.attn"
    model.query.weight.copy_(golden[f"{score}.linear_q.weight"])
    model.key.weight.copy_(golden[f"{score}.linear_k.weight"])
    inner["reading"].copy_(golden[f"{score}.linear_att"][None])
    inner["gain"].copy_(golden[f"{score}.normalize_scalar"])
    inner["offset"].copy_(golden[f"{score}.normalize_bias"][None])
    model.output.weight.copy_(golden["w/decoder.classifier.classifier.weight"])
    model.output.bias.copy_(golden["w/decoder.classifier.classifier.bias"])
    source, target = golden["src"], golden["tgt"]
    keep = torch.arange(source.shape[1]) < golden["lengths"][:, None]
    values = model.encode(source, keep=keep).x.chunk(2, -1)[1]
    return {
        "logits": model(source, target, keep=keep).logits - golden["logits"],
        "attention": model.maps(source, target, keep=keep)[0][:, 0] - golden["attention"],
        "encoder": (values - golden["encoder"])[keep],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="folder of convs2s.npz and gnmt.npz")
    folder, failed = parser.parse_args().data, False
    for name, compare, most in (("convs2s", convs2s, 1e-7), ("gnmt", gnmt, 1e-12)):
        for output, difference in compare(Golden(folder / f"{name}.npz")).items():
            largest = difference.abs().max().item()
            failed |= not largest < most
            print(f"{name} {output}: {largest:.1e}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
