"""Seconds for matching a layer's neurons, compared with plain loops over neurons; and for finding a module's groups.

Both match the same clients from the same state. Like the published programs, the plain loops make a NumPy table over
all global neurons for every neuron: the time per neuron is measured on some neurons and multiplied.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import segmentation_models_pytorch as smp
import torch
import torchvision
from common import load_json, machine, parser, prepare, save_json, table, version, write_section
from scipy.optimize import linear_sum_assignment

from lightning_fed.matching import PermutationGroups, match_neurons

CLIENTS = 16
LAYERS = {  # VGG-9 on CIFAR-10: neurons, weights per neuron
    "conv 1": (32, 28),
    "conv 2": (64, 289),
    "conv 3": (128, 577),
    "conv 4": (128, 1153),
    "conv 5": (256, 1153),
    "conv 6": (256, 2305),
    "linear 1": (512, 4097),
    "linear 2": (512, 513),
}
WIDE = {"1024 x 2304": (1024, 2304), "2048 x 4608": (2048, 4608)}
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "ResNet-18": lambda: torchvision.models.resnet18(num_classes=10),
    "MobileNetV2": lambda: torchvision.models.mobilenet_v2(num_classes=10),
    "Unet, ResNet-18": lambda: smp.Unet("resnet18", encoder_weights=None, classes=4),
    "DeepLabV3Plus, ResNet-18": lambda: smp.DeepLabV3Plus("resnet18", encoder_weights=None, classes=4),
    "DeepLabV3Plus, ResNet-50": lambda: smp.DeepLabV3Plus("resnet50", encoder_weights=None, classes=4),
}


def random_clients(count: int, neurons: int, numbers: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    # small weights without common neurons, as in the published prior
    return [0.05 * torch.randn(neurons, numbers, generator=generator) for _ in range(count)]


def shared_clients(count: int, neurons: int, numbers: int) -> list[torch.Tensor]:
    """Weights with three quarters of the neurons common to all clients, except for noise."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(3 * neurons // 4, numbers, generator=generator)
    clients = []
    for _ in range(count):
        own = torch.randn(neurons - len(common), numbers, generator=generator)
        noise = 0.5 * torch.randn(neurons, numbers, generator=generator)
        clients.append((torch.cat([common, own]) + noise)[torch.randperm(neurons, generator=generator)])
    return clients


def loop_scores(rows: np.ndarray, sums: np.ndarray, owners: np.ndarray, clients: int) -> np.ndarray:
    """Scores for all pairs of local and global neurons, row by row, with unit variances."""
    scores = np.empty((len(rows), len(sums)), np.float32)
    precisions = 1.0 + owners[:, None]
    popularity = np.log(np.minimum(owners, 10) / (clients - np.minimum(owners, 10)))
    same = popularity - (sums**2 / precisions).sum(1)  # the programs compute this for every neuron, too
    for place, row in enumerate(rows):
        scores[place] = ((sums + row) ** 2 / (precisions + 1)).sum(1) + same
    return scores


