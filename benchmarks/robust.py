"""Robust rules against attacks: worst-case accuracy with 0 to 4 malicious clients among 10 clients with non-IID data.

All combinations are trained. For each seed, all rules and attacks have the same malicious clients. A larger number
includes the malicious clients from a smaller number. Two processes with different `--seeds` share the work.
Single runs are stored, and `--report` makes tables from the stored results.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from common import QUIET, machine, parser, prepare, run_all, spread, table, write_section
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import Faults, FederatedDataModule, FederatedTrainer, Vectorized
from lightning_fed.algorithms.robust import AdaptiveClipping, NearestNeighborMixing
from lightning_fed.algorithms.robust.mixtures import Mixture
from lightning_fed.attacks import ALIE, IPM, BadValues, GaussianNoise, Mimic, Scaling, SignFlip, flip_labels
from lightning_fed.data import Dirichlet
from lightning_fed.datasets import FashionMNIST
from lightning_fed.method import build_method
from lightning_fed.numerics.seeds import derive_seed
from lightning_fed.steps import UpdateStep
from lightning_fed.tasks import ClassificationTask

CLIENTS, IMAGES, TRUSTED, TEST = 10, 10_000, 100, 2_000
ROUNDS, STEPS, BATCH, LR = 30, 5, 32, 0.1
ALPHAS, NUMBERS = (1.0, 0.5, 0.1), (0, 1, 2, 3, 4)
SHOWN = 2  # malicious clients in the tables of all attacks

RULES = {  # with each rule's largest tolerable number of malicious clients among 10
    "fedavg": ("fedavg", 4),
    "median": ("median", 4),
    "trimmed_mean": ("trimmed_mean:num_malicious={f}", 4),
    "krum": ("krum:num_malicious={f}", 3),
    "multikrum": ("multikrum:num_malicious={f}", 3),
    "bulyan": ("bulyan:num_malicious={f}", 1),
    "geometric_median": ("geometric_median:num_malicious={f}", 4),
    "centered_clipping": ("centered_clipping:num_malicious={f}", 4),
    "norm_clipping": ("norm_clipping", 4),
    "fltrust": ("fltrust:trusted=server:num_malicious={f}", 4),
    "nnm, trimmed_mean": ("trimmed_mean:num_malicious={f}", 4),
    "nnm, multikrum": ("multikrum:num_malicious={f}", 3),
    "arc, nnm, geometric_median": ("geometric_median:num_malicious={f}", 4),
}
MIXTURES: dict[str, Callable[[int], Mixture]] = {"nnm": NearestNeighborMixing, "arc": AdaptiveClipping}
ATTACKS: dict[str, Callable[[Sequence[str]], UpdateStep | None]] = {
    "sign flip": lambda clients: SignFlip(clients),
    "scaling 10": lambda clients: Scaling(clients, 10.0),
    "noise": lambda clients: GaussianNoise(clients, 0.1),
    "huge values": lambda clients: BadValues(clients, "huge"),
    "label flip": lambda clients: None,  # in the clients' data
    "IPM 0.5": lambda clients: IPM(clients, 0.5),
    "IPM 5": lambda clients: IPM(clients, 5.0),
    "ALIE 1.5": lambda clients: ALIE(clients, 1.5),
    "mimic": lambda clients: Mimic(clients),
}
NONE = "no attack"


@cache
def load(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = FashionMNIST(folder, train_size=IMAGES + TRUSTED, val_size=TEST)
    source.setup("fit")
    parts: list[Tensor] = []
    for dataset in (source.train_dataset, source.val_dataset):
        images, labels = zip(*dataset, strict=True)
        parts += [torch.stack(images), torch.as_tensor(labels)]
    return parts[0], parts[1], parts[2], parts[3]


@cache
def split(folder: Path, alpha: float, seed: int) -> dict[str, Tensor]:
    labels = load(folder)[1][:IMAGES]
    parts = Dirichlet(CLIENTS, alpha, min_size=BATCH).split(TensorDataset(torch.zeros(IMAGES), labels), seed)
    return {f"client {client}": torch.as_tensor(indices) for client, indices in parts.items()}


def name_of(rule: str, attack: str, number: int, alpha: float) -> str:
    return f"{rule} against {attack} by {number} with {alpha}"


def parse(name: str) -> tuple[str, str, int, float]:
    rule, _, rest = name.partition(" against ")
    attack, _, rest = rest.partition(" by ")
    number, _, alpha = rest.partition(" with ")
    return rule, attack, int(number), float(alpha)


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    rule, attack, number, alpha = parse(name)
    images, labels, test_images, test_labels = load(arguments.data)
    parts = split(arguments.data, alpha, seed)
    order = np.random.default_rng(derive_seed(seed, 1)).permutation(CLIENTS)
    malicious = [list(parts)[place] for place in order[:number]]
    clients = {}
    for client, indices in parts.items():
        of_client = labels[indices]
        is_wrong = attack == "label flip" and client in malicious
        clients[client] = TensorDataset(images[indices], flip_labels(of_client, 10) if is_wrong else of_client)
    method = build_method(RULES[rule][0].format(f=number))
    # The first applied mixture is the outermost. The malicious clients are outside the outermost mixture.
    steps: list[UpdateStep] = [MIXTURES[mixture](number) for mixture in reversed(rule.split(", ")[:-1])]
    if rule == "fltrust":
        clients["server"] = TensorDataset(images[IMAGES:], labels[IMAGES:])
    step = ATTACKS[attack](malicious) if number and attack != NONE else None
    if step is not None:
        steps.append(step)
    L.seed_everything(seed, verbose=False)
    task = ClassificationTask("mlp", 10, 1, 28, lr=LR)
    trainer = FederatedTrainer(
        method,
        max_rounds=1 if arguments.quick else ROUNDS,
        local_steps=STEPS,
        visits=Vectorized(CLIENTS + 1),
        faults=Faults(max_failed_rounds=None),  # a diverged model ends with the current accuracy
        seed=seed,
        steps=steps,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(task, datamodule=FederatedDataModule(clients, batch_size=BATCH, drop_last=True))
    task.eval()
    with torch.no_grad():
        logits = torch.cat([task(batch) for (batch,) in DataLoader(TensorDataset(test_images), 500)])
    excluded = float(trainer.callback_metrics.get("fed/excluded", torch.tensor(float("nan"))))
    return {
        "accuracy": float((logits.argmax(1) == test_labels).double().mean()),
        "excluded": excluded if excluded == excluded else None,
        "machine": machine(arguments.threads),
    }


def names(arguments: argparse.Namespace) -> list[str]:
    if arguments.quick:
        return [name_of(rule, "ALIE 1.5", SHOWN, 0.5) for rule in ("fedavg", "krum", "fltrust")]
    made = []
    for alpha in arguments.alphas:
        for rule in arguments.rules:
            most = RULES[rule][1]
            made.append(name_of(rule, NONE, 0, alpha))
            made += [
                name_of(rule, attack, number, alpha) for number in NUMBERS[1:] if number <= most for attack in ATTACKS
            ]
    return made


def report(results: dict[str, list[dict[str, Any]]], alpha: float) -> str:
    """Table of the worst case by number of malicious clients, and table of all attacks for one number."""
    means = {parse(name): statistics.fmean(run["accuracy"] for run in found) for name, found in results.items()}
    worst_rows, rows = [], []
    attacks = [attack for attack in ATTACKS if any(key[1:] == (attack, SHOWN, alpha) for key in means)]
    for rule in RULES:
        cells = []
        for number in NUMBERS:
            scores = {key[1]: value for key, value in means.items() if (key[0], *key[2:]) == (rule, number, alpha)}
            worst = min(scores, key=scores.__getitem__, default=None)
            cells.append("" if worst is None else f"{scores[worst]:.3f}" + (f" ({worst})" if number else ""))
        worst_rows.append([f"`{rule}`", *cells])
        found = [results.get(name_of(rule, attack, SHOWN, alpha), []) for attack in attacks]
        if any(found):
            rows.append([f"`{rule}`", *(spread([run["accuracy"] for run in runs]) for runs in found)])
    header = ["rule", *(f"f = {number}" for number in NUMBERS)]
    return (
        f"Dirichlet {alpha}, worst case over the attacks, the attack in brackets:\n\n{table(header, worst_rows)}\n\n"
        f"Dirichlet {alpha}, {SHOWN} malicious clients, mean ± standard deviation over seeds:\n\n"
        f"{table(['rule', *attacks], rows)}"
    )


def main() -> None:
    made = parser(__doc__.splitlines()[0], seeds=(0, 1, 2))
    made.add_argument("--alphas", type=float, nargs="+", default=list(ALPHAS), help="Dirichlet's concentrations")
    made.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES), help="rules that are trained")
    arguments = made.parse_args()
    prepare(arguments)
    warnings.filterwarnings("ignore", message="You defined a `validation_step` but have no")
    results = run_all("robust", names(arguments), run, arguments)
    if not results:
        return
    if arguments.quick:
        arguments.alphas = [0.5]
    runs = [found for several in results.values() for found in several]
    text = (
        f"`python benchmarks/robust.py --data DATA --alphas {' '.join(map(str, arguments.alphas))} --out"
        f" benchmarks/results/robust.md`. Fashion-MNIST, {IMAGES:,} images, an MLP with 64 hidden units; {CLIENTS}"
        f" clients, Dirichlet per class, all in every round; {ROUNDS} rounds of {STEPS} steps with {BATCH} images, SGD"
        f" with a rate of {LR} (not tuned); `fltrust` has {TRUSTED} images of its own. Accuracy on {TEST:,} other"
        f" images, means over {len(arguments.seeds)} seeds. An empty cell: the rule does not tolerate so many."
        f" {runs[0]['machine']}."
    )
    sections = [report(results, alpha) for alpha in arguments.alphas]
    write_section(arguments.out, "robust", "\n\n".join([text, *sections]))


if __name__ == "__main__":
    main()
