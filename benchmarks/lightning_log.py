"""Seconds of ``self.log`` in Lightning, and with a check of the device before a result moves.

Reproduction for a report to Lightning: each call of ``_ResultCollection.log`` moves the result to the value's device,
and ``_ResultMetric.to`` copies two dataclasses. Both variants alternate within one fit; the script downloads nothing.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning as L
import torch
from common import QUIET
from lightning.pytorch.trainer.connectors.logger_connector import result  # noqa: TID251 - the reported class
from torch import nn
from torch.utils.data import DataLoader

CALLS, BATCHES = 20, 300
MOVE = result._ResultMetric.to  # noqa: SLF001


def move_if_needed(metric: Any, device: torch.device) -> Any:
    return metric if metric.value.device == device else MOVE(metric, device)


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seconds: dict[bool, list[float]] = {False: [], True: []}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).sum()
        is_checked = bool(batch_idx % 2)
        result._ResultMetric.to = move_if_needed if is_checked else MOVE  # noqa: SLF001
        begin = time.process_time()
        for _ in range(CALLS):
            self.log("loss", loss)
        self.seconds[is_checked].append((time.process_time() - begin) / CALLS)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def main() -> None:
    torch.set_num_threads(1)
    net = Net()
    L.Trainer(max_epochs=1, **QUIET).fit(net, DataLoader(torch.ones(BATCHES, 1)))
    result._ResultMetric.to = MOVE  # noqa: SLF001
    today, checked = (1e6 * statistics.median(net.seconds[is_checked]) for is_checked in (False, True))
    print(f"Lightning {L.__version__}, torch {torch.__version__}, microseconds per call of `self.log`:")
    print(f"today {today:.0f}, with a check of the device {checked:.0f}")


if __name__ == "__main__":
    main()
