"""The client half of a round: load what the server sent, keep at home what stays, answer with an update."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.functional.chunks import pieces
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.resize import exchange, resize_module
from lightning_fed.state import Policy, copy_state, live_entries, load_entries, norm
from lightning_fed.store import ClientStore

_OPTIMIZER = "optimizer:"
_MEMORY = "memory:"
_TRAVELS = ("shared", "sliced")


class LocalModel:
    """The module as one client after another sees it.

    Shared entries come from the broadcast, personal ones from the client's store (before its first visit: the server's
    initial values), frozen ones are the server's. Outside a visit the module holds the global model. Buffers that are
    not part of the module's state (``persistent=False``) start every visit as they were at the start of the round.

    Most entries are written into. Of a sliced entry the module's tensor is exchanged for the client's rows, which may
    be few of very many: the whole of it is there once, and is never copied.

    Args:
        module: The module that trains.
        policies: The policy of every entry, of :func:`lightning_fed.state.entry_policies`.
        store: Where clients keep their personal entries.
        resizes: Whether entries may come with other shapes, which the module's then take.

    Attributes:
        memory: What callbacks keep for the client between its visits, after :meth:`recall`: empty before its first.

    """

    def __init__(
        self, module: nn.Module, policies: Mapping[str, Policy], store: ClientStore, resizes: bool = False
    ) -> None:
        self._module = module if resizes else None
        self.entries = live_entries(module)
        self.store = store
        self.parameters = [
            name for name, _ in module.named_parameters() if policies.get(name) in _TRAVELS and name in self.entries
        ]
        self.shared = [name for name in self.entries if policies[name] in _TRAVELS]
        self.personal = [name for name in self.entries if policies[name] == "personal"]
        self.home = copy_state({name: value for name, value in self.entries.items() if policies[name] not in _TRAVELS})
        owners = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
        self.sliced = {name: owners[name] for name in self.entries if policies[name] == "sliced"}
        known = module.state_dict()
        self._other_buffers = {name: value for name, value in module.named_buffers() if name not in known}
        self._other_values = copy_state(self._other_buffers)
        buffers = ((name, value) for name, value in module.named_buffers() if name not in self.sliced)
        self._buffers = {name: (module.get_submodule(name.rpartition(".")[0]), value) for name, value in buffers}
        self.memory: State = {}

    def global_state(self) -> State:
        """A copy of the shared entries as they are now; sliced ones themselves, which no visit writes into."""
        self._find_buffers()
        return {
            name: self.entries[name] if name in self.sliced else self.entries[name].detach().clone()
            for name in self.shared
        }

    def load_global(self, state: Mapping[str, Tensor]) -> None:
        """Makes the module the global model: shared entries from ``state``, all others the server's.

        The tensors of sliced entries are the module's own from now on.
        """
        self._load({**state, **self.home})

    def load_client(self, client: Client, state: Mapping[str, Tensor], trains: bool = True) -> None:
        """Makes the module a client's model: shared entries from ``state``, personal ones from its store.

        Args:
            client: The client's key.
            state: The shared entries; of sliced ones any rows.
            trains: Whether the module is going to change, so that it needs copies of sliced entries too.

        Raises:
            ValueError: If ``state`` does not hold the shared entries, or the store's do not fit.

        """
        kept = self.store.get(client) or {}
        personal = {name: value for name, value in kept.items() if not name.startswith((_OPTIMIZER, _MEMORY))}
        own = {name: state[name].clone() for name in self.sliced if name in state} if trains else {}
        self._load({**state, **own, **self.home, **personal})

    def recall(self, client: Client) -> None:
        """Makes ``memory`` the client's, before it asks for anything."""
        kept = self.store.get(client) or {}
        self.memory = {name[len(_MEMORY) :]: kept[name] for name in kept if name.startswith(_MEMORY)}

    def keep(self, client: Client, round: int, optimizer_state: Mapping[str, Tensor]) -> None:
        """Keeps the client's personal entries, optimizer state and memory, if it has any, until its next visit."""
        self._find_buffers()
        kept = {name: self.entries[name] for name in self.personal} | dict(optimizer_state)
        kept |= {f"{_MEMORY}{name}": value for name, value in self.memory.items()}
        if kept:
            self.store.put(client, round, kept)

    def kept_optimizer_state(self, client: Client) -> State:
        """The optimizer state that the client kept, as :func:`pack_optimizers` made it."""
        return {name: value for name, value in (self.store.get(client) or {}).items() if name.startswith(_OPTIMIZER)}

    def answer(self, client: Client, num_samples: int) -> ClientUpdate:
        """The client's update: a copy of the shared entries; of sliced ones the rows themselves, which go with it."""
        return ClientUpdate(client, num_samples, self.global_state())

    def _load(self, state: Mapping[str, Tensor]) -> None:
        """Writes entries into the module, or puts them in the place of its own where they are sliced."""
        for name, owner in self.sliced.items():
            rows = state.get(name, owner)
            if rows.shape[1:] != owner.shape[1:] or rows.dtype != owner.dtype:
                raise ValueError(
                    f"The state cannot be loaded: the rows of entry {name!r} are {rows.dtype} of shape"
                    f" {tuple(rows.shape[1:])} instead of {owner.dtype} of shape {tuple(owner.shape[1:])}."
                )
        if self._module is not None:  # whose tensors may be others by now
            resize_module(self._module, {name: value for name, value in state.items() if name not in self.sliced})
            self.entries = live_entries(self._module)
        self._find_buffers()
        load_entries(
            {name: value for name, value in self.entries.items() if name not in self.sliced},
            {name: value for name, value in state.items() if name not in self.sliced},
        )
        for name, owner in self.sliced.items():
            exchange(owner, state.get(name, owner).detach())
            self.entries[name] = owner.detach()
        load_entries(self._other_buffers, self._other_values)
        for name, value in self._other_buffers.items():
            holder, now = self._buffers[name]
            if now is not value:  # the module's own tensor comes back, whatever took its place
                setattr(holder, name.rpartition(".")[2], value)
                self._buffers[name] = holder, value

    def _find_buffers(self) -> None:
        """A module may assign a buffer instead of writing into it: the tensor is another one then."""
        for name, (owner, known) in self._buffers.items():
            now = getattr(owner, name.rpartition(".")[2])
            if now is known:
                continue
            if not isinstance(now, Tensor):
                raise ValueError(f"Expected buffer {name!r} to stay a tensor, but in training it became {now!r}.")
            self._buffers[name] = owner, now
            if name in self.entries:
                self.entries[name] = now.detach()

    def distance(self, update: ClientUpdate, broadcast: Broadcast) -> float | None:
        """How far the parameters moved, as far as both messages hold them alike: the norm of their difference."""
        ours, theirs = update.state, broadcast.state
        both = (name for name in self.parameters if name in ours and name in theirs)
        names = [name for name in both if ours[name].shape == theirs[name].shape]
        pairs = (zip(pieces(ours[name]), pieces(theirs[name]), strict=True) for name in names)
        return float(norm(one - other for one, other in itertools.chain.from_iterable(pairs))) if names else None


