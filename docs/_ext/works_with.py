"""Writes the table in ``docs/guides/works_with.md`` from fits with two rounds: every method with every feature.

    python docs/_ext/works_with.py

The run takes about ten minutes with one thread. Standard error shows the reason for each refusal.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer, Vectorized
from lightning_fed.algorithms import ServerOptimizer
from lightning_fed.algorithms.robust import NearestNeighborMixing
from lightning_fed.compression import Quantized
from lightning_fed.method import METHODS
from lightning_fed.modules import to_sampled_softmax
from lightning_fed.privacy import DPSGD, CentralDP, SecureSum
from lightning_fed.steps import MaxSamples
from lightning_fed.tasks import ClassificationTask

PAGE = Path(__file__).parents[1] / "guides" / "works_with.md"
OPTIONS = {"fltrust": "fltrust:trusted=a", "fixbn": "fixbn:after=1", "fedss": "fedss:num_negatives=2"}
FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "`Vectorized`": lambda: {"visits": Vectorized(4)},
    "server optimizer": lambda: {"steps": [ServerOptimizer("SGD", lr=1.0)]},
    "mixture": lambda: {"steps": [NearestNeighborMixing()]},
    "compression": lambda: {"steps": [Quantized(8)]},
    "`CentralDP`": lambda: {"steps": [CentralDP(clip=1.0, noise_multiplier=1.0, delta=1e-2)]},
    "`SecureSum`": lambda: {"steps": [MaxSamples(100), SecureSum(clip=10.0)]},
    "`DPSGD`": lambda: {"callbacks": [DPSGD(max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-2)]},
    "kept optimizers": lambda: {"optimizer_state": "keep"},
}


class Notes(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def clients() -> dict[str, TensorDataset]:
    """Seven clients, each with twelve images in four classes."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: TensorDataset(torch.randn(12, 1, 8, 8, generator=generator), torch.arange(12) % 4) for name in "abcdefg"
    }


def make_model(method: str) -> ClassificationTask:
    """A small network, with BatchNorm only for the BatchNorm methods."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(8)] if method in ("fedbn", "silobn", "fixbn") else []
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *norms, nn.ReLU(), nn.Linear(8, 4))
    model = ClassificationTask(network, num_classes=4)
    return to_sampled_softmax(model) if method in ("fedss", "fedaws") else model


def outcome(method: str, feature: str = "") -> str:
    """A tick, a circle for clients trained one after another, or a dash for a refused combination."""
    notes, logger = Notes(), logging.getLogger("lightning_fed")
    logger.addHandler(notes)
    try:
        trainer = FederatedTrainer(
            OPTIONS.get(method, method),
            max_rounds=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **(FEATURES[feature]() if feature else {}),
        )
        trainer.fit(make_model(method), clients())
    except Exception as error:
        sys.stderr.write(f"{method}, {feature}: {error}\n")
        return "-"
    finally:
        logger.removeHandler(notes)
    return "○" if any("clients train one after another" in message for message in notes.messages) else "✓"


def main() -> None:
    """Trains all combinations and writes the table."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = [f"| method | {' | '.join(FEATURES)} |", "|---" * (len(FEATURES) + 1) + "|"]
    for method in METHODS:
        with contextlib.redirect_stdout(io.StringIO()):
            if outcome(method) != "✓":
                raise SystemExit(f"{method} does not train by itself.")
            cells = [outcome(method, feature) for feature in FEATURES]
        rows.append(f"| `{method}` | {' | '.join(cells)} |")
    table = "\n".join(rows)
    page = re.sub(r"(<!-- works with -->\n\n).*?(\n\n<!-- /)", rf"\g<1>{table}\g<2>", PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
