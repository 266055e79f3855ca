"""Segmentation scores by client and class, and pictures of each client's worst and median image."""

from __future__ import annotations

import logging
import math
import os
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fed.argument_checks import check_count
from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.callbacks.evaluation.client_evaluation import NO_CLIENTS, loaders_of
from lightning_fed.callbacks.evaluation.data_pass import limited_batches
from lightning_fed.callbacks.evaluation.tables import csv_text
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.callbacks.picture_grid import checked_colors, default_colors, titled_grid
from lightning_fed.callbacks.pictures import draw_matrix, log_picture, save_picture
from lightning_fed.callbacks.segmentation_images import segmentation_logits, with_background
from lightning_fed.callbacks.training_trace import LabelDescription, describe_labels
from lightning_fed.console import markdown_table, round_number
from lightning_fed.data.federated import ChainedLoaders, split_loaders
from lightning_fed.data.population import seeded_generators
from lightning_fed.errors import ClientFault
from lightning_fed.features.batches import BatchKey, find_inputs, find_target
from lightning_fed.features.isolated_pass import isolated_pass, prepare_batch
from lightning_fed.features.label_maps import VoidLabel, void_label
from lightning_fed.messages import Client
from lightning_fed.metrics.functional.entropy import softmax_entropy
from lightning_fed.metrics.segmentation import SegmentationScores

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_log = logging.getLogger(__name__)

_COLUMNS = ("rounds", "clients", "classes", "iou", "dice")
_CELL = 14  # pixels per cell of a heat map without axes


