"""A grammar of legal PyTorch modules, and manual federated averaging; this file does not import the package.

A module is a chain of blocks. Every block stores tensors in a legal way: wrapped, tied, renamed, partly saved, saved as
a copy, written in training, created late. ``REFUSED`` lists blocks with an error in the first round. All other blocks
must train, with the results of :func:`average_by_hand`.
"""

import copy
import warnings

import lightning as L
import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from torchmetrics import MeanMetric

WIDTH = 4


class Block(nn.Module):
    """A linear layer with a change of the output."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self):
        pass

    def forward(self, inputs):
        return self.change(self.inner(inputs))

    def change(self, outputs):
        return outputs


class Renamed(Block):
    def prepare(self):
        self.register_state_dict_post_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, metadata):
        for name in [name for name in state if name.startswith(f"{prefix}inner.")]:
            state[name.replace("inner.", "core.")] = state.pop(name)


class Swapped(Block):
    """As sharpness-aware optimizers do, replaces the weight's data after a step."""

    def change(self, outputs):
        if self.training:
            self.inner.weight.data = self.inner.weight.data.clone()
        return outputs


class Counter(Block):
    def prepare(self):
        self.register_buffer("steps", torch.ones(()))

    def change(self, outputs):
        if self.training:
            self.steps += 1
        return outputs / self.steps


class Assigned(Block):
    def prepare(self):
        self.register_buffer("mean", torch.zeros(WIDTH))

    def change(self, outputs):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs - self.mean


class Unsaved(Assigned):
    """The same buffer, not saved by PyTorch: every visit starts with the initial values."""

    def prepare(self):
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)


class Constant(Block):
    def prepare(self):
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)

    def change(self, outputs):
        return outputs * self.scale


class Complex(Block):
    def prepare(self):
        self.phase = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex128) * (1 + 0.5j))

    def change(self, outputs):
        return (outputs * self.phase).real + (outputs * self.phase).imag


class Measured(Block):
    def prepare(self):
        self.metric = MeanMetric()

    def change(self, outputs):
        self.metric.update(outputs.detach().mean().float())
        return outputs


class Cached(Block):
    """A buffer written in the first step, equal for all clients."""

    def prepare(self):
        self.register_buffer("cache", None)

    def change(self, outputs):
        if self.cache is None:
            self.cache = torch.full_like(outputs[0], 0.5).detach()
        return outputs * self.cache


class Created(Block):
    def change(self, outputs):
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.full_like(outputs[0], 0.5).detach())
        if self.training:
            self.cache.mul_(0.9)
        return outputs * self.cache


class CreatedOfData(Block):
    def change(self, outputs):
        if not hasattr(self, "cache"):
            self.register_buffer("cache", outputs.detach().mean(0))
        return outputs - self.cache


class Tied(Block):
    def prepare(self):
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.inner.weight

    def change(self, outputs):
        return self.other(outputs)


class Aliased(Block):
    def prepare(self):
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = nn.Parameter(self.inner.weight.data)

    def change(self, outputs):
        return self.other(outputs)


class Transposed(Aliased):
    def prepare(self):
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = nn.Parameter(self.inner.weight.data.t())


class Teacher(Block):
    """A parameter without gradient follows another parameter."""

    def prepare(self):
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        for mean, value in zip(self.teacher.parameters(), self.inner.parameters(), strict=True):
            mean.data.mul_(0.9).add_(value.data, alpha=0.1)

    def change(self, outputs):
        if self.training:
            self.follow()
        return outputs - self.teacher(outputs).detach()


class UnsavedTeacher(Teacher):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def prepare(self):
        super().prepare()
        self.register_state_dict_post_hook(self.leave_out)

    @staticmethod
    def leave_out(module, state, prefix, metadata):
        for name in [name for name in state if name.startswith(f"{prefix}teacher.")]:
            del state[name]


class UnsavedBackbone(UnsavedTeacher):
    """A teacher without steps, so no state is lost."""

    def follow(self):
        pass


class Partial(Block):
    def prepare(self):
        self.register_state_dict_post_hook(self.leave_out)

    @staticmethod
    def leave_out(module, state, prefix, metadata):
        del state[f"{prefix}inner.weight"]


class Copied(Block):
    def prepare(self):
        self.register_state_dict_post_hook(self.copy)

    @staticmethod
    def copy(module, state, prefix, metadata):
        state[f"{prefix}inner.weight"] = state[f"{prefix}inner.weight"].clone()


class Turned(Copied):
    @staticmethod
    def copy(module, state, prefix, metadata):
        state[f"{prefix}inner.weight"] = state[f"{prefix}inner.weight"].t()


class CopiedBuffer(Assigned):
    def prepare(self):
        super().prepare()
        self.register_state_dict_post_hook(self.copy)

    @staticmethod
    def copy(module, state, prefix, metadata):
        state[f"{prefix}mean"] = state[f"{prefix}mean"].clone()


class CopiedConstant(CopiedBuffer):
    def change(self, outputs):
        return outputs - self.mean