class StepScheduler(Protocol):
    """What is needed of a learning-rate scheduler."""

    optimizer: Optimizer

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores its state."""


class LocalOptimizers:
    """Optimizers, per-step schedulers and loss scaling of one round, started anew for every visit.

    Every visit starts from the round's state: the optimizers' buffers as they were made (or, with ``mode="keep"``, as
    the client left them), the hyper-parameters of the round (learning rates that epoch schedulers have set), the
    schedulers that step per batch and the loss scale as they were. After the round the latter two go on from where the
    client with the most examples left them, as integer entries of the model do; with one client this is what plain
    training does.

    Args:
        optimizers: The optimizers.
        step_schedulers: Those learning-rate schedulers that step per batch.
        scaler: Anything with ``state_dict`` and ``load_state_dict`` that holds the loss scale.
        mode: ``"reset"`` or ``"keep"``.
        epoch_schedulers: Those that the Trainer steps at the round's last batch, whoever's it is; where they share an
            optimizer with ``step_schedulers``, they step from where the client with the most examples left it.

    Attributes:
        largest: The client with the most examples so far, of equals the first: their number, its place in the round
            times -1, and where it left the schedulers; ``None`` where nothing goes on after the visits.

    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        step_schedulers: Sequence[StepScheduler] = (),
        scaler: Any = None,
        mode: Literal["reset", "keep"] = "reset",
        epoch_schedulers: Sequence[Any] = (),
    ) -> None:
        self.optimizers = optimizers
        self.step_schedulers = step_schedulers
        stepped = {id(scheduler.optimizer) for scheduler in step_schedulers}
        self.epoch_schedulers = [scheduler for scheduler in epoch_schedulers if id(scheduler.optimizer) in stepped]
        self.scaler = scaler
        self.mode = mode
        self._start = self._capture()
        self.largest: tuple[int, int, dict[str, Any]] | None = None

    @property
    def start(self) -> dict[str, Any]:
        """Hyper-parameters, per-step schedulers and loss scale at the round's start, which every visit starts from."""
        return {name: self._start[name] for name in ("groups", "schedulers", "scaler")}

    def note_visit(self, num_samples: int, place: int, left: Mapping[str, Any]) -> None:
        """Notes where a client that trained elsewhere left what :attr:`start` has.

        Args:
            num_samples: The client's examples.
            place: Index of the visit in the round.
            left: What its ``largest`` says.

        """
        if self.goes_on and (self.largest is None or (num_samples, -place) > self.largest[:2]):
            self.largest = (num_samples, -place, {**self._start, **left})

    @property
    def goes_on(self) -> bool:
        """Whether anything goes on from where a client left it."""
        return bool(self.step_schedulers) or self.scaler is not None

    def start_visit(self, kept: Mapping[str, Tensor] | None = None, rows: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Puts everything as it was at the start of the round, with the client's own buffers if it kept any.

        Args:
            kept: What :meth:`end_visit` returned after the client's last visit.
            rows: Parameters of which the client holds some rows only, and which.

        """
        self._load({**self._start, "buffers": self._sliced(self._start["buffers"], rows)} if rows else self._start)
        if kept:
            unpack_optimizers(self.optimizers, kept)

    def end_visit(self, num_samples: int, place: int = 0) -> State:
        """Notes where this client left the schedulers; its packed optimizer state in ``"keep"`` mode.

        Args:
            num_samples: The client's examples.
            place: Index of the visit in the round.

        """
        # Of equals the first by its place: visits that train at once come in another order.
        if self.goes_on and (self.largest is None or (num_samples, -place) > self.largest[:2]):
            self.largest = (num_samples, -place, self._capture(buffers=False))
        return pack_optimizers(self.optimizers) if self.mode == "keep" else {}

    def end_round(self) -> None:
        """Empties the buffers, keeps the learning rates that epoch schedulers have set."""
        stepped = {id(scheduler.optimizer) for scheduler in self.step_schedulers}
        largest = self._start if self.largest is None else self.largest[2]
        groups = [
            theirs if id(optimizer) in stepped else _hyperparameters(optimizer)
            for optimizer, theirs in zip(self.optimizers, largest["groups"], strict=True)
        ]
        self._load({**self._start, **{key: largest[key] for key in ("schedulers", "scaler")}, "groups": groups})
        for scheduler, then in zip(self.epoch_schedulers, largest["epoch_schedulers"], strict=True):
            # It has stepped since, but from where another client left the learning rate.
            if getattr(scheduler, "last_epoch", None) != then.get("last_epoch"):
                scheduler.load_state_dict(copy.deepcopy(then))
                scheduler.step()

    def checkpoint(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
        """The states of optimizers, per-step schedulers and loss scale at the round's start, as checkpoints hold them.

        The last is empty where there is none.
        """
        states = []
        for optimizer, buffers, groups in zip(
            self.optimizers, self._start["buffers"], self._start["groups"], strict=True
        ):
            now = optimizer.state_dict()["param_groups"]
            states.append(
                {
                    "state": copy.deepcopy(buffers),
                    "param_groups": [{**group, **values} for group, values in zip(now, groups, strict=True)],
                }
            )
        return states, copy.deepcopy(self._start["schedulers"]), copy.deepcopy(self._start["scaler"])

    def _capture(self, buffers: bool = True) -> dict[str, Any]:
        state: dict[str, Any] = {
            "groups": [_hyperparameters(optimizer) for optimizer in self.optimizers],
            "schedulers": [copy.deepcopy(scheduler.state_dict()) for scheduler in self.step_schedulers],
            "epoch_schedulers": [copy.deepcopy(scheduler.state_dict()) for scheduler in self.epoch_schedulers],
            "scaler": copy.deepcopy(self.scaler.state_dict()) if self.scaler is not None else {},
        }
        if buffers:
            state["buffers"] = [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in self.optimizers]
        return state

    def _sliced(
        self, buffers: Sequence[Mapping[Any, Any]], rows: Sequence[tuple[Tensor, Tensor]]
    ) -> list[dict[Any, Any]]:
        """The buffers with some rows of those of some parameters, as Adagrad's sums, which are there from the start."""
        sliced = []
        for optimizer, own in zip(self.optimizers, buffers, strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            copies = dict(own)
            for place, parameter in enumerate(parameters):
                held = next((held for other, held in rows if other is parameter), None)
                if held is not None and place in own:
                    copies[place] = {
                        name: value[held.to(value.device)]
                        if isinstance(value, Tensor) and value.ndim and value.shape[1:] == parameter.shape[1:]
                        else value
                        for name, value in own[place].items()
                    }
            sliced.append(copies)
        return sliced

    def _load(self, state: Mapping[str, Any]) -> None:
        for optimizer, buffers, groups in zip(self.optimizers, state["buffers"], state["groups"], strict=True):
            now = optimizer.state_dict()["param_groups"]
            merged = [{**group, **values} for group, values in zip(now, groups, strict=True)]
            optimizer.load_state_dict({"state": copy.deepcopy(buffers), "param_groups": merged})
        for scheduler, values in zip(self.step_schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(copy.deepcopy(values))
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])


def pack_optimizers(optimizers: Sequence[Optimizer]) -> State:
    """The optimizers' buffers as a flat dictionary of tensors.

    Raises:
        TypeError: If a buffer is neither a tensor nor a number.

    """
    packed: State = {}
    for number, optimizer in enumerate(optimizers):
        for parameter, buffers in optimizer.state_dict()["state"].items():
            for name, value in buffers.items():
                key = f"{_OPTIMIZER}{number}:{parameter}:{name}"
                if isinstance(value, Tensor):
                    packed[f"{key}:tensor"] = value
                elif isinstance(value, int | float):
                    kind = type(value).__name__
                    packed[f"{key}:{kind}"] = torch.tensor(
                        value, dtype=torch.float64 if kind == "float" else torch.int64
                    )
                elif value is not None:
                    raise TypeError(
                        f"Expected the state of {type(optimizer).__name__} to hold tensors and numbers, but {name!r} is"
                        f" a {type(value).__name__}: use optimizer_state='reset'."
                    )
    return packed


def unpack_optimizers(optimizers: Sequence[Optimizer], packed: Mapping[str, Tensor]) -> None:
    """Puts back what :func:`pack_optimizers` took; hyper-parameters are left as they are."""
    states: list[dict[Any, dict[str, Any]]] = [{} for _ in optimizers]
    for key, value in packed.items():
        number, parameter, name, kind = key.removeprefix(_OPTIMIZER).split(":")
        index: Any = int(parameter) if parameter.lstrip("-").isdigit() else parameter
        kept = value.clone() if kind == "tensor" else {"float": float, "int": int, "bool": bool}[kind](value.item())
        states[int(number)].setdefault(index, {})[name] = kept
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def forget_memory(store: ClientStore, client: Client, round: int, prefix: str) -> None:
    """Has a client forget what callbacks keep for it under names that begin with ``prefix``, as of ``round``.

    Example:
        >>> from lightning_fed.store import MemoryStore
        >>> store = MemoryStore()
        >>> store.put("a", 0, {"head": torch.tensor(1.0), "memory:visits": torch.tensor(2)})
        >>> forget_memory(store, "a", 1, "visits")
        >>> store.get("a")
        {'head': tensor(1.)}

    """
    kept = store.get(client) or {}
    store.put(client, round, {name: kept[name] for name in kept if not name.startswith(f"{_MEMORY}{prefix}")})