class ClientSegmentations(L.Callback):
    """Scores the segmentations of each client by class, and draws the worst and the median image.

    Every ``every_n_epochs`` rounds, and in ``trainer.validate``, the global model runs on each client's validation
    data, with the client's personal parameters. The callback writes these files to ``folder``, and the pictures also to
    TensorBoard:

    - ``scores.csv``: intersection over union (IoU) and Dice by round, client and class;
    - ``scores.md``: the last scores as a table, also logged at the end of a fit;
    - ``iou.png``: heat map with the IoU by client and class over the rounds;
    - ``clients/<client>.png``: the images with the lowest and the median IoU, next to true mask, prediction and
      prediction entropy.

    The module receives images, shape ``(N, C, H, W)``, and returns logits ``(N, num_classes, H, W)``. For a binary task
    the logits have shape ``(N, 1, H, W)``, and scores are for class 1 only. Masks contain class indices, shape ``(N, H,
    W)`` or ``(N, 1, H, W)``. With one mask per class, shape ``(N, num_classes, H, W)``, scores are computed without
    pictures. The callback's state has one entry per row in ``scores.csv``.

    Args:
        every_n_epochs: Rounds between two evaluations.
        folder: Folder for the files; by default ``segmentation`` next to the Trainer's logs.
        class_names: Class names, or the name of class 1 in a binary task; by default ``class_names`` or ``classes`` of
            the module or the datamodule.
        class_colors: Red, green and blue (0 to 255) of each class; by default ``class_colors`` of the module or the
            datamodule, or a palette.
        mean: Mean subtracted by the data pipeline, one number or one per channel.
        std: Standard deviation used as divisor by the data pipeline, one number or one per channel.
        ignore_index: Class index of pixels without a label, or ``None``. ``"auto"``: in a fit, the label ignored by the
            loss, else 255 unless 255 is a class.
        inputs: Index, key or function for the images in a batch; by default common positions are tried.
        target: Index, key or function for the masks in a batch; by default the labels used in the loss. The default
            needs a fit before ``trainer.validate``.

    Raises:
        ValueError: If ``every_n_epochs`` is below 1, or ``class_colors`` has an invalid colour.
        MisconfigurationException: In ``fit`` and ``validate``, if the Trainer has no federation, or if masks are
            not found or contain an unknown label.

    Example:
        >>> callback = ClientSegmentations(every_n_epochs=10, class_names=["background", "tumour"])
    """

    needs_local_clients = "the callback draws pictures of client data"
    tag = "segmentation"
    """Prefix for the image names in TensorBoard."""

    def __init__(
        self,
        every_n_epochs: int = 5,
        folder: str | os.PathLike[str] | None = None,
        class_names: Sequence[str] = (),
        class_colors: Sequence[Sequence[int]] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        ignore_index: VoidLabel = "auto",
        inputs: BatchKey = None,
        target: BatchKey = None,
    ) -> None:
        self.every_n_epochs = check_count("every_n_epochs", every_n_epochs)
        self.folder = None if folder is None else Path(folder)
        self.class_names = tuple(class_names)
        self.class_colors = checked_colors(class_colors)
        self.mean, self.std, self.ignore_index = mean, std, ignore_index
        self.inputs: BatchKey = inputs
        self.target: BatchKey = target
        self.rows: list[tuple[int, str, str, float, float]] = []
        self._has_warned = False
        self._labels = LabelDescription(target, ignore_index, self.class_names)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage in ("fit", "validate"):
            find_federation(trainer)
        if stage == "fit" and trainer.current_epoch == 0:  # false if the fit is resumed
            self.rows = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = describe_labels(trainer, pl_module, "ClientSegmentations", self.target, self.ignore_index)
        self._labels = found._replace(class_names=self.class_names or found.class_names)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or (trainer.state.fn == "fit" and not self._is_time(trainer)):
            return
        loaders = self._loaders(trainer)
        if not trainer.is_global_zero or not loaders or not self._labels.is_known("ClientSegmentations"):
            return
        folder, round = self.output_folder(trainer), self._round(trainer)
        self.rows = [row for row in self.rows if row[0] != round]  # set by an earlier validation with the same model
        folder.mkdir(parents=True, exist_ok=True)
        with torch.inference_mode(False), find_federation(trainer).own_models(pl_module) as load:
            for client, loader in loaders.items():
                try:
                    load(client)
                    with seeded_generators(), isolated_pass(pl_module, is_reloaded=True, is_muted=False):
                        self._evaluate(trainer, pl_module, client, loader, folder)
                except ClientFault as fault:
                    _log.warning("Client %r is excluded from the segmentation scores: %s.", client, fault)
        self._write(folder)
        if not self.rows:  # images without any class
            return
        picture = heat_map(self.rows, self.class_order())
        save_picture(picture, folder / "iou.png")
        log_picture(trainer, f"{self.tag}/client_iou", picture)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.rows and trainer.is_global_zero:
            _log.info(
                "Segmentation scores of the clients after round %d:\n\n%s", round_number(self.rows[-1][0]), self.table()
            )

    def table(self) -> str:
        """Formats the last scores as a Markdown table with a row per client."""
        last = [row for row in self.rows if row[0] == self.rows[-1][0]] if self.rows else []
        clients = list(dict.fromkeys(row[1] for row in last))
        classes = self.class_order()
        lines = [["client", "mIoU", "mDice", *classes]]
        for client in clients:
            client_rows = {row[2]: row[3:] for row in last if row[1] == client}
            means = [sum(scores[kind] for scores in client_rows.values()) / len(client_rows) for kind in range(2)]
            shown = [f"{client_rows[name][0]:.3f}" if name in client_rows else "-" for name in classes]
            lines.append([client, *(f"{mean:.3f}" for mean in means), *shown])
        return markdown_table(lines)

    def state_dict(self) -> dict[str, Any]:
        return {name: [row[place] for row in self.rows] for place, name in enumerate(_COLUMNS)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(zip(*(state_dict[name] for name in _COLUMNS), strict=True))

    def _is_time(self, trainer: L.Trainer) -> bool:
        last = self.rows[-1][0] if self.rows else None
        return last is None or trainer.current_epoch - last >= self.every_n_epochs

    def _loaders(self, trainer: L.Trainer) -> Mapping[Client, Iterable[Any]]:
        loaders = loaders_of(trainer, "validation")
        if not loaders and not self._has_warned:
            self._has_warned = True
            _log.warning("`ClientSegmentations` %s", NO_CLIENTS)
        return {client: ChainedLoaders(split_loaders(data)) for client, data in loaders.items()}

    def output_folder(self, trainer: L.Trainer) -> Path:
        return self.folder or Path(trainer.log_dir or trainer.default_root_dir) / "segmentation"

    def _evaluate(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, loader: Iterable[Any], folder: Path
    ) -> None:
        metric: SegmentationScores | None = None
        quality: list[float] = []
        for batch in limited_batches(loader, trainer.limit_val_batches):
            logits, _, mask = self._run(trainer, module, batch)
            if metric is None:
                metric = scores_for(logits, mask, self._void_of(logits), self._names(logits.shape[1]))
            metric.update(logits, mask)
            if metric.mode == "multilabel":
                continue
            quality += [self._quality(logits[index : index + 1], mask[index : index + 1]) for index in range(len(mask))]
        if metric is None:
            return
        scores = {name: float(value) for name, value in metric.compute().items()}
        round = self._round(trainer)
        for name in metric.class_names:
            if f"iou/{name}" in scores:
                self.rows.append((round, str(client), name, scores[f"iou/{name}"], scores[f"dice/{name}"]))
        known = sorted((value, position) for position, value in enumerate(quality) if not math.isnan(value))
        if known:
            (worst, first), (median, middle) = known[0], known[(len(known) - 1) // 2]
            chosen = {first: f"worst, IoU {worst:.2f}"}
            chosen.setdefault(middle, f"median, IoU {median:.2f}")
            self._draw(trainer, module, client, loader, chosen, folder)

    def _draw(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        client: Client,
        loader: Iterable[Any],
        chosen: Mapping[int, str],
        folder: Path,
    ) -> None:
        tensors_by_position: dict[int, list[Tensor]] = {}
        names: list[str] = []
        void: int | None = None
        start = 0
        for batch in limited_batches(loader, trainer.limit_val_batches):
            if start > max(chosen):
                break
            size = len(find_inputs(batch, self.inputs))
            positions = [position for position in chosen if start <= position < start + size]
            if positions:
                raw_logits, inputs, mask = self._run(trainer, module, batch)
                logits = with_background(raw_logits)
                names, void = self._names(raw_logits.shape[1]), self._void_of(raw_logits)
                if len(names) < logits.shape[1]:
                    names = [*(self._labels.class_names[:-1][:1] or ("background",)), *names]
                entropy = softmax_entropy(logits, normalize=True)
                for position in positions:
                    row = position - start
                    tensors = inputs[row], mask[row], logits[row].argmax(0), entropy[row]
                    tensors_by_position[position] = [tensor.detach().cpu().clone() for tensor in tensors]
            start += size
        images, truths, predictions, entropies = zip(
            *(tensors_by_position[position] for position in chosen), strict=True
        )
        colors = self.class_colors or self._labels.class_colors or default_colors(len(names))
        title = f"client {client}, round {round_number(self._round(trainer))}"
        rows, maps = [*chosen.values()], {"entropy": entropies}
        picture = titled_grid(images, truths, predictions, title, rows, names, colors, void, self.mean, self.std, maps)
        save_picture(picture, picture_path(folder, client))
        log_picture(trainer, f"{self.tag}/clients/{client}", picture)

    def _run(self, trainer: L.Trainer, module: L.LightningModule, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        prepared = prepare_batch(trainer, module, batch)
        images, mask = find_inputs(prepared, self.inputs), find_target(prepared, self._labels.target)
        with trainer.precision_plugin.forward_context():
            logits = segmentation_logits(module, images).float()
        mask = mask.squeeze(1) if mask.ndim == 4 and mask.shape[1] == 1 else mask
        if mask.ndim != 3 and mask.shape != logits.shape:
            raise MisconfigurationException(
                f"Expected masks of shape (N, H, W), or of the logits' shape {tuple(logits.shape)}, for "
                f"`ClientSegmentations`, but got {tuple(mask.shape)}."
            )
        count, labels, void = logits.shape[1], mask.long(), self._void_of(logits)
        is_unknown = (labels < 0) | (labels >= (2 if mask.ndim == 4 else max(2, count)))
        unknown = labels[is_unknown if void is None else is_unknown & (labels != void)]
        if len(unknown):
            raise MisconfigurationException(
                f"Expected masks to contain the {max(2, count)} classes of the module's logits, but got the label "
                f"{int(unknown[0])}: to ignore this label, set `ignore_index` of `ClientSegmentations`."
            )
        return logits, images, labels

    def _quality(self, logits: Tensor, mask: Tensor) -> float:
        metric = scores_for(logits, mask, self._void_of(logits))
        metric.update(logits, mask)
        return float(metric.compute().get("miou", math.nan))

    def _write(self, folder: Path) -> None:
        rows = [(round_number(round), *scores) for round, *scores in self.rows]
        write_text_atomically(folder / "scores.csv", csv_text([("round", "client", "class", "iou", "dice"), *rows]))
        write_text_atomically(folder / "scores.md", self.table() + "\n")

    def _void_of(self, logits: Tensor) -> int | None:
        return void_label(self._labels.void, max(2, logits.shape[1]))

    def _names(self, num_logits: int) -> list[str]:
        names = self._labels.class_names
        if num_logits == 1:
            return [*(names[1:2] or names or ("1",))]
        return [*names[:num_logits], *map(str, range(len(names), num_logits))]

    def _round(self, trainer: L.Trainer) -> int:
        return trainer.current_epoch - (trainer.state.fn != "fit")

    def class_order(self) -> list[str]:
        names, last = self._labels.class_names, {row[2] for row in self.rows if row[0] == self.rows[-1][0]}
        return sorted(last, key=lambda name: names.index(name) if name in names else int(name))


def scores_for(
    logits: Tensor, mask: Tensor, ignore_index: int | None, class_names: Sequence[str] | None = None
) -> SegmentationScores:
    """Creates a metric for IoU and Dice by class, with the device and number of classes of ``logits``."""
    count = logits.shape[1]
    several: Literal["multiclass", "multilabel"] = "multilabel" if mask.ndim == 4 else "multiclass"
    return SegmentationScores(
        count, "binary" if count == 1 else several, ignore_index=ignore_index, class_names=class_names
    ).to(logits.device)


def heat_map(rows: Sequence[tuple[int, str, str, float, float]], class_order: Sequence[str] = ()) -> Tensor:
    """Draws the IoU in ``rows`` (round, client, class, IoU, Dice). Shape ``(3, H, W)``, uint8. Missing IoU is grey."""
    rounds = sorted({row[0] for row in rows})
    clients, classes = list(dict.fromkeys(row[1] for row in rows)), [*class_order, *(row[2] for row in rows)]
    pairs = sorted(
        {(row[1], row[2]) for row in rows}, key=lambda pair: (clients.index(pair[0]), classes.index(pair[1]))
    )
    places = {pair: place for place, pair in enumerate(pairs)}
    values = torch.full((len(pairs), len(rounds)), math.nan)
    for round, client, name, iou, _ in rows:
        values[places[client, name], rounds.index(round)] = iou

    def label(axes: Axes) -> None:
        axes.set_aspect("auto")
        every = math.ceil(len(rounds) / 20)
        axes.set_xticks(range(0, len(rounds), every), [str(round_number(round)) for round in rounds[::every]])
        axes.set_yticks(range(len(pairs)), [f"{client} · {name}" for client, name in pairs], fontsize=7)
        for place in range(1, len(pairs)):
            if pairs[place][0] != pairs[place - 1][0]:
                axes.axhline(place - 0.5, color="white", linewidth=1.5)
        axes.set(xlabel="round", title="IoU by client and class")

    return draw_matrix(values, _CELL, (4 + 0.3 * len(rounds), 1.2 + 0.2 * len(pairs)), label)


def picture_path(folder: Path, client: Client) -> Path:
    """Path of a client's picture in the callback's folder."""
    return folder / "clients" / f"{urllib.parse.quote(str(client), safe=' ')}.png"
