"""Character language model as an ordinary LightningModule.

The network comes from LEAF and FedMA: S. Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv:1812.01097;
H. Wang et al., "Federated Learning with Matched Averaging", ICLR 2020.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed.argument_checks import check_count, check_option, check_share
from lightning_fed.numerics.float64_states import Float64Mean
from lightning_fed.tasks.base import Task

__all__ = ["CharLSTM", "CharLanguageTask"]


class CharLSTM(nn.Module):
    """Embedding, LSTM and decoder for the next character.

    Args:
        num_classes: Number of characters.
        embedding_dim: Length of a character's embedding.
        hidden_size: Neurons per layer.
        num_layers: Number of layers.
        dropout: Dropout probability between layers.
        every_step: Whether to predict the next character at every step instead of only at the last step.

    Raises:
        ValueError: If a number is outside the allowed range.

    Example:
        >>> sum(parameter.numel() for parameter in CharLSTM().parameters())
        293584
    """

    def __init__(
        self,
        num_classes: int = 80,
        embedding_dim: int = 8,
        hidden_size: int = 256,
        num_layers: int = 1,
        dropout: float = 0.0,
        every_step: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("embedding_dim", embedding_dim), ("hidden_size", hidden_size), ("num_layers", num_layers)):
            check_count(name, value)
        check_share("dropout", dropout)
        self.every_step = every_step
        self.embedding = nn.Embedding(num_classes, embedding_dim)
        sizes = [embedding_dim, *[hidden_size] * num_layers]
        # separate modules, so neuron matching can change the width of each layer
        self.lstm = nn.ModuleList(nn.LSTM(inner, outer, batch_first=True) for inner, outer in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(hidden_size, num_classes)

    def forward(self, text: Tensor) -> Tensor:
        """Computes logits for characters ``(N, T)``: ``(N, num_classes)``, or per step ``(N, num_classes, T)``."""
        features: Tensor = self.embedding(text)
        for number, layer in enumerate(self.lstm):
            features, _ = layer(self.dropout(features) if number else features)
        logits: Tensor = self.decoder(features if self.every_step else features[:, -1])
        return logits.transpose(1, 2) if self.every_step else logits


class CharLanguageTask(Task):
    """Predicts the next character with cross-entropy. Logs loss, accuracy and perplexity.

    Batches are ``(x, y)`` or dicts with keys ``text`` and ``target``. Texts are character codes with shape ``(N, T)``.
    Targets are the next characters' codes with shape ``(N,)``, or ``(N, T)`` with ``every_step``. Prediction returns
    probabilities with shape ``(N, num_classes)``, or ``(N, num_classes, T)`` with ``every_step``.

    Logged values are ``train_loss`` and, for ``val`` and ``test``, the loss, ``val_acc`` and ``val_perplexity``.
    Perplexity is exp(mean cross-entropy) over all characters.

    Args:
        model: ``"lstm"`` for a `CharLSTM`, or a module from codes to logits. A module is not a saved hyperparameter:
            pass the module to ``load_from_checkpoint(path, model=...)``.
        num_classes: Number of characters.
        embedding_dim: Length of a character's embedding.
        hidden_size: Neurons per LSTM layer.
        num_layers: Number of LSTM layers.
        dropout: Dropout probability between LSTM layers.
        every_step: Whether to predict the next character at every step instead of only at the last step.
        lr: Learning rate.
        **options: Optimizer and learning-rate scheduler, see `Task`.

    Raises:
        ValueError: If a choice is unknown, a number is outside the allowed range, or the optimizer refuses an argument.

    Example:
        >>> task = CharLanguageTask(hidden_size=32, num_layers=2, every_step=True)
        >>> task(torch.zeros(2, 7, dtype=torch.int64)).shape
        torch.Size([2, 80, 7])
    """

    input_key: ClassVar[str] = "text"
    target_key: ClassVar[str] = "target"

    def __init__(
        self,
        model: str | nn.Module = "lstm",
        num_classes: int = 80,
        embedding_dim: int = 8,
        hidden_size: int = 256,
        num_layers: int = 1,
        dropout: float = 0.0,
        every_step: bool = False,
        lr: float = 0.25,
        **options: Any,
    ) -> None:
        super().__init__(lr=lr, **options)
        self.save_hyperparameters(ignore=["model"] if isinstance(model, nn.Module) else None)
        self.num_classes = check_count("num_classes", num_classes, 2)
        self._network_options = {
            "embedding_dim": embedding_dim,
            "hidden_size": hidden_size,
            "num_layers": num_layers,
            "dropout": dropout,
            "every_step": every_step,
        }
        self.configure_task(model, "batch", None, num_classes)

    def configure_network(self, name: str) -> nn.Module:
        check_option("model", name, ("lstm",))
        return CharLSTM(self.num_classes, **self._network_options)  # type: ignore[arg-type]

    def configure_metrics(self) -> MetricCollection:
        accuracy = MulticlassAccuracy(self.num_classes, average="micro", validate_args=False)
        return MetricCollection({"acc": accuracy, "perplexity": _Perplexity()}, compute_groups=False)

    def example_input(self) -> Tensor:
        return torch.zeros(2, 4, dtype=torch.int64)

    def compute_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Computes the cross-entropy between logits ``(N, num_classes, ...)`` and codes ``(N, ...)``."""
        shape = (logits.shape[0], *logits.shape[2:])
        if target.shape != shape:
            raise ValueError(
                f"Expected targets of shape {shape}, one for each prediction, but got {tuple(target.shape)}: set the "
                "same `every_step` on the task and the data."
            )
        return F.cross_entropy(logits, target.long())


class _Perplexity(Float64Mean):
    """Metric: exponential of the mean cross-entropy over all targets, from logits ``(N, num_classes, ...)``."""

    higher_is_better = False

    @torch.no_grad()
    def update(self, logits: Tensor, target: Tensor) -> None:
        self.add(F.cross_entropy(logits, target.long(), reduction="none"))

    def compute(self) -> Tensor:
        return (self.total / self.count).exp().to(self.dtype).to(self.device)
