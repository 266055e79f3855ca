"""Callbacks and a logger to record fits."""

import copy
import inspect
from dataclasses import dataclass, field

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_fed import FederatedCallback


def state_of(module):
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def loading(weights_only):
    """The `weights_only` argument for `fit` and `load_from_checkpoint`, supported since Lightning 2.6."""
    return {"weights_only": weights_only} if "weights_only" in inspect.signature(L.Trainer.fit).parameters else {}


def bytes_of(*states):
    return sum(value.element_size() * value.numel() for state in states for value in state.values())


def assert_same(left, right, names=None):
    """Asserts bit-equal, non-empty states."""
    if names is None:
        assert left.keys() == right.keys()
        names = sorted(left)
    assert names
    left, right = ({name: state[name].cpu() for name in names} for state in (left, right))
    different = [name for name in names if not torch.equal(left[name], right[name])]
    assert not different, {name: float((left[name].double() - right[name].double()).abs().max()) for name in different}
    assert all(left[name].dtype == right[name].dtype for name in names)


class SavesOnException(L.Callback):
    """Saves a checkpoint on an exception; Lightning's `ModelCheckpoint` supports this since 2.6."""

    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(self.path)


@dataclass
class SeenVisit:
    round: int
    client: object
    broadcast: dict
    start: dict
    update: dict = field(default_factory=dict)
    end: dict = field(default_factory=dict)
    num_samples: int = 0
    batches: list = field(default_factory=list)
    learning_rates: list = field(default_factory=list)
    extras: tuple = ()


def travelling(message):
    """The sent entries of a message, without untrained entries."""
    return {name: value for name, value in message.state.items() if name not in message.unsent}


class Recorder(FederatedCallback):
    keeps_privacy = True  # sends no data

    def __init__(self):
        self.visits: list[SeenVisit] = []
        self.aggregates: list[dict] = []
        self.validated: list[dict] = []
        self.logged: list[dict] = []
        self.objects: set[tuple] = set()
        self.down_bytes: list[int] = []
        self.up_bytes: list[int] = []

    def round(self, number):
        return [visit for visit in self.visits if visit.round == number]

    def on_train_epoch_start(self, trainer, module):
        self.down_bytes.append(0)
        self.up_bytes.append(0)

    def on_client_receive(self, trainer, module, client, broadcast):
        self.down_bytes[-1] += bytes_of(travelling(broadcast), broadcast.extras)

    def on_client_start(self, trainer, module, client, broadcast):
        sent = {name: value.cpu().clone() for name, value in broadcast.state.items()}
        self.visits.append(SeenVisit(broadcast.round, client, sent, state_of(module)))
        self.objects.add(
            (
                tuple(id(parameter) for parameter in module.parameters()),
                tuple(parameter.data_ptr() for parameter in module.parameters()),
                tuple(id(optimizer) for optimizer in trainer.optimizers),
                id(trainer.model),
            )
        )

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.visits[-1].batches.append(apply_to_collection(copy.deepcopy(batch), torch.Tensor, torch.Tensor.cpu))
        self.visits[-1].learning_rates.append(
            [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        )

    def on_client_end(self, trainer, module, client, update):
        visit = self.visits[-1]
        assert visit.client == client == update.client
        visit.update = {name: value.cpu().clone() for name, value in update.state.items()}
        visit.end = state_of(module)
        visit.num_samples = update.num_samples

    def on_server_receive(self, trainer, module, update):
        self.up_bytes[-1] += bytes_of(travelling(update), update.extras)

    def on_server_aggregate(self, trainer, module, state):
        self.aggregates.append({name: value.cpu().clone() for name, value in state.items()})

    def on_validation_start(self, trainer, module):
        if not trainer.sanity_checking:
            self.validated.append(state_of(module))

    def on_train_epoch_end(self, trainer, module):
        self.logged.append({name: value.item() for name, value in trainer.callback_metrics.items()})


class FixedBatches:
    """Batches by epoch for a plain Trainer: an iterable without random draws."""

    def __init__(self, *epochs):
        self.epochs = epochs
        self.trainer = None

    def __len__(self):
        return len(self.epochs[0])

    def __iter__(self):
        return iter(self.epochs[self.trainer.current_epoch])


def fit_fixed(trainer, module, epochs):
    loader = FixedBatches(*epochs)
    loader.trainer = trainer
    trainer.fit(module, loader)


class MemoryLogger(Logger):
    def __init__(self):
        super().__init__()
        self.lines: list[tuple[int, dict]] = []

    @property
    def name(self):
        return "memory"

    @property
    def version(self):
        return 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, dict(metrics)))

    def curve(self, name):
        return [(metrics.get("epoch", step), metrics[name]) for step, metrics in self.lines if name in metrics]


class SpoilsFiles(FederatedCallback):
    """Damages a client's files in a folder store after every round."""

    def __init__(self, folder, client):
        self.files = folder / "run-0" / f"s-{client}"

    def on_server_round_end(self, trainer, pl_module, is_new):
        for path in self.files.glob("*.safetensors"):
            path.write_bytes(b"")


class StepCheckpoint(ModelCheckpoint):
    def __init__(self, folder, every, **options):
        super().__init__(folder, "inside", every_n_train_steps=every, save_top_k=-1, **options)

    def format_checkpoint_name(self, metrics, filename=None, **options):
        return super().format_checkpoint_name(metrics, "inside-{step}" if filename is None else filename, **options)
