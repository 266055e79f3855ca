"""BatchNorm in segmentation across clients with different image appearance, compared with central and local training.

Settings: generated scenes with a different camera per client (mild, strong, or negatives for every second client),
CamVid by drive, and scenes with few classes per client. Networks: DeepLabV3+ with ResNet-18 from scratch, or a U-Net
with an ImageNet-pretrained EfficientNet-Lite0 encoder (``--weights``).

The treatments `average`, `recalibrate` and `silobn` train equal weights; only the running statistics differ. The
weights of `silobn` are scored with several statistics: from each client's last visit (`own`), measured for each client
after the last aggregation (`measured`), and pooled; for data without a client, from each batch (`batch`) or from the
test images of one loader (`data`), with one loader per client or a single loader for all clients (`mixed`).
"""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import QUIET, Curve, load_json, machine, parser, picture, prepare, save_json, spread, table, write_section
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fed import FederatedTrainer, FixedStatistics
from lightning_fed.algorithms import Ditto, FedMargin, FedRep
from lightning_fed.data import IID, ByGroup, Dirichlet, Look, Partition, PartitionedData
from lightning_fed.datasets import CamVid, Shapes
from lightning_fed.method import Method
from lightning_fed.metrics import SegmentationScores
from lightning_fed.modules import UnseenStatistics, recalibrate_batch_norm
from lightning_fed.report.figures import save_figure
from lightning_fed.tasks import SegmentationTask

EPOCHS, BATCH, CLIENTS = 2, 8, 6
ROUNDS = {"scratch": 20, "pretrained": 10, "untrained": 10}  # `untrained`: the pretrained network without weights
SHAPES_MEAN, SHAPES_STD = 0.47, 0.22
LOOKS: dict[str, dict[str, float]] = {
    "mild": {"contrast": 0.3, "colour": 0.2, "noise": 0.03},
    "weak": {"contrast": 0.6, "colour": 0.4, "blur": 0.3, "noise": 0.05},
    "medium": {"contrast": 1.0, "colour": 0.7, "blur": 0.6, "noise": 0.07},
    "strong": {"contrast": 1.5, "colour": 1.0, "blur": 1.0, "noise": 0.1},
    "polarity": {"contrast": 0.3, "colour": 0.2, "noise": 0.03, "polarity": 0.5},
}
ALPHAS = ("0.01", "0.1", "1", "100")
SETTINGS = ("alike", *LOOKS, "drives", *(f"classes {alpha}" for alpha in ALPHAS))
TREATMENTS: dict[str, dict[str, Any]] = {
    "average": {"batch_norm": "average"},
    "recalibrate": {"batch_norm": "recalibrate"},
    "silobn": {"method": "silobn"},
    "fixed": {},  # after half of the rounds
    "personal": {"batch_norm": "personal"},
    "frozen": {"batch_norm": "frozen"},
    "group": {},
}
METHODS: dict[str, Callable[[], Method]] = {  # with the default statistics, and two epochs per visit
    "fedmargin": FedMargin,
    "fedrep": lambda: FedRep(head_epochs=1, body_epochs=1),
    "ditto": lambda: Ditto(local_epochs=1, personal_epochs=1),
}
OWN = ("silobn", "personal", "fedrep", "ditto")  # methods with a state per client
NAMES = ("background", "central", "alone", *TREATMENTS)
AGAINST = ("central", "average")


