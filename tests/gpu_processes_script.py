"""Fits in several processes for `test_gpu.py`; run by `torchrun`."""

import json
import sys
import warnings
from pathlib import Path

import torch

from lightning_fed import ClientParallelStrategy, FederatedDataModule, FederatedTrainer
from tests import models
from tests.conftest import QUIET
from tests.recorders import state_of

JOBS = {"fedavg": {}, "scaffold": {"method": "scaffold"}, "recalibrate": {"batch_norm": "recalibrate"}}


def main():
    folder, is_shared = Path(sys.argv[1]), json.loads(sys.argv[2])
    warnings.filterwarnings("ignore")
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    for job, options in JOBS.items():
        strategy = ClientParallelStrategy()
        devices = 2
        if is_shared:
            device = torch.device("cuda", 0)
            strategy = ClientParallelStrategy(parallel_devices=[device, device], process_group_backend="gloo")
            devices = "auto"
        trainer = FederatedTrainer(
            **{
                **QUIET,
                "accelerator": "cuda",
                "devices": devices,
                "strategy": strategy,
                "seed": 4,
                "max_rounds": 2,
                **options,
            }
        )
        module = models.Module(models.norm_mlp(), models.momentum)
        trainer.fit(module, FederatedDataModule(models.as_datasets(models.vectors()), batch_size=16))
        torch.save(state_of(module), folder / f"{job}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
