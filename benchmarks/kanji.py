"""FedSS with thousands of classes: 2,965 kanji; a client has a share of the kanji in one typeface.

The network, the schedule on the server and the rates come from `fedss.py`, without further tuning. Eight of the 42
typefaces are held out: three for validation, five for the test at the end of a run. Runs one (seed, method, classes
held) after another, and skips finished runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedss
import numpy as np
import torch
from common import PAIRED, load_json, machine, parser, prepare, save_json, spread, table, write_section
from fedss import BATCH, COHORT, METHODS, WIDTH, Clients
from torch import Tensor
from torch.utils.data import Dataset

CLASSES, DRAWN = 2_965, (10, 30, 100, 300)  # 0.3 to 10 % of the classes, as published
VALIDATION, TEST = 3, 5


class Characters(Dataset[tuple[Tensor, int]]):
    def __init__(self, images: Tensor, targets: Tensor, typefaces: Tensor) -> None:
        self.images, self.targets, self.typefaces = images, targets, typefaces

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index][None].float() / 255, int(self.targets[index])


class Kanji:
    """Images from `kanji/kanji32.npz`, by typeface; the held-out typefaces do not depend on the run's seed."""

    num_classes = CLASSES

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "kanji" / "kanji32.npz") as file:
            images, labels, typefaces = (torch.from_numpy(file[name]) for name in ("images", "label", "typeface"))
        order = np.random.default_rng(0).permutation(int(typefaces.max()) + 1)

        def some(kept: Any) -> Characters:
            places = torch.isin(typefaces, torch.as_tensor(kept, dtype=typefaces.dtype))
            return Characters(images[places], labels[places].long(), typefaces[places].long())

        self.val_dataset = some(order[:VALIDATION])
        self.test_dataset = self.retrieval_dataset = some(order[VALIDATION : VALIDATION + TEST])
        self.train_dataset = some(order[VALIDATION + TEST :])


class Shares(Clients):
    """Clients with some characters in one typeface, one image per character."""

    def split(self, frames: Any, own: int, seed: int) -> Mapping[Any, Any]:
        generator, parts = np.random.default_rng(seed), {}
        for typeface in frames.typefaces.unique().tolist():
            places = generator.permutation(torch.nonzero(frames.typefaces == typeface)[:, 0].numpy())
            for number in range(len(places) // own):  # the last few characters belong to no client
                parts[f"{typeface}_{number}"] = torch.as_tensor(places[number * own : (number + 1) * own])
        return parts


def sizes_of(name: str, own: int) -> tuple[int, ...]:
    """Numbers of classes at a client, including classes with images."""
    return {"fedss": tuple(own + drawn for drawn in DRAWN), "negonly": tuple(own + drawn for drawn in DRAWN)}.get(
        name, (own,) if METHODS[name].objective == "posonly" else (CLASSES,)
    )


def path_of(arguments: argparse.Namespace, name: str, held: int, seed: int) -> Path:
    return Path(arguments.runs) / "kanji" / f"{name}_{arguments.own}_{held}_{arguments.rounds}_{seed}.json"


def report(found: Mapping[tuple[str, int], list[dict[str, Any]]], clients: int, arguments: argparse.Namespace) -> str:
    own, body = arguments.own, next(iter(found.values()))[0]["parameters"]
    rows = []
    for (name, held), runs in found.items():
        cells = ["", "", ""]
        if METHODS[name].objective is not None:
            share = 100 * (body + WIDTH * held) / (body + WIDTH * CLASSES)
            drawn = f"{100 * (held - own) / CLASSES:.1f} %" if own < held < CLASSES else ""
            cells = [f"{held:,}", drawn, f"{share:.1f} %"]
        cells += [spread([100 * run[key] for run in runs], 1) for key in ("test_top1", "map_at_10", "train_top1")]
        cells += [fedss.differences(runs, found.get(other, [])) for other in (("posonly", own), ("full", CLASSES))]
        rows.append([METHODS[name].words, *cells, f"{len(runs)}"])
    header = ["", "classes held", "others drawn", "of the model", "top-1", "MAP@10", "training top-1"]
    header += ["top-1, to PosOnly", "to FullSoftmax", "seeds"]
    return (
        f"`python benchmarks/kanji.py --data DATA --own {own} --rounds {arguments.rounds} --out"
        f" benchmarks/results/fedss.md`. {CLASSES:,} kanji in {42 - VALIDATION - TEST} typefaces for training:"
        f" {clients:,} clients, each with {own} characters of one typeface, one image of each; {COHORT} in a round,"
        f" {arguments.rounds} rounds of one epoch, batches of {BATCH}, server momentum 0.9, client learning rate"
        f" {arguments.lr:g} (centralised: {arguments.central_lr:g} with momentum 0.9, as many examples); the network of"
        f" the study on Omniglot ({body:,} parameters, embedding of {WIDTH}, scale 20). Parameters of the model that"
        f" travel per client and direction, as a share of the full softmax's. Top-1 over all classes, and MAP@10 among"
        f" the characters, in {TEST} typefaces that nobody trains on; %, mean ± standard deviation over seeds. {PAIRED}"
        f" {machine(arguments.threads)}.\n\n{table(header, rows)}"
    )


def main() -> None:
    made = parser(__doc__.splitlines()[0], seeds=(0, 1, 2))
    made.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), help="methods")
    made.add_argument("--own", type=int, default=60, help="classes of a client")
    made.add_argument("--held", type=int, nargs="+", default=[], help="of the numbers of classes held; else all")
    made.add_argument("--rounds", type=int, default=1_000, help="rounds")
    made.add_argument("--lr", type=float, default=0.03, help="learning rate of the clients")
    made.add_argument("--central-lr", type=float, default=0.05, help="learning rate of centralised training")
    made.add_argument("--spread-out", type=float, default=0.0, help="strength of FedAwS's step; 0 for the script's")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.seeds, arguments.methods, arguments.held = [0], ["fedss"], [arguments.own + DRAWN[0]]
    source = Kanji(arguments.data)
    if arguments.quick:
        source.train_dataset.images = source.train_dataset.images[:3_000]
        source.train_dataset.targets = source.train_dataset.targets[:3_000]
        source.train_dataset.typefaces = source.train_dataset.typefaces[:3_000]
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    clients = 0
    for seed in arguments.seeds:
        data = Shares(source.train_dataset, source.val_dataset, arguments.own, seed)
        clients = len(data.own)
        for name in arguments.methods:
            for held in sizes_of(name, arguments.own):
                if arguments.held and held not in arguments.held and METHODS[name].objective in ("fedss", "negonly"):
                    continue
                path = path_of(arguments, name, held, seed)
                if not path.exists() and not arguments.report:
                    rate = fedss.rate_of(name, arguments)
                    save_json(path, fedss.run(data, source, name, held, seed, rate, arguments))
                if path.exists():
                    found.setdefault((name, held), []).append(load_json(path))
    if found:
        length = f"kanji-{arguments.own}-{arguments.rounds}"
        write_section(arguments.out, length, report(found, clients, arguments))


if __name__ == "__main__":
    main()
