"""Loads grown checkpoints in a new process into modules with the original widths. Tests also import the modules.

Usage: python -m tests.matching.load_script FOLDER
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(20, 4), nn.Linear(6, 20)
        self.first, self.second = nn.LSTM(4, 5, batch_first=True), nn.LSTM(5, 6, batch_first=True)

    def forward(self, text):
        return self.decoder(self.second(self.first(self.embedding(text))[0])[0][:, -1])


class Normed(nn.Module):
    """BatchNorm, including one behind a residual connection."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.conv, self.residual_norm = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, images):
        features = F.relu(self.norm(self.stem(images)))
        return self.head(F.relu(self.residual_norm(self.conv(features)) + features).mean((2, 3)))


class Depthwise(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6),
            nn.Conv2d(6, 5, 1), nn.PReLU(5), nn.ConvTranspose2d(5, 5, 2, groups=5), nn.Flatten(), nn.Linear(5 * 49, 4),
        )  # fmt: skip


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.output = nn.Embedding(20, 6), nn.Linear(6, 6), nn.Linear(6, 20)
        self.output.weight = self.embedding.weight

    def forward(self, text):
        embedded = self.embedding(text)
        return self.output(embedded + torch.tanh(self.mix(embedded)))


def images():
    return torch.rand(2, 3, 8, 8)


def text():
    return torch.randint(20, (2, 7))


CASES = {"letters": (Letters, text), "normed": (Normed, images), "depthwise": (Depthwise, images), "tied": (Tied, text)}


def main(folder):
    from lightning_fed.matching import load_matched

    for name, (make, _) in CASES.items():
        module = load_matched(make(), folder / f"{name}.ckpt").eval()
        with torch.no_grad():
            output = module(torch.load(folder / f"{name}.input", weights_only=True))
        ties = isinstance(module, Tied) and module.output.weight is module.embedding.weight
        torch.save({"output": output, "is_tied": ties, "text": repr(module)}, folder / f"{name}.output")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
