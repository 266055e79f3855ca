"""Two hospitals: retinal vessel segmentation with two cameras, DRIVE and CHASE, one client each.

The training methods and BatchNorm treatments equal `appearance.py`. The patients follow the data sets' split: 40 images
for training, 28 images for the test, with a quarter of the pixels. A second annotator's score is the ceiling.
"""

from __future__ import annotations

import statistics
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import appearance
import numpy as np
import torch
from common import PAIRED, load_json, machine, paired, parser, prepare, save_json, spread, table, write_section
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule

IGNORED, ROUNDS = 255, 20
NAMES = ("central", "alone", *appearance.TREATMENTS, *appearance.METHODS)


def smaller(masks: Tensor) -> Tensor:
    """Halves the masks' sides: a vessel if more than a third of the valid pixels are vessel, as in the file."""
    counts = (masks != IGNORED).float()[:, None]
    vessels = F.avg_pool2d((masks == 1).float()[:, None] * counts, 2) / F.avg_pool2d(counts, 2).clamp_min(1e-6)
    made = (vessels > 1 / 3).long()
    return made.masked_fill(F.avg_pool2d(counts, 2) == 0, IGNORED)[:, 0]


class Retina:
    """Images in [0, 1], masks and patients from `retina/retina_256.npz`."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "retina" / "retina_256.npz") as file:
            kept = {name: file[name] for name in ("masks", "second_masks", "camera", "split", "camera_names")}
            bounds, data = file["offsets"], file["jpeg"].tobytes()
        files = [BytesIO(data[int(begin) : int(end)]) for begin, end in pairwise(bounds)]
        images = [np.asarray(Image.open(file).convert("RGB")) for file in files]
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
        self.images = F.avg_pool2d(pixels, 2)
        self.masks, self.second = (smaller(torch.from_numpy(kept[name])) for name in ("masks", "second_masks"))
        self.camera, self.split = torch.from_numpy(kept["camera"]), torch.from_numpy(kept["split"])
        self.names = [str(name) for name in kept["camera_names"]]

    def hospitals(self) -> FederatedDataModule:
        """One client per camera, with test images."""
        parts: list[dict[str, TensorDataset]] = [{}, {}]
        for camera, name in enumerate(self.names):
            for split, datasets in enumerate(parts):
                places = (self.camera == camera) & (self.split == split)
                datasets[name] = TensorDataset(self.images[places], self.masks[places])
        return FederatedDataModule(parts[0], test=parts[1], batch_size=appearance.BATCH)

    def ceiling(self) -> dict[str, float]:
        """Dice between the second and the first annotator on test images, by camera."""
        found = {}
        for camera, name in enumerate(self.names):
            places = (self.camera == camera) & (self.split == 1)
            first, second = self.masks[places], self.second[places]
            counts = (first != IGNORED) & (second != IGNORED)
            both = ((first == 1) & (second == 1) & counts).sum()
            found[name] = float(2 * both / (((first == 1) & counts).sum() + ((second == 1) & counts).sum()))
        return found


def rows_of(found: dict[str, list[dict[str, Any]]], names: list[str]) -> list[list[str]]:
    """Dice by camera for every method, and differences in the mean over cameras."""
    rows = []
    means = {
        name: {run["seed"]: statistics.fmean(run["scores"][way]["dice"].values()) for run in runs}
        for name, runs in found.items()
        for way in list(runs[0]["scores"])[:1]
    }
    for name, runs in found.items():
        for way in runs[0]["scores"]:
            if "dice" not in runs[0]["scores"][way]:
                continue
            values = {run["seed"]: run["scores"][way]["dice"] for run in runs}
            row = [f"{name}, {way}" if way else name]
            row += [spread([100 * dice[camera] for dice in values.values()], 1) for camera in names]
            own = {seed: statistics.fmean(dice.values()) for seed, dice in values.items()}
            row.append(spread([100 * value for value in own.values()], 1))
            for other in ("central", "recalibrate"):
                base = means.get(other, {})
                apart = [100 * (value - base[seed]) for seed, value in own.items() if seed in base]
                row.append("" if other == name else paired(apart, 1))
            shift = [run["shift"][-1] for run in runs if run.get("shift") and run["shift"][-1] is not None]
            rows.append([*row, spread(shift, 2), f"{len(runs)}"])
    return rows


def main() -> None:
    made = parser(__doc__.splitlines()[0], seeds=(0, 1, 2))
    made.add_argument("--names", nargs="+", default=list(NAMES), choices=NAMES, help="ways to train")
    made.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of two local epochs")
    networks = made.add_mutually_exclusive_group()
    networks.add_argument("--deeplab", action="store_true", help="DeepLabV3+ in place of a small U-Net")
    networks.add_argument("--weights", type=Path, help="weights of EfficientNet-Lite0 on ImageNet: a U-Net with them")
    networks.add_argument("--untrained", action="store_true", help="the same U-Net without the weights")
    made.add_argument("--section", default="", help="name of the written section, for a part of the table")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.rounds, arguments.seeds, arguments.names = 1, [0], ["central", "silobn"]
    arguments.small = not arguments.deeplab and not arguments.untrained and arguments.weights is None
    start, network = "scratch", ""
    flag, words = "", "a small U-Net (three stages of ResNet-18), from scratch"
    if arguments.deeplab:
        network, flag, words = "-deeplab", " --deeplab", "DeepLabV3+ with ResNet-18, from scratch"
    if arguments.weights is not None:
        start, network, flag = "pretrained", "-pretrained", " --weights WEIGHTS"
        words = "U-Net with EfficientNet-Lite0 from ImageNet"
    if arguments.untrained:
        start, network, flag = "untrained", "-untrained", " --untrained"
        words = "U-Net with EfficientNet-Lite0, from scratch"
    retina = Retina(arguments.data)
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in arguments.seeds:
        for name in arguments.names:
            path = arguments.runs / f"hospitals{network}" / f"{name}_{arguments.rounds}_{seed}.json"
            if not path.exists() and not arguments.report:
                save_json(path, appearance.train(name, retina.hospitals(), 2, seed, start, arguments, "hospitals"))
            if path.exists():
                found.setdefault(name, []).append(load_json(path))
    if not found:
        return
    ceiling = retina.ceiling()
    rows = rows_of(found, retina.names)
    best = [f"{100 * ceiling[name]:.1f}" for name in retina.names]
    rows.append(["second annotator", *best, f"{100 * statistics.fmean(ceiling.values()):.1f}", "", "", "", ""])
    part = f" --names {' '.join(arguments.names)} --section {arguments.section}" if arguments.section else ""
    header = ["", *retina.names, "mean", "to central", "to recalibrate", "shift", "seeds"]
    text = (
        f"`python benchmarks/hospitals.py --data DATA{flag} --rounds {arguments.rounds}{part} --out"
        " benchmarks/results/hospitals.md`. Vessels of the retina: 20 pictures"
        f" for training of each camera, DRIVE and CHASE, 128 x 128 pixels; {words},"
        f" {arguments.rounds} rounds of {appearance.EPOCHS} local epochs (central and alone: as many epochs), AdamW,"
        f" batches of {appearance.BATCH}. Dice of the vessels on other patients' pictures of the same camera, %,"
        " mean ± standard deviation over seeds; differences of the mean over cameras, in points."
        f" {PAIRED} {machine(arguments.threads)}.\n\n{table(header, rows)}"
    )
    write_section(arguments.out, arguments.section or f"hospitals{network}", text)


if __name__ == "__main__":
    main()
