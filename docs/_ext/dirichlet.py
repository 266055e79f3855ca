"""Writes docs/assets/dirichlet.json: the numbers of examples in the picture with a slider for alpha.

python docs/_ext/dirichlet.py    # some seconds
"""

import json
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from lightning_fed.data import Dirichlet

ALPHAS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 20, 100)
CLIENTS, CLASSES, EXAMPLES = 10, 5, 1000
OUT = Path(__file__).parents[1] / "assets" / "dirichlet.json"


def count_examples(alpha: float) -> list[list[int]]:
    """Numbers of examples by client and class, for 1,000 examples with equally frequent classes."""
    labels = torch.arange(EXAMPLES) % CLASSES
    parts = Dirichlet(CLIENTS, alpha=alpha).split(TensorDataset(labels, labels), seed=0)
    return [torch.bincount(labels[part], minlength=CLASSES).tolist() for part in parts.values()]


if __name__ == "__main__":
    OUT.write_text(json.dumps([{"alpha": alpha, "counts": count_examples(alpha)} for alpha in ALPHAS]) + "\n")