class UnsavedBatchNorm(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(WIDTH)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"], destination[f"{prefix}bias"] = self.weight.detach(), self.bias.detach()


def _legacy_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


def _linear():
    return nn.Linear(WIDTH, WIDTH)


BLOCKS = {
    "linear": _linear,
    "frozen linear": lambda: _linear().requires_grad_(False),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm in evaluation mode": lambda: nn.BatchNorm1d(WIDTH).eval(),
    "wrapped": lambda: checkpoint_wrapper(_linear()),
    "wrapped twice": lambda: checkpoint_wrapper(nn.Sequential(_linear(), checkpoint_wrapper(_linear()))),
    "wrapped batch norm": lambda: checkpoint_wrapper(nn.BatchNorm1d(WIDTH)),
    "weight norm": lambda: parametrizations.weight_norm(_linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(_linear()),
    "legacy weight norm": _legacy_weight_norm,
    "renamed": Renamed,
    "swapped data": Swapped,
    "counter": Counter,
    "assigned buffer": Assigned,
    "unsaved buffer": Unsaved,
    "constant buffer": Constant,
    "complex": Complex,
    "metric": Measured,
    "cache": Cached,
    "created buffer": Created,
    "tied": Tied,
    "aliased": Aliased,
    "teacher": Teacher,
    "unsaved backbone": UnsavedBackbone,
    "copied constant": CopiedConstant,
    "created of data": CreatedOfData,
    "transposed": Transposed,
    "unsaved teacher": UnsavedTeacher,
    "partial": Partial,
    "copied": Copied,
    "turned": Turned,
    "copied buffer": CopiedBuffer,
    "unsaved batch norm": UnsavedBatchNorm,
    "lazy": lambda: nn.LazyLinear(WIDTH),
}
REFUSED = list(BLOCKS)[list(BLOCKS).index("created of data") :]
LATE = ["", "on_fit_start", "on_train_start", "on_train_epoch_start"]


class Chain(L.LightningModule):
    """Blocks in sequence; the hook ``late`` adds one more layer once."""

    def __init__(self, blocks, late="", renames=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)  # `double()` would separate tensors with shared memory
        try:
            self.blocks = nn.ModuleList(BLOCKS[name]() for name in blocks)
            self.head = nn.Linear(WIDTH, 1)
        finally:
            torch.set_default_dtype(torch.float32)
        self.late, self.renames = late, renames

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {f"model/{name}": value for name, value in state.items()} if self.renames else state

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        for block in self.blocks:
            inputs = block(inputs).tanh()
        if hasattr(self, "probe"):
            inputs = inputs + self.probe(inputs)
        return (self.head(inputs) - targets).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD([value for value in self.parameters() if value.requires_grad], lr=0.1)

    def add_layer(self, hook, optimizer):
        if self.late == hook and not hasattr(self, "probe"):
            self.probe = nn.Linear(WIDTH, WIDTH).double()
            with torch.no_grad():
                self.probe.weight.fill_(0.1)
                self.probe.bias.fill_(0.0)
            optimizer.add_param_group({"params": list(self.probe.parameters())})

    def on_fit_start(self):
        self.add_layer("on_fit_start", self.trainer.optimizers[0])

    def on_train_start(self):
        self.add_layer("on_train_start", self.trainer.optimizers[0])

    def on_train_epoch_start(self):
        self.add_layer("on_train_epoch_start", self.trainer.optimizers[0])


@st.composite
def cases(draw):
    blocks = draw(st.lists(st.sampled_from(list(BLOCKS)), min_size=1, max_size=3))
    return {
        "blocks": blocks,
        "late": draw(st.sampled_from(LATE)),
        "renames": draw(st.booleans()),
        "batches": draw(st.integers(1, 3)),
        "rounds": draw(st.integers(1, 2)),
        "seed": draw(st.integers(0, 2**16)),
    }


def data(batches, seed):
    """Two clients with equally many batches: six examples each, from different distributions."""
    generator = torch.Generator().manual_seed(seed)
    clients = {}
    for shift, client in enumerate("ab"):
        inputs = torch.randn(6 * batches, WIDTH, generator=generator, dtype=torch.float64) + shift
        clients[client] = inputs, inputs.sum(1, keepdim=True).sin()
    return clients


def tensors(module):
    return {
        name: value
        for find in (module.named_parameters, module.named_buffers)
        for name, value in find(remove_duplicate=False)
    }


def _copy(module, build):
    """A second module with the same tensors; `deepcopy` refuses legacy weight norm."""
    fresh = build()
    if hasattr(module, "probe"):
        fresh.probe = copy.deepcopy(module.probe)
    for name, value in module.named_buffers():
        path, _, attribute = name.rpartition(".")
        if name not in tensors(fresh):
            fresh.get_submodule(path).register_buffer(attribute, value.clone())
    _load(fresh, {name: value.detach().clone() for name, value in tensors(module).items()})
    return fresh


@torch.no_grad()
def _load(module, values):
    for name, value in tensors(module).items():
        value.copy_(values[name])


def _is_saved(module, name):
    path, _, attribute = name.rpartition(".")
    return attribute not in vars(module.get_submodule(path))["_non_persistent_buffers_set"]


def average_by_hand(build, clients, rounds):
    """Federated averaging: every client trains a copy with plain SGD, and the server averages all tensors.

    Clients have equally many examples and steps, so integers are equal. Non-persistent buffers are outside the model:
    every client starts with the initial values.
    """
    server = build()
    for hook in LATE[1:]:
        server.add_layer(hook, server.configure_optimizers())
    for _ in range(rounds):
        trained = []
        for inputs, targets in clients.values():
            client = _copy(server, build)
            optimizer = client.configure_optimizers()
            for index, batch in enumerate(zip(inputs.split(6), targets.split(6), strict=True)):
                optimizer.zero_grad()
                client.training_step(batch, index).backward()
                optimizer.step()
            trained.append(client)
        before, server = server, _copy(trained[0], build)
        mean = {}
        for name, value in tensors(server).items():
            both = [tensors(client)[name].detach() for client in trained]
            mean[name] = value if not value.is_floating_point() and not value.is_complex() else sum(both) / len(both)
            if not _is_saved(server, name):
                mean[name] = tensors(before)[name]
        _load(server, {name: value.detach().clone() for name, value in mean.items()})
    return server