class Background(nn.Module):
    """Baseline: predicts class 0 everywhere."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes

    def forward(self, images: Tensor) -> Tensor:
        return torch.eye(self.num_classes)[:, 0].view(1, -1, 1, 1).repeat(len(images), 1, *images.shape[2:])


class NearestStatistics(UnseenStatistics):
    """Normalises each example with the statistics of the known client with the largest likelihood.

    The likelihood models the first BatchNorm layer's inputs as independent normal variables.

    Args:
        module: The module.
        states: States of the known clients.
    """

    def __init__(self, module: nn.Module, states: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(module)
        self._states = states
        self._first = ""
        self._nearest: Any = None

    def statistics(self, name: str, layer: nn.BatchNorm2d, values: Tensor) -> tuple[Tensor, Tensor]:
        means, variances = (
            torch.stack([state[f"{name}.{entry}"].to(values) for state in self._states])
            for entry in ("running_mean", "running_var")
        )
        self._first = self._first or name
        if name == self._first:
            spread = variances + layer.eps
            moments = values.var(2, correction=0) + (values.mean(2) - means[:, None]).square()  # (clients, N, C)
            self._nearest = (spread.log().sum(1, keepdim=True) + (moments / spread[:, None]).sum(2)).argmin(0)
        return means[self._nearest], variances[self._nearest]


def data_of(setting: str, seed: int, arguments: argparse.Namespace) -> tuple[PartitionedData, int]:
    """Returns a setting's clients, each with test data, and the number of classes."""
    source: L.LightningDataModule
    partition: Partition
    if setting == "drives":
        if arguments.data is None:
            raise SystemExit("CamVid by drive needs --data.")
        source = CamVid(arguments.data, image_size=(96, 128), batch_size=BATCH, val_size=0)
        partition, classes = ByGroup(), 11
    else:
        skewed = setting.startswith("classes")
        source = Shapes(
            num_train=arguments.scenes, num_val=0, num_test=1, image_size=arguments.side, batch_size=BATCH,
            dominant=1.0 if skewed else 0.7, seed=seed,
        )  # fmt: skip
        partition, classes = IID(CLIENTS), 6
        if skewed:
            partition = Dirichlet(CLIENTS, float(setting.split()[1]), "per_client")
        elif setting in LOOKS:
            partition = Look(partition, **LOOKS[setting], mean=SHAPES_MEAN, std=SHAPES_STD)
    data = PartitionedData(source, partition, val_fraction=0.05, test_fraction=0.25, seed=seed)
    data.setup("fit")
    return data, classes


def task_of(classes: int, norm: str, seed: int, start: str, arguments: argparse.Namespace) -> SegmentationTask:
    L.seed_everything(seed, verbose=False)
    optimizer: dict[str, Any] = {"optimizer": "AdamW", "lr": 0.002, "norm": norm}
    if arguments.small:
        small = {"encoder_depth": 3, "decoder_channels": (16, 8, 8)}
        return SegmentationTask("Unet", classes, encoder_name="resnet18", model_kwargs=small, **optimizer)
    if start == "scratch":
        return SegmentationTask("DeepLabV3Plus", classes, encoder_name="resnet18", **optimizer)
    weights = str(arguments.weights) if start == "pretrained" else None
    return SegmentationTask(
        "Unet", classes, encoder_name="tu-tf_efficientnet_lite0", encoder_weights=weights, **optimizer
    )


def scores_of(
    task: Any, states: Mapping[Any, Mapping[str, Any]], data: Any, serve: Any = None, is_mixed: bool = False
) -> dict[str, Any]:
    """Mean IoU for each client's test data with the client's state, and over all clients.

    Args:
        task: The model.
        states: Client to evaluated state.
        data: The clients' test data.
        serve: States of known clients, for :class:`NearestStatistics`; ``"batch"`` for :class:`UnseenStatistics`;
            ``None`` for running statistics.
        is_mixed: Whether all clients' images share batches. Then all clients have the same state.
    """
    whole = SegmentationScores(task.num_classes)
    own = {str(client): SegmentationScores(task.num_classes) for client in data.test}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    task.to(device).eval()
    adapter = None
    if serve is not None:
        adapter = UnseenStatistics(task) if serve == "batch" else NearestStatistics(task, serve)
    parts = {client: [(str(client), *sample) for sample in dataset] for client, dataset in data.test.items()}
    if is_mixed:
        samples = list(itertools.chain(*parts.values()))
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
        parts = {next(iter(parts)): [samples[place] for place in order]}
    for client, samples in parts.items():
        task.load_state_dict(states[client])
        for names, images, masks in DataLoader(samples, BATCH):
            with torch.no_grad():
                logits = task(images.to(device)).cpu()
            whole.update(logits, masks)
            for place, name in enumerate(names):
                own[name].update(logits[place : place + 1], masks[place : place + 1])
    if adapter is not None:
        adapter.remove()
    task.cpu()
    values = {name: score.compute() for name, score in own.items()}
    return {
        "all": float(whole.compute()["miou"]),
        "clients": {name: float(value["miou"]) for name, value in values.items()},
        "dice": {name: float(value.get("dice/1", 0.0)) for name, value in values.items()},
    }