def seconds(work: Callable[[], Any], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return float(np.median(times))


def measure_layer(neurons: int, numbers: int, clients: int, passes: int, repetitions: int) -> dict[str, float]:
    own = random_clients(clients, neurons, numbers)
    match = None

    def ours() -> None:
        nonlocal match
        match = match_neurons(own, np.random.default_rng(0), "published", passes=passes)

    whole = seconds(ours, repetitions)
    assignments = clients - 1 + clients * match.passes
    # the state before a match in the last pass
    owners = np.minimum(match.owners.numpy(), clients - 1).astype(np.float32)
    sums = (match.means.numpy() * owners[:, None]).astype(np.float32)
    rows = own[0].numpy()[: max(2, min(neurons, 40_000_000 // sums.size))]
    loop = seconds(lambda: loop_scores(rows, sums, owners, clients), repetitions) / len(rows) * neurons
    benefit = np.random.default_rng(0).normal(size=(neurons, len(owners) + 1))
    solver = seconds(lambda: linear_sum_assignment(benefit, maximize=True), 1)
    shared = shared_clients(clients, neurons, numbers)
    marginal = seconds(lambda: match_neurons(shared, np.random.default_rng(0), passes=passes), 1)
    return {
        "ours": whole,
        "marginal": marginal,
        "loops": assignments * (loop + solver),
        "width": len(owners),
        "passes": match.passes,
    }


def measure_model(make: Callable[[], torch.nn.Module], repetitions: int) -> dict[str, float]:
    """Seconds to find and verify a module's permutation groups."""
    module, example = make(), torch.randn(2, 3, 64, 64)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        took = seconds(lambda: found.append(PermutationGroups.of(copy.deepcopy(module), example)), repetitions)
    groups = found[-1]
    return {
        "seconds": took,
        "groups": len(groups),
        "neurons": sum(groups.sizes.values()),
        "growable": sum(group.is_growable for group in groups),
        "parameters": sum(value.numel() for value in module.parameters()),
    }


def measure(passes: int, repetitions: int, quick: bool) -> dict[str, Any]:
    results: dict[str, Any] = {"layers": {}, "models": {}, "version": version(), "passes": passes}
    for name, (neurons, numbers) in [*LAYERS.items(), *WIDE.items()]:
        if quick and neurons > 128:
            continue
        clients = CLIENTS if name in LAYERS else 4
        result = measure_layer(neurons, numbers, clients, passes, repetitions if neurons < 512 else 1)
        results["layers"][name] = result | {"neurons": neurons, "numbers": numbers, "clients": clients}
        print(name, results["layers"][name], flush=True)
    for name, make in MODELS.items():
        if not quick or name == "ResNet-18":
            results["models"][name] = measure_model(make, repetitions)
            print(name, results["models"][name], flush=True)
    return results


def report(results: dict[str, Any], threads: int) -> str:
    rows: list[Sequence[str]] = []
    for name, one in results["layers"].items():
        rows.append(
            [
                name,
                f"{one['clients']}",
                f"{one['neurons']:,} x {one['numbers']:,}",
                f"{one['width']:,}",
                f"{one['passes']}",
                f"{one['ours']:.2f}",
                f"{one['loops']:.1f}",
                f"{one['loops'] / one['ours']:.0f}",
                f"{one['marginal']:.2f}",
            ]
        )
    vgg = [one for name, one in results["layers"].items() if name in LAYERS]
    ours, loops, marginal = (sum(one[kind] for one in vgg) for kind in ("ours", "loops", "marginal"))
    rows.insert(
        len(vgg),
        [
            "VGG-9 in all",
            f"{CLIENTS}",
            "",
            "",
            "",
            f"{ours:.1f}",
            f"{loops:.0f}",
            f"{loops / ours:.0f}",
            f"{marginal:.1f}",
        ],
    )
    header = [
        "layer",
        "clients",
        "neurons x numbers",
        "global",
        "passes",
        "s, ours",
        "s, loops",
        "loops / ours",
        "s, marginal",
    ]
    words = (
        f"`python benchmarks/matching.py --out benchmarks/results/method_costs.md`."
        f" {machine(threads)}. The published score, all"
        f" variances 1, gamma 7, random weights, at most {results['passes']} passes. Process seconds of a whole"
        " matching; the loops' for the same assignments, from the time of some of their rows (without what is the same"
        " for all of them, which the programs compute every time) and of the solver."
        " *Marginal* is the marginal score with estimated variances, on clients that share three of four neurons."
    )
    models = [
        [
            name,
            f"{one['parameters'] / 1e6:.1f}",
            f"{one['groups']:.0f}",
            f"{one['neurons']:,.0f}",
            f"{one['growable']:.0f}",
            f"{one['seconds']:.1f}",
        ]
        for name, one in results["models"].items()
    ]
    columns = ["module", "million parameters", "groups", "neurons", "growable groups", "s"]
    found = (
        "Process seconds of `PermutationGroups.of`, with two random images of 64 x 64: reading off the operations,"
        " following the neurons, and trying the groups out."
    )
    return f"{words}\n\n{table(header, rows)}\n\n{found}\n\n{table(columns, models)}"


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False)
    made.add_argument("--passes", type=int, default=5, help="most passes over the clients")
    made.add_argument("--repetitions", type=int, default=3, help="repetitions of what is short")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.repetitions = 1
    path = arguments.runs / "matching.json"
    results = load_json(path) or measure(arguments.passes, arguments.repetitions, arguments.quick)
    save_json(path, results)
    write_section(arguments.out, "matching", report(load_json(path), arguments.threads))


if __name__ == "__main__":
    main()
