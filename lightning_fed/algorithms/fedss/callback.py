"""FedSS on the clients (Algorithm 1): trains the last layer's rows for some classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_fed.algorithms.fedss.head import SampledSoftmaxHead, find_sampled_softmax_head
from lightning_fed.algorithms.fedss.losses import Objective, sample_negatives
from lightning_fed.algorithms.fedss.sampled_classes import ForeignLabelError, SampledClasses
from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.callbacks.training_trace import find_class_task, has_same_parameters
from lightning_fed.data.population import seeded_generators
from lightning_fed.errors import ClientFault, OptionError, describe
from lightning_fed.features.batches import BatchKey, find_target
from lightning_fed.features.isolated_pass import until_fault
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.lightning.internals import find_callbacks
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request
from lightning_fed.model.entries import layer_entries

ClientClasses: TypeAlias = Mapping[Client, Sequence[int]] | Callable[[Client], Sequence[int]]

_NEGATIVES_STREAM = 2  # random stream of the visit, for negatives


class SampledSoftmax(FederatedCallback):
    r"""Trains clients with only some rows of the last layer.

    The model's last layer is a :class:`~lightning_fed.modules.SampledSoftmaxHead`, with one weight row per class. A
    client's own classes are called positives. Before training, the client draws other classes, called negatives. The
    client receives, trains and returns only the rows of positives and negatives. The mean number of rows is logged as
    ``clients/sampled_classes``. Requested rows are sorted, so the server cannot distinguish positives from negatives in
    one request, but possibly in several. Requests without negatives show the positives. Clients with a label outside
    the client's or the layer's classes are excluded. Reference: FedSS, section 3 and Algorithm 1.

    In ``training_step``, labels become column indices of the logits, and the last layer corrects the logits. Therefore
    ``F.cross_entropy(self(x), y)`` is the FedSS loss. The logits have fewer than ``num_classes`` columns: pass
    ``logits.argmax(dim=1)`` to metrics. Validation and prediction use all classes.

    Args:
        num_negatives: Number of negatives, drawn uniformly without replacement.
        objective: The client's loss, see :func:`~lightning_fed.algorithms.fedss.sampled_softmax_loss`. ``"negonly"`` is
            a softmax over the target and the negatives, ``"posonly"`` over the client's classes. ``"full"`` is the
            softmax over all classes, and each message contains the whole layer.
        resample: Whether to draw negatives once per ``"round"`` or for each ``"batch"``.
        head: Name of the ``SampledSoftmaxHead``, by default the only such layer.
        target: Position of the labels in a batch: an index, a key, or a function. The default is the labels used in the
            loss. Negative labels are ignored.
        classes: The clients' classes, as a mapping or a function. By default, a pass over the data collects the labels.

    Raises:
        ValueError: If an option is invalid, or if the layer or integer labels are missing. Also if ``classes`` is
            ``None`` and a loader may skip examples.
        MisconfigurationException: In ``fit``, if another option does not support partial layers, such as
            ``optimizer_state="keep"``. Also if the layer shares its weight or is in evaluation mode, or no suitable
            labels are found in the loss.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> from lightning_fed.modules import SampledSoftmaxHead
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), SampledSoftmaxHead(784, num_classes=10_000))
        >>> trainer = FederatedTrainer(max_rounds=10, callbacks=[SampledSoftmax(num_negatives=100)], logger=False)
    """

    def __init__(
        self,
        num_negatives: int,
        objective: Objective = "fedss",
        resample: Literal["round", "batch"] = "round",
        head: str = "auto",
        target: int | str | Callable[[Any], Tensor] | None = None,
        classes: ClientClasses | None = None,
    ) -> None:
        self.num_negatives = check_count("num_negatives", num_negatives, lowest=0)
        check_option("resample", resample, ("round", "batch"))
        check_option("objective", objective, Objective)
        self.objective = objective
        self.resample = resample
        self.head = head
        self.target = target
        self._labels_of: BatchKey = target
        self.classes = classes
        self._client_classes: dict[Client, Tensor] = {}
        self._head_name: str | None = None
        self._held: SampledClasses | None = None
        self._columns: list[Tensor] = []  # one stream per batch, for resample="batch"
        self._batch = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            find_federation(trainer)
            if len(find_callbacks(trainer, SampledSoftmax)) > 1:
                raise MisconfigurationException("Expected one `SampledSoftmax` callback, but the Trainer has several.")
            self._client_classes, self._head_name, self._held = {}, None, None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation, self._labels_of = find_federation(trainer), self.target
        if self.target is None and self.objective != "full" and not (federation.is_remote and federation.has_server):
            self._labels_of = self._trace_labels(trainer, pl_module)

    def sliced_entries(self, module: L.LightningModule) -> Iterable[str]:
        return [] if self.objective == "full" else self._entries(module)

    def on_client_request(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, request: Request
    ) -> None:
        self._held, self._columns, self._batch = None, [], -1
        if self.objective == "full":
            return
        planned, positives = find_federation(trainer).visit, self._positives(trainer, client)
        generator = np.random.default_rng([planned.visit.seed, _NEGATIVES_STREAM])
        draws = planned.num_batches if self.resample == "batch" else 1
        count = 0 if self.objective == "posonly" else self.num_negatives
        num_classes = self._head(module).num_classes
        drawn = [sample_negatives(positives, num_classes, count, generator) for _ in range(draws)]
        rows = torch.unique(torch.cat([positives, *drawn]))
        self._held = SampledClasses(rows, torch.isin(rows, positives), self.objective)
        if self.resample == "batch":
            self._columns = [
                torch.searchsorted(rows, torch.cat([positives, negatives]).sort().values) for negatives in drawn
            ]
        request.rows |= dict.fromkeys(self._entries(module), rows)

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        self._set_head_classes(module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch += 1

    def on_client_batch(self, trainer: L.Trainer, module: L.LightningModule, client: Client, batch: Any) -> Any:
        if self._held is None:
            return batch
        self._set_head_classes(module)  # another callback may use the model in an earlier hook
        head = self._head(module)
        if module.training and not head.training:
            raise MisconfigurationException(
                "The head is in evaluation mode while the module trains, so the head cannot compute the logits for "
                "the sampled softmax. Keep the head in training mode."
            )
        target = find_target(batch, self._labels_of)
        labels = self._classes_of(target)
        columns = self._columns[max(0, self._batch)] if self._columns else None
        try:
            local = head.begin_batch(labels, columns)
        except ForeignLabelError as error:
            raise ClientFault(
                f"the client has an unknown class: {error} Pass the clients' `classes` to `SampledSoftmax`"
            ) from error
        if target.is_floating_point():
            local = local.to(target.dtype)
        return _replace_tensor(batch, target, local)

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        if self._held is not None:
            update.metrics["sampled_classes"] = float(len(self._held.classes))

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        self._held = None
        self._head(module).release()

    def _head(self, module: L.LightningModule) -> SampledSoftmaxHead:
        if self._head_name is None:
            self._head_name = find_sampled_softmax_head(module) if self.head == "auto" else self.head
        head = module.get_submodule(self._head_name)
        if not isinstance(head, SampledSoftmaxHead):
            raise ValueError(
                f"Expected `head` to name a SampledSoftmaxHead, but {self.head!r} is a {type(head).__name__}."
            )
        return head

    def _trace_labels(self, trainer: L.Trainer, module: L.LightningModule) -> BatchKey:
        remedy, head = "give `SampledSoftmax` a `target`", self._head(module)
        margin, head.margin = head.margin, 0.0  # with a margin the head needs the labels
        try:
            task = find_class_task(trainer, module, remedy, needs_target=True)
        finally:
            head.margin = margin
        void = task.ignore_index
        if not has_same_parameters(module, task.layer, str(self._head_name)) or (void is not None and void >= 0):
            raise MisconfigurationException(
                f"Expected the loss to use the outputs of {self._head_name!r}, with a negative or no `ignore_index`, "
                f"but the loss uses the outputs of {task.layer!r}, with `ignore_index={void}`. In training, labels"
                " become indices of a client's classes, so an `ignore_index` of 0 or more could exclude a class:"
                f" use -100 as the ignored label in data and loss. For outputs of another layer, {remedy}."
            )
        return task.target

    def _entries(self, module: L.LightningModule) -> list[str]:
        head = self._head(module)
        parameters = {id(parameter) for parameter in head.parameters()}
        for name, layer in module.named_modules():
            if layer is not head and any(id(weight) in parameters for weight in layer.parameters(recurse=False)):
                raise MisconfigurationException(
                    f"The head shares its weight with {name!r}. If clients hold only some classes' rows, {name!r} would"
                    " read wrong rows: give the head a separate weight."
                )
        return layer_entries(module, head)

    def _set_head_classes(self, module: L.LightningModule) -> None:
        head = self._head(module)
        if self._held is not None and head.held is not self._held:
            head.hold(self._held)

    def _positives(self, trainer: L.Trainer, client: Client) -> Tensor:
        if client not in self._client_classes:
            if self.classes is None:
                labels = self._labels(trainer, client)
            else:
                classes = self.classes(client) if callable(self.classes) else self.classes[client]
                labels = torch.as_tensor(classes, dtype=torch.int64)
            self._client_classes[client] = torch.unique(labels)
        positives, count = self._client_classes[client], self._head(trainer.lightning_module).num_classes
        if not len(positives):
            raise ClientFault("the client has no labels")
        lowest, highest = int(positives[0]), int(positives[-1])
        if not 0 <= lowest <= highest < count:
            raise ClientFault(f"the client's labels range from {lowest} to {highest}, but the head has {count} classes")
        return positives

    def _labels(self, trainer: L.Trainer, client: Client) -> Tensor:
        federation = find_federation(trainer)
        population, planned = federation.population, federation.visit
        if not population.gives_all(client):
            raise OptionError(
                f"The loader of client {client!r} may skip examples in a pass (`drop_last`, or sampling with "
                "replacement), so a pass may miss classes: pass the clients' `classes` to `SampledSoftmax`."
            )
        faults, labels_of_batches = list[Exception](), [torch.zeros(0, dtype=torch.int64)]
        with seeded_generators():
            for batch in until_fault(population.one_pass(planned.visit, isolated=True), faults):
                labels = torch.unique(self._classes_of(find_target(batch, self._labels_of))).cpu()
                labels_of_batches.append(labels[labels >= 0])
        if faults:
            raise ClientFault(f"the client's data raised {describe(faults[0])}") from faults[0]
        return torch.cat(labels_of_batches)

    def _classes_of(self, target: Tensor) -> Tensor:
        if not target.is_floating_point():
            return target
        if target.ndim > 1 or not bool((target == target.round()).all()):
            raise OptionError(
                f"Expected labels to be class numbers, but got {target.dtype} of shape {tuple(target.shape)}. Soft "
                "labels are not possible, because a client has weight rows for only some classes: select integer "
                "labels with the option `target` of `SampledSoftmax`."
            )
        return target.long()


def _replace_tensor(batch: Any, old: Tensor, new: Tensor) -> Any:
    count = 0

    def replace(value: Tensor) -> Tensor:
        nonlocal count
        count += value is old
        return new if value is old else value

    replaced = apply_to_collection(batch, Tensor, replace)
    if not count:
        raise OptionError(
            "Expected `target` to return a tensor from the batch (possibly inside a list, dictionary or dataclass), "
            f"but this {type(batch).__name__} does not contain the returned tensor. Return the tensor itself, not a "
            "copy, and reshape the tensor in `training_step`."
        )
    return replaced
