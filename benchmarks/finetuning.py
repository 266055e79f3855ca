"""Federated fine-tuning of all weights, low-rank adapters, or only the head: accuracy, bytes and memory.

A small vision transformer is trained centrally on FEMNIST's digits. Then writers fine-tune the network on letters.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from common import QUIET, Curve, machine, parser, peak_bytes, prepare, run_all, spread, table, write_section
from peft import LoraConfig, get_peft_model
from timm.models.vision_transformer import VisionTransformer
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_fed import FederatedTrainer
from lightning_fed.datasets import FEMNIST
from lightning_fed.steps import UpdateStep

LEARNING_RATES = {"all weights": 5e-4, "LoRA, rank 8": 3e-3, "LoRA, rank 2": 3e-3, "head alone": 3e-3}
CLIENTS_PER_ROUND, LOCAL_EPOCHS = 10, 2


class Letters(Dataset):
    """The letters of a data set, without distinction between upper and lower case."""

    def __init__(self, images: Dataset):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, label = self.images[index]
        return image, (int(label) - 10) % 26


class Classifier(L.LightningModule):
    def __init__(self, net, lr: float):
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_acc", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW([value for value in self.parameters() if value.requires_grad], lr=self.lr)


def transformer(classes: int) -> VisionTransformer:
    return VisionTransformer(
        img_size=28, patch_size=7, in_chans=1, num_classes=classes, embed_dim=128, depth=4, num_heads=4
    )


def split(data: Dataset, labels: torch.Tensor) -> tuple[Subset, Subset]:
    return Subset(data, torch.where(labels < 10)[0].tolist()), Subset(data, torch.where(labels >= 10)[0].tolist())


def pretrained(digits: Dataset, seed: int, arguments: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Weights after central training on digits; stored on disk."""
    path = arguments.runs / "finetuning" / f"digits_{seed}.pt"
    if not path.exists():
        L.seed_everything(seed, verbose=False)
        module = Classifier(transformer(10), lr=1e-3)
        trainer = L.Trainer(max_epochs=1 if arguments.quick else 4, accelerator="cpu", **QUIET)
        trainer.fit(module, DataLoader(digits, batch_size=64, shuffle=True))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(module.net.state_dict(), path)
    return torch.load(path, weights_only=True)


def adapted(name: str, net: VisionTransformer) -> torch.nn.Module:
    """Makes the network's parameters trainable according to the method."""
    if name == "all weights":
        return net
    if name == "head alone":
        net.requires_grad_(False)
        net.head.requires_grad_(True)
        return net
    rank = int(name.rpartition(" ")[2])
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["qkv", "proj"], modules_to_save=["head"])
    return get_peft_model(net, config)


def run(name: str, seed: int, arguments: argparse.Namespace, steps: Sequence[UpdateStep] = ()) -> dict[str, Any]:
    """Runs the fit in a new process, for a correct peak memory."""
    data = FEMNIST(arguments.data, seed=0)
    data.setup("fit")
    pretrained(split(data.train_dataset, data.train_dataset.targets)[0], seed, arguments)
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(finetune, (name, seed, arguments, steps))


def finetune(name: str, seed: int, arguments: argparse.Namespace, steps: Sequence[UpdateStep] = ()) -> dict[str, Any]:
    prepare(arguments)
    data = FEMNIST(arguments.data, seed=0)
    data.setup("fit")
    train, val = data.train_dataset, data.val_dataset
    digits, _ = split(train, train.targets)
    weights = pretrained(digits, seed, arguments)
    clients = {}
    for writer in sorted(set(train.groups)):
        own = np.flatnonzero((train.groups == writer) & (train.targets.numpy() >= 10)).tolist()
        if own:  # some writers only wrote digits
            clients[writer] = DataLoader(Letters(Subset(train, own)), batch_size=20, shuffle=True)
    _, letters = split(val, val.targets)
    L.seed_everything(seed, verbose=False)
    net = transformer(10)
    net.load_state_dict(weights)
    net.reset_classifier(26)
    module = Classifier(adapted(name, net), LEARNING_RATES[name])
    trained = sum(value.numel() for value in module.parameters() if value.requires_grad)
    gc.collect()
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, curve = peak_bytes(), Curve(name if not arguments.quick else "")
    trainer = FederatedTrainer(
        max_rounds=2 if arguments.quick else arguments.rounds, clients_per_round=CLIENTS_PER_ROUND, seed=seed,
        steps=steps, local_epochs=LOCAL_EPOCHS, accelerator="cpu", callbacks=[curve], num_sanity_val_steps=0, **QUIET,
    )  # fmt: skip
    trainer.fit(module, clients, DataLoader(Letters(letters), batch_size=256))
    values = {key: [entry[key] for entry in curve.rounds] for key in ("val_acc", "comm/up_bytes", "comm/down_bytes")}
    return values | {"trained": trained, "memory": peak_bytes() - before, "cpu_s": [e["cpu_s"] for e in curve.rounds]}


def section(results: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> str:
    rows = []
    for name, runs in results.items():
        rounds = len(runs[0]["val_acc"])
        client = [
            (up + down) / 2 / CLIENTS_PER_ROUND / 1e3
            for up, down in zip(runs[0]["comm/up_bytes"], runs[0]["comm/down_bytes"], strict=True)
        ]
        rows.append([
            name,
            f"{runs[0]['trained']:,}",
            f"{sum(client) / rounds:,.1f}",
            f"{max(client) / (runs[0]['trained'] * 4 / 1e3):.3f}",
            f"{sum(run['memory'] for run in runs) / len(runs) / 1e6:.0f}",
            f"{sum(sum(run['cpu_s']) for run in runs) / len(runs) / rounds:.1f}",
            spread([100 * run["val_acc"][rounds // 3 - 1] for run in runs], 1),
            spread([100 * sum(run["val_acc"][-3:]) / 3 for run in runs], 1),
        ])  # fmt: skip
    rounds = len(next(iter(results.values()))[0]["val_acc"])
    header = [
        "trained", "numbers", "kB to a client, and back", "over their own size", "peak memory (MB)", "CPU s a round",
        f"accuracy after {rounds // 3}", "in the last 3",
    ]  # fmt: skip
    return (
        "`python benchmarks/finetuning.py --data DATA --out benchmarks/results/finetuning.md`. FEMNIST: a vision"
        " transformer (4 blocks, 128 wide, 0.8 million numbers) that was trained centrally on the digits, fine-tuned"
        f" by their writers to 26 letters: {rounds} rounds of {CLIENTS_PER_ROUND} writers, {LOCAL_EPOCHS} local epochs"
        " in batches of 20, AdamW; learning rates "
        + ", ".join(f"{rate:g} ({name})" for name, rate in LEARNING_RATES.items() if name in results)
        + ", not tuned. Accuracy in % on the writers' held-out letters, mean ± standard deviation over seeds"
        f" {arguments.seeds}. Peak memory of the fit, in a process of its own, above that before it."
        f" {machine(arguments.threads)}.\n\n" + table(header, rows)
    )


def main() -> None:
    made = parser(__doc__.splitlines()[0], seeds=(0, 1))
    made.add_argument("--rounds", type=int, default=12, help="rounds of fine-tuning")
    arguments = made.parse_args()
    prepare(arguments)
    results = run_all("finetuning", LEARNING_RATES, run, arguments)
    write_section(arguments.out, "finetuning", section(results, arguments))


if __name__ == "__main__":
    main()