def run(name: str, setting: str, start: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains once and evaluates with all statistics of the treatment."""
    data, classes = data_of(setting, seed, arguments)
    return train(name, data, classes, seed, start, arguments, setting)


def train(
    name: str, data: Any, classes: int, seed: int, start: str, arguments: argparse.Namespace, setting: str
) -> dict[str, Any]:
    rounds, epochs = arguments.rounds or ROUNDS[start], EPOCHS
    task = task_of(classes, "group" if name == "group" else "batch", seed, start, arguments)
    curve = Curve(f"{setting}, {start}, {name}, seed {seed}:")
    clients = list(data.test)
    result: dict[str, Any] = {"name": name, "seed": seed, "machine": machine(arguments.threads)}
    if name == "background":
        result["scores"] = {"": scores_of(Background(classes), {client: {} for client in clients}, data)}
    elif name == "central":
        trainer = L.Trainer(max_epochs=rounds * epochs, callbacks=[curve], limit_val_batches=0, **QUIET)
        trainer.fit(task, data.train_dataloader())
        result["scores"] = {"": scores_of(task, dict.fromkeys(clients, task.state_dict()), data)}
    elif name == "alone":
        states = {}
        for client in clients:
            own = task_of(classes, "batch", seed, start, arguments)
            trainer = L.Trainer(max_epochs=rounds * epochs, limit_val_batches=0, **QUIET)
            trainer.fit(own, DataLoader(data.clients[client], BATCH, shuffle=True, drop_last=True))
            states[client] = {key: value.clone() for key, value in own.state_dict().items()}
        everywhere = {
            str(client): scores_of(task, dict.fromkeys(clients, state), data)["all"] for client, state in states.items()
        }
        result["scores"] = {"": {**scores_of(task, states, data), "everywhere": everywhere}}
    else:
        options = {"method": METHODS[name]()} if name in METHODS else dict(TREATMENTS[name])
        if name not in ("fedrep", "ditto"):  # these methods set the length of visits
            options["local_epochs"] = epochs
        if name == "fixed":
            options["batch_norm"] = FixedStatistics(rounds // 2)
        trainer = FederatedTrainer(
            max_rounds=rounds,
            seed=seed,
            callbacks=[curve],
            limit_val_batches=0,
            **options,
            **QUIET,
        )
        trainer.fit(task, datamodule=data)
        shared = {key: value.clone() for key, value in task.state_dict().items()}
        own_states = {client: trainer.federation.client_state(client) for client in clients}
        result["scores"] = {"": scores_of(task, dict.fromkeys(clients, shared), data)}
        if name in OWN:
            result["scores"] = {"own": scores_of(task, own_states, data)}
        if name == "silobn":
            for way, states in measured_states(task, shared, data).items():
                result["scores"][way] = scores_of(task, states, data)
            everywhere = dict.fromkeys(clients, shared)
            result["scores"]["batch"] = scores_of(task, everywhere, data, "batch")
            result["scores"]["batch, mixed"] = scores_of(task, everywhere, data, "batch", is_mixed=True)
            others = {}  # excludes the evaluated client: simulates an unseen client
            for client in clients:
                known = [state for key, state in own_states.items() if key != client]
                others[str(client)] = scores_of(task, dict.fromkeys(clients, shared), _only(data, client), known)["all"]
            result["scores"]["nearest other"] = {"clients": others}
        result["shift"] = [values.get("fed/batch_norm_shift") for values in curve.rounds]
    result["seconds"] = sum(values["cpu_s"] for values in curve.rounds)
    return result


def measured_states(task: Any, weights: Mapping[str, Tensor], data: Any) -> dict[str, dict[Any, dict[str, Tensor]]]:
    """States with running statistics measured with the final weights, on training or test images."""

    def measure(*datasets: Any) -> dict[str, Tensor]:
        task.load_state_dict(weights)
        loaders = [DataLoader(dataset, BATCH, drop_last=len(dataset) % BATCH == 1) for dataset in datasets]
        recalibrate_batch_norm(task, itertools.chain(*loaders))
        return {key: value.clone() for key, value in task.state_dict().items()}

    clients = list(data.test)
    return {
        "measured": {client: measure(data.clients[client]) for client in clients},
        "pooled": dict.fromkeys(clients, measure(*(data.clients[client] for client in clients))),
        "data": {client: measure(data.test[client]) for client in clients},
        "data, mixed": dict.fromkeys(clients, measure(*data.test.values())),
    }


def _only(data: Any, client: Any) -> Any:
    return argparse.Namespace(test={client: data.test[client]})


def on_all(score: Mapping[str, Any]) -> Any:
    return score.get("all")


def mean_client(score: Mapping[str, Any]) -> Any:
    values = list(score["clients"].values())
    return sum(values) / len(values)


def rows_of(found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Table rows: IoU over all images, mean over clients (each with paired differences), and the worst client."""
    bases = {name: {result["seed"]: result["scores"][""] for result in found.get(name, [])} for name in AGAINST}
    rows = []
    for name, runs in found.items():
        for way in runs[0]["scores"]:
            scores = {result["seed"]: result["scores"][way] for result in runs}
            row = [f"{name}, {way}" if way else name]
            for measure in (on_all, mean_client):
                own = {seed: measure(score) for seed, score in scores.items()}
                row.append(spread([value for value in own.values() if value is not None]) or "-")
                for other, base in bases.items():
                    apart = [
                        100 * (value - measure(base[seed]))
                        for seed, value in own.items()
                        if value is not None and seed in base and other != name
                    ]
                    row.append(spread(apart, 1) or ("" if other == name or not base else "-"))
            worst = [min(score["clients"].values()) for score in scores.values()]
            shift = [result["shift"][-1] for result in runs if result.get("shift") and result["shift"][-1] is not None]
            rows.append([*row, spread(worst), spread(shift, 2) or "-", str(len(runs))])
    return rows


def draw(results: dict[tuple[str, str], dict[str, list[dict[str, Any]]]], path: Path) -> None:
    """Draws the mean IoU over clients, one panel per setting."""
    from matplotlib.figure import Figure

    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(3.4 * columns, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(results) :]:
        axes.set_axis_off()
    for axes, ((setting, start), found) in zip(panels, results.items(), strict=False):
        bars = {}
        for name, runs in found.items():
            for way in runs[0]["scores"]:
                bars[f"{name} {way}".strip()] = sum(mean_client(result["scores"][way]) for result in runs) / len(runs)
        colors = ["tab:grey" if name in ("background", "central", "alone") else "tab:blue" for name in bars]
        axes.barh(range(len(bars)), list(bars.values()), color=colors)
        axes.set_yticks(range(len(bars)), list(bars), fontsize=7)
        axes.invert_yaxis()
        axes.set(title=f"{setting}, {start}", xlim=(0, 1), xlabel="mean IoU")
    save_figure(figure, path)


def main() -> None:
    made = parser(__doc__.splitlines()[0], data=False, seeds=(0, 1, 2))
    made.add_argument("--data", type=Path, default=None, help="folder that holds CamVid, for the setting `drives`")
    made.add_argument("--weights", type=Path, default=None, help="file with ImageNet's EfficientNet-Lite0 weights")
    made.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="settings")
    made.add_argument("--starts", nargs="+", default=[], choices=list(ROUNDS), help="of the weights; else all")
    made.add_argument("--names", nargs="+", default=list(NAMES), choices=NAMES, help="ways to train")
    made.add_argument("--figures", type=Path, default=None, help="folder of the figure")
    made.add_argument("--rounds", type=int, default=0, help=f"rounds; 0 for {ROUNDS}")
    made.add_argument("--scenes", type=int, default=360, help="generated scenes of all clients together")
    made.add_argument("--side", type=int, default=64, help="pixels of a side of a generated scene")
    made.add_argument("--small", action="store_true", help="a U-Net of three stages from scratch in place of both")
    made.add_argument("--section", default="", help="name of the written section, for a part of the table")
    arguments = made.parse_args()
    prepare(arguments)
    if arguments.quick:
        arguments.rounds, arguments.scenes, arguments.side, arguments.small = 2, 60, 32, True
    name = "appearance_small" if arguments.small else "appearance"
    starts = arguments.starts or (["scratch"] if arguments.weights is None else ["scratch", "pretrained"])
    results: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    for seed, start, setting, way in itertools.product(seeds, starts, arguments.settings, arguments.names):
        path = arguments.runs / name / f"{setting} {start} {way} {seed}.json".replace(" ", "_")
        if not path.exists() and not arguments.report:
            save_json(path, run(way, setting, start, seed, arguments))
        if path.exists():
            results.setdefault((setting, start), {}).setdefault(way, []).append(load_json(path))
    if not results:
        return
    runs = [result for found in results.values() for of_name in found.values() for result in of_name]
    every = list(dict.fromkeys(setting for setting, _ in results))
    settings = f" --settings {shlex.join(every)}" if len(every) < len(SETTINGS) else ""
    sizes = {"rounds": 0, "scenes": 360, "side": 64}
    flags = " --small" if arguments.small else ""
    flags += "".join(f" --{key} {getattr(arguments, key)}" for key in sizes if getattr(arguments, key) != sizes[key])
    flags += " --data DATA" if "drives" in every else ""
    flags += " --weights WEIGHTS" if "pretrained" in starts else ""
    flags += f" --names {shlex.join(arguments.names)} --section {arguments.section}" if arguments.section else ""
    rounds = arguments.rounds or " or ".join(f"{ROUNDS[start]} ({start})" for start in starts)
    parts = [
        f"`python benchmarks/appearance.py{flags}{settings}`. {rounds} rounds of"
        f" {EPOCHS} local epochs (central and alone: as many epochs), AdamW, batches of {BATCH}; {CLIENTS} clients of"
        f" {arguments.scenes} scenes of {arguments.side} x {arguments.side} pixels together, or CamVid's three drives."
        " Mean IoU on a quarter of every client's images, held out, in its own look: on all of them together, and as a"
        " mean over clients, each with its differences to central training and to averaged statistics (`average`) in"
        " points, paired by seed; of the worst client; mean ± standard deviation over seeds. Shift: share of the"
        " variance of BatchNorm's inputs between clients, in the layer where it is largest, in the last round."
        " Background: class 0 everywhere."
        f" {'; '.join(dict.fromkeys(result['machine'] for result in runs))}."
    ]
    apart = [f"to {name}" for name in AGAINST]
    header = ["", "all", *apart, "mean client", *apart, "worst client", "shift", "seeds"]
    for (setting, start), found in results.items():
        parts.append(f"**{setting}, {start}**\n\n{table(header, rows_of(found))}")
    if arguments.figures is not None:
        draw(results, arguments.figures / f"{name}.png")
        parts.append(picture(arguments, name, "Mean IoU over clients by treatment of BatchNorm and setting"))
    write_section(arguments.out, arguments.section or name, "\n\n".join(parts))


if __name__ == "__main__":
    main()
