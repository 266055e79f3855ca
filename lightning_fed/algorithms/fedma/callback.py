"""FedMA on the client (Algorithm 1): freezes matched layers and trains the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_fed.algorithms.fedma.aggregator import FedMA
from lightning_fed.algorithms.fedma.checks import check_growth, check_optimizers, check_options, warn_of_rounds
from lightning_fed.algorithms.fedma.initial_state import shuffled_state
from lightning_fed.algorithms.fedma.matching_pass import (
    ASSIGNMENT,
    COUNTS,
    MEMORY,
    REQUIRED_STEP,
    STEP,
    WIDTH,
    read_assignment,
    read_widths,
)
from lightning_fed.batch_norm.measurement import measure_statistics, pool_statistics
from lightning_fed.callbacks.example_input import forward_inputs, training_batch
from lightning_fed.callbacks.federation import Federation, find_federation
from lightning_fed.callbacks.training_trace import find_class_task, forward_of_training, has_forward
from lightning_fed.client.local_model import forget_memory, memory_of
from lightning_fed.errors import ClientFault
from lightning_fed.features.batches import BatchKey, as_classes, find_target
from lightning_fed.federated_callback import FederatedCallback, RevertingCallback
from lightning_fed.lightning.internals import OverriddenMethod
from lightning_fed.matching.match_widths import match_widths
from lightning_fed.matching.permutation import PermutationGroup, resize_groups
from lightning_fed.matching.permutation_groups import PermutationGroups
from lightning_fed.matching.stages import find_stages
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State, with_prefix, without_prefix
from lightning_fed.method import register
from lightning_fed.model.entries import (
    batch_norm_layers,
    copy_state,
    entry_tensors,
    layer_entries,
    layer_prefixes,
    parameter_entries,
    trainable_entries,
)
from lightning_fed.numerics.seeds import client_key, derive_seed
from lightning_fed.numerics.trees import move_tensors
from lightning_fed.server.schedule import Visit

_MODEL = f"{MEMORY}model:"


class LayerwiseTraining(RevertingCallback, FederatedCallback):
    """Trains the clients of :class:`~lightning_fed.algorithms.FedMA`, and freezes matched layers.

    FedMA adds this callback automatically. Before the first round, the callback finds the groups of neurons to match.
    Each client stores the trained model; for large models pass a folder as the federation's ``store``. Loading a
    checkpoint of a wider model widens the module.

    Args:
        example_input: Arguments for ``forward``, or without ``forward`` for the network in ``training_step``. Used to
            trace the network; by default the module's ``example_input_array``, or two inputs of a client.
        pin: Patterns for parameter names, such as ``"embedding.*"``. Neurons in these layers keep their positions.
        extra_groups: Groups of neurons missed by tracing. A group's size is the layer width in a client's model.
        target: Position of the labels in a batch: index, key or function; by default the labels used in the loss. If
            no single label tensor is found for the output layer, this layer is averaged by numbers of examples.
        inputs: Position of the inputs in a batch: index, key or function.

    Raises:
        MisconfigurationException: In ``fit``, if the aggregation rule is not FedMA, no neurons can be matched, clients
            keep optimizer states, or an optimizer requires constant tensor sizes.
        ValueError: If a checkpoint has invalid widths; in ``fit``, if FedMA's ``stages`` or ``pin`` do not match.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> from lightning_fed.algorithms import FedMA
        >>> trainer = FederatedTrainer(
        ...     max_rounds=4, method=FedMA(), callbacks=[LayerwiseTraining(pin=["embedding.*"])], logger=False
        ... )
    """

    changes_update = True

    can_recalibrate_remotely = False

    def __init__(
        self,
        example_input: Any = None,
        pin: Sequence[str] = (),
        extra_groups: Sequence[PermutationGroup] = (),
        target: BatchKey = None,
        inputs: BatchKey = None,
    ) -> None:
        self.example_input = example_input
        self.pin = pin
        self.extra_groups = extra_groups
        self.target = target
        self.inputs = inputs
        self.groups = PermutationGroups(())
        self._hook: OverriddenMethod | None = None
        self._initial: State = {}  # initial module, whose weights clients shuffle
        self._shuffled_names = frozenset[str]()
        self._stages: list[frozenset[str]] = []  # entries
        self._frozen_parameters: list[nn.Parameter] = []
        self._frozen_layers: list[nn.Module] = []
        self._clients_with_models = frozenset[Client]()
        self._counts: Tensor | None = None
        self._batches_left = 0
        self._labels: BatchKey = None
        self._ignored: int | None = None  # a label without effect on the loss
        self._growable: dict[str, list[int]] = {}  # growable axes of this fit, or of the last fit
        self._resized: dict[str, tuple[torch.Size, torch.Size]] = {}  # widths before and after loading a checkpoint

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rule = find_federation(trainer).server.rule
        if trainer.checkpoint_callbacks and isinstance(rule, FedMA) and rule.mode == "grow":
            rank_zero_info("Load a checkpoint into a new module: lightning_fed.matching.load_matched(module, path)")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.revert()
        self._resized = {}
        if stage == "fit":
            self._growable = {}

        def resize(checkpoint: dict[str, Any]) -> None:
            state, known = checkpoint["state_dict"], checkpoint.get("callbacks", {}).get(self.state_key)
            shapes = {name: value.shape for name, value in entry_tensors(pl_module).items() if name in state}
            self._resized = {name: (shape, state[name].shape) for name, shape in shapes.items()}
            if known is not None:
                check_growth(self._resized, known["growable"])
            match_widths(pl_module, state)
            assert self._hook is not None
            self._hook.original(checkpoint)

        self._hook = OverriddenMethod(pl_module, "on_load_checkpoint", resize)

    def state_dict(self) -> dict[str, Any]:
        return {"growable": self._growable}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = find_federation(trainer)
        rule = _rule(federation)
        local = federation.local_model(pl_module)
        check_options(federation, local, pl_module)
        pin = [*self.pin, *local.server_entries]
        extra = resize_groups(
            self.extra_groups, [rule.widths.get(group.name, group.size) for group in self.extra_groups]
        )
        with self._followed(trainer, pl_module) as example:
            groups = PermutationGroups.of(pl_module, example, pin=pin, extra_groups=extra)
        if not len(groups) and rule.mode != "none":
            raise MisconfigurationException(
                f"Expected permutable neurons for FedMA, but found none in {type(pl_module).__name__}: if tracing"
                " failed (see the warning), give `LayerwiseTraining` an `example_input` for `forward` or"
                " `extra_groups`. FedMA('none') averages without matching."
            )
        shared = {name: local.entries[name] for name in local.shared}
        self._growable = _growable_axes(groups)
        check_growth(self._resized, self._growable)
        if rule.widths:  # a resumed fit restores client widths
            if groups.sizes != rule.widths:
                raise MisconfigurationException(
                    f"Expected the module to have the widths of FedMA's model, {rule.widths}, but got {groups.sizes}."
                    " For another fit use a new Trainer with a new `Federation`."
                )
            grown = groups
            groups = grown.resized(rule.client_widths)
            shared = grown.slice(shared, {name: torch.arange(size) for name, size in rule.client_widths.items()})
        self.groups = groups
        stages = find_stages(groups, local.shared, rule.stages)
        while len(stages) > 1 and not trainable_entries(pl_module).difference(
            *(stage.entries for stage in stages[:-1])
        ):
            stages[-2:] = [stages[-2].joined(stages[-1])]  # otherwise no parameters would remain to train
        check_optimizers(
            trainer, rule.mode == "grow" and len(stages) > 1 and any(group.is_growable for group in groups)
        )
        self._stages = [frozenset(stage.entries) for stage in stages]
        rule.prepare(groups, stages, shared)
        self._labels, self._ignored = self.target, None
        is_server_alone = federation.is_remote and federation.has_server
        if rule.last_layer != "class" or rule.num_classes < 2 or is_server_alone:
            self._labels = None
        elif self.target is None:
            self._labels = self._find_labels(trainer, pl_module, rule)
        is_drawn = rule.initial == "independent" and not rule.widths
        self._initial = copy_state(shared) if is_drawn else {}
        self._shuffled_names = trainable_entries(pl_module) & shared.keys()
        rank_zero_info(
            f"FedMA: {len(groups)} groups with {sum(groups.sizes.values())} neurons in {len(stages)} stages, one round"
            f" per stage, a new model every {len(stages)} rounds:"
            f" {'; '.join(', '.join(stage.groups) or stage.entries[0].rpartition('.')[0] for stage in stages)}."
        )
        if trainer.is_global_zero:
            warn_of_rounds(trainer, len(stages))

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._clients_with_models = _rule(find_federation(trainer)).clients_with_models

    def on_client_request(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, request: Request
    ) -> None:
        memory = find_federation(trainer).client_memory
        if STEP in memory:
            request.extras[STEP] = memory[STEP]

    def on_client_receive(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        federation = find_federation(trainer)
        memory = federation.client_memory
        broadcast.state = self._client_model(federation, client, broadcast, memory)

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        federation = find_federation(trainer)
        stage = int(broadcast.extras[STEP][1])
        self._freeze(module, stage)
        rule = _rule(federation)
        self._counts, self._batches_left = None, 0
        if self._labels is not None and stage == len(self._stages) - 1:
            self._counts = torch.zeros(rule.num_classes, dtype=torch.int64)
            batches = federation.population.batches_per_epoch(client)
            planned = federation.visit
            self._batches_left = batches or planned.num_batches

    def on_client_batch(self, trainer: L.Trainer, module: L.LightningModule, client: Client, batch: Any) -> Any:
        if self._counts is not None and self._batches_left:
            self._batches_left -= 1
            labels = as_classes(find_target(batch, self._labels), 2)
            is_class = (labels >= 0) & (labels < len(self._counts))
            class_labels = labels[is_class if self._ignored is None else is_class & (labels != self._ignored)]
            self._counts += torch.bincount(class_labels.flatten().long().cpu(), minlength=len(self._counts))
        return batch

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        memory = find_federation(trainer).client_memory
        stage = int(memory[STEP][1])
        memory |= with_prefix(update.state, _MODEL)
        update.state = {name: value for name, value in update.state.items() if name in self._stages[stage]}
        if self._counts is not None:
            update.extras[COUNTS] = self._counts

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        self._unfreeze()

    def on_server_aggregate(self, trainer: L.Trainer, module: L.LightningModule, state: State) -> None:
        """Asks clients for BatchNorm statistics in this round's matched layers, except the network's last layers."""
        federation = find_federation(trainer)
        rule = _rule(federation)
        if rule.unfinished is None or federation.options.batch_norm not in ("auto", "recalibrate"):
            return
        stage, current = rule.unfinished
        layers = {  # excludes layers that the user has frozen
            name: layer
            for name, layer in batch_norm_layers(module).items()
            if layer.training and f"{name}.running_mean" in stage.entries
        }
        if not layers:
            return
        local = federation.local_model(module)
        server = federation.server

        def load(visit: Visit) -> None:
            message = rule.broadcast(Request(visit.client))
            server.sent(visit.client, message)
            state = self._client_model(federation, visit.client, message, memory_of(local.recall(visit.client)))
            local.load_client(visit.client, state)

        visits = [visit for visit in federation.cohort.visits if visit.client in current.assignments]
        reports = measure_statistics(trainer, module, server, federation.population, visits, layers, load)
        measured: State = {}
        for name in layers:
            pooled = pool_statistics([report for _, report in reports], name)
            if pooled is not None:
                for kind, value in zip(("running_mean", "running_var"), pooled, strict=True):
                    entry = f"{name}.{kind}"
                    measured[entry] = value.to(current.matched_state[entry])
        rule.put_statistics(measured)

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        federation = find_federation(trainer)
        if _rule(federation).widths:
            self._initial = {}
        visited = {visit.client for visit in federation.cohort.visits}
        for client in (self._clients_with_models | visited) - _rule(federation).clients_with_models:
            forget_memory(federation.store, client, trainer.current_epoch, MEMORY)

    # ------------------------------------------------------------------------------------------------------------------

    def _client_model(
        self,
        federation: Federation,
        client: Client,
        broadcast: Broadcast,
        memory: State,
    ) -> State:
        sent, stage = broadcast.extras, int(broadcast.extras[STEP][1])
        if not _has_required_step(memory, broadcast):
            raise ClientFault("the client's model from the previous stage is missing")
        model = without_prefix(memory, _MODEL)
        widths, assignment = read_widths(memory), read_assignment(memory)
        memory[STEP] = sent[STEP]
        if stage:
            memory |= {name: value for name, value in sent.items() if name.startswith((ASSIGNMENT, WIDTH))}
            grown = self.groups.resized(widths).grow(model, read_widths(sent), read_assignment(sent))
            return grown | broadcast.state
        for name in (*map(WIDTH.__add__, widths), *map(ASSIGNMENT.__add__, assignment)):
            del memory[name]
        if REQUIRED_STEP in sent:  # a new pass starts from the client's neurons in the global model
            return self.groups.resized(widths).slice(model, assignment) | broadcast.state
        if not broadcast.state:
            seed = derive_seed(federation.schedule.seed, client_key(client))
            return shuffled_state(self._initial, self._shuffled_names, seed)
        return broadcast.state

    def _find_labels(self, trainer: L.Trainer, module: L.LightningModule, rule: FedMA) -> BatchKey:
        try:
            task = find_class_task(trainer, module, "give `LayerwiseTraining` a `target`", needs_target=True)
            outputs = set(layer_entries(module, module.get_submodule(task.layer)))
            if task.num_classes == rule.num_classes and not outputs.isdisjoint(rule.outputs):
                self._ignored = task.ignore_index
                return task.target
            reason = f"the loss compares labels with the outputs of {task.layer!r} instead of {rule.outputs[0]!r}"
        except MisconfigurationException as fault:
            reason = str(fault)
        rank_zero_warn(f"FedMA averages the output layer by numbers of examples, for this reason: {reason}")
        return None

    def _freeze(self, module: nn.Module, stage: int) -> None:
        matched = frozenset[str]().union(*self._stages[:stage])
        for parameter, name in parameter_entries(module).items():
            if name in matched and parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen_parameters.append(parameter)
        for layer, prefix in layer_prefixes(module).items():
            if layer.training and f"{prefix}running_mean" in matched:  # BatchNorm or InstanceNorm
                layer.eval()
                self._frozen_layers.append(layer)

    def _unfreeze(self) -> None:
        for parameter in self._frozen_parameters:
            parameter.requires_grad_(True)
        for layer in self._frozen_layers:
            layer.train()
        self._frozen_parameters, self._frozen_layers = [], []

    @contextmanager
    def _followed(self, trainer: L.Trainer, module: L.LightningModule) -> Iterator[Any]:
        if has_forward(module):
            yield self._example(find_federation(trainer), module)
            return
        with forward_of_training(trainer, module) as example:
            yield example if self.example_input is None else move_tensors(self.example_input, module.device)

    def _example(self, federation: Federation, module: L.LightningModule) -> Any:
        example = self.example_input if self.example_input is not None else module.example_input_array
        if example is None:
            try:
                example = forward_inputs(module, training_batch(federation), self.inputs)
            except (ValueError, MisconfigurationException) as error:
                raise MisconfigurationException(
                    f"`LayerwiseTraining` needs an input for {type(module).__name__}.forward: {error} Alternatively, "
                    "pass an `example_input`: a tensor, a tuple or a dictionary."
                ) from error
        return move_tensors(example, module.device)

    def revert(self) -> None:
        if self._hook is not None:
            self._hook.restore()
            self._hook = None


def _rule(federation: Federation) -> FedMA:
    rule = federation.server.rule
    if not isinstance(rule, FedMA):
        raise MisconfigurationException(
            f"Expected the rule FedMA for `LayerwiseTraining`, but got {type(rule).__name__}."
        )
    return rule


def _growable_axes(groups: PermutationGroups) -> dict[str, list[int]]:
    axes: dict[str, set[int]] = {}
    for name, axis in (entry for group in groups if group.is_growable for entry in group.entries):
        for tied_name in (name, *(alias for alias, first in groups.tied.items() if first == name)):
            axes.setdefault(tied_name, set()).add(axis)
    return {name: sorted(positions) for name, positions in axes.items()}


def _has_required_step(memory: State, broadcast: Broadcast) -> bool:
    required, reached = broadcast.extras.get(REQUIRED_STEP), memory.get(STEP)
    return required is None or (reached is not None and torch.equal(reached.cpu(), required.cpu()))


register(FedMA, callbacks=lambda rule: [LayerwiseTraining()])
