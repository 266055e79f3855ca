"""Loads clients' models into the user's module, and builds updates from the trained module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.client.client_store import ClientStore
from lightning_fed.client.packed_optimizers import OPTIMIZER
from lightning_fed.console import list_first
from lightning_fed.errors import OptionError
from lightning_fed.messages import Client, ClientUpdate, State, without_prefix
from lightning_fed.model.entries import (
    Policy,
    copy_adjacent,
    copy_state,
    entry_names,
    find_fault,
    find_implausible,
    identical_entries,
    live_entries,
    load_entries,
    tensor_slots,
)
from lightning_fed.model.resize import resize_module, set_tensor_data
from lightning_fed.numerics.precision import as_real
from lightning_fed.numerics.trees import norms

OWN_MODEL = "model:"
"""Prefix for names in a client's memory: entries of a personal model for evaluation."""

STATISTICS = "batch_norm:"
"""Prefix for names in the store: a client's BatchNorm statistics for evaluation."""

_MEMORY = "memory:"
_PREFIXES = OPTIMIZER, STATISTICS, _MEMORY
_TRAVELS = ("shared", "sliced")
_KINDS = ("_parameters", "_buffers", "_modules")


class LocalModel:
    """Loads the models of clients into the user's module, one client after another.

    When no client trains, the module has the global model. An entry is a parameter or buffer in ``state_dict``. A
    client's model has four kinds of entries:

    - Shared entries have the values sent by the server.
    - Sliced entries are tables. A client receives and trains only some rows.
    - Frozen entries have the server's values and are not sent.
    - Personal entries have the values after the client's last training, at first the server's initial values.

    Buffers outside ``state_dict`` are reset for every client. Tensors and layers added in training are removed.

    Args:
        module: The user's module.
        policies: Kind of every entry, from :func:`lightning_fed.model.entries.entry_policies`.
        store: Store for the personal entries.
        resizes: Whether the module adopts new shapes of received entries.
        initial: Initial values of personal entries, if different from the server's.

    Attributes:
        server_entries: The server's values for entries that are not sent.
        dropped: Names of buffers outside ``state_dict`` with changes in training. The changes are dropped.
    """

    def __init__(
        self,
        module: nn.Module,
        policies: Mapping[str, Policy],
        store: ClientStore,
        resizes: bool = False,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._module, self._resizes = module, resizes
        self._initial = initial or {}
        names, slots = entry_names(module), {slot.tensor: slot for slot in reversed(tensor_slots(module))}
        self.entries = live_entries(module)
        added = [name for name in self.entries if name not in policies]
        if added:
            raise ValueError(
                "Expected the module to have the same parameters and buffers until the round ends, but these were "
                f"added: {list_first(added)}."
            )
        self.store = store
        self.parameters = [
            name for tensor, name in names.items() if isinstance(tensor, nn.Parameter) and policies[name] in _TRAVELS
        ]
        self.shared = [name for name in self.entries if policies[name] in _TRAVELS]
        self.personal = [name for name in self.entries if policies[name] == "personal"]
        self.server_entries = copy_state(
            {name: value for name, value in self.entries.items() if policies[name] not in _TRAVELS}
        )
        self.sliced = {name: tensor for tensor, name in names.items() if policies[name] == "sliced"}
        # Trained entries, and statistics of one kind, are adjacent in a copy.
        order = [*self.parameters, *sorted(self.shared, key=lambda name: name.rpartition(".")[2])]
        self._whole = [name for name in dict.fromkeys(order) if name not in self.sliced]
        self._slots = {name: slots[tensor] for tensor, name in names.items() if name not in self.sliced}
        unsaved = [slots[tensor] for tensor in slots if tensor not in names]
        self._unsaved = [slot for slot in unsaved if isinstance(slot.tensor, nn.Parameter)]
        self._unsaved_norms = self._find_unsaved_norms()
        self._buffers = [(slot, slot.tensor.clone()) for slot in unsaved if not isinstance(slot.tensor, nn.Parameter)]
        self._members = {layer: _members(layer) for layer in module.modules()}
        self._additions: dict[tuple[nn.Module, str], tuple[Any, bool]] = {}
        self.dropped = set[str]()

    def global_state(self, known: Mapping[str, Tensor] | None = None) -> State:
        """Returns copies of the parameters and buffers shared with the server.

        If ``known`` has an equal tensor, this tensor is returned instead of a copy. If clients receive only some rows
        of a tensor, the tensor itself is returned, because copies may be large.
        """
        self._find_entries()
        known = {name: value for name, value in (known or {}).items() if name in self.entries}
        unchanged = identical_entries({name: self.entries[name] for name in known}, known)
        copied = copy_adjacent({name: self.entries[name] for name in self._whole if name not in unchanged})
        return {
            name: known[name] if name in unchanged else copied.get(name, self.entries[name]) for name in self.shared
        }

    def load_global(self, state: Mapping[str, Tensor]) -> None:
        """Loads the global model: shared entries from ``state``, and other entries from :attr:`server_entries`.

        The caller must not change ``state`` afterwards: tables with single rows per client (FedSS) are not copied.
        """
        self.load({**state, **self.server_entries})
        additions, self._additions = self._additions, {}
        for (layer, name), (value, is_persistent) in additions.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                layer.register_buffer(name, value, is_persistent)
            elif value is not None:
                setattr(layer, name, value)

    def changed_server_entries(self, names: Iterable[str]) -> list[str]:
        self._find_entries()
        pairs = {name: (self.entries[name], self.server_entries[name]) for name in names if name in self.server_entries}
        return [name for name, (value, server_value) in pairs.items() if not _is_equal(value, server_value)]

    def load_client(
        self,
        client: Client,
        state: Mapping[str, Tensor],
        stored: State | None = None,
        own_model: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Loads a client's model.

        ``state`` has the shared parameters and buffers. ``stored`` has the personal ones, by default from the store. In
        an evaluation, tensors in ``own_model`` take precedence over all others.
        """
        stored = self.recall(client) if stored is None else stored
        personal = {name: value for name, value in stored.items() if not name.startswith(_PREFIXES)}
        if own_model is None:
            # Training must not change the server's rows.
            copies = {name: state[name].clone() for name in self.sliced if name in state}
            self.load({**state, **copies, **self.server_entries, **self._initial, **personal})
        else:
            self.load({**state, **self.server_entries, **personal, **own_model})

    def client_entries(self) -> State:
        self._find_entries()
        return copy_state({name: self.entries[name] for name in (*self.shared, *self.personal)})

    def recall(self, client: Client) -> State:
        return self.store.get(client) or {}

    def store_client(
        self,
        client: Client,
        round: int,
        optimizer_state: Mapping[str, Tensor],
        memory: Mapping[str, Tensor],
    ) -> None:
        self._find_entries(self.personal)
        client_state = {name: self.entries[name] for name in self.personal} | dict(optimizer_state)
        client_state |= {f"{_MEMORY}{name}": value for name, value in memory.items()}
        if client_state:
            self.store.put(client, round, client_state)

    def find_personal_fault(self, client: Client) -> str | None:
        """Describes the first faulty personal parameter or buffer after training, if any.

        Faults are another shape or dtype, and values that became NaN, infinite or extreme.
        """
        if not self.personal:
            return None
        self._find_entries(self.personal)
        personal = {name: self.entries[name] for name in self.personal}
        fault = find_fault(personal, {name: self.server_entries[name] for name in personal})
        if fault is not None or find_implausible(personal) is None:
            return fault
        start = {**self.server_entries, **self._initial, **self.recall(client)}
        was_plausible = [name for name in personal if find_implausible({name: start[name]}) is None]
        return find_implausible({name: personal[name] for name in was_plausible})

    def answer(self, client: Client, num_samples: int, known: Mapping[str, Tensor] | None = None) -> ClientUpdate:
        """Builds the client's update, see :meth:`global_state`.

        Raises an error if training changed tensors outside ``state_dict``, except buffers with ``persistent=False``.
        """
        self._check_unsaved()
        return ClientUpdate(client, num_samples, self.global_state(known))

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, owner in self.sliced.items():
            rows = state.get(name, owner)
            if rows.shape[1:] != owner.shape[1:] or rows.dtype != owner.dtype:
                raise ValueError(
                    f"The state cannot be loaded: each row of entry {name!r} has dtype {rows.dtype} and shape "
                    f"{tuple(rows.shape[1:])}, but each row of the module's entry has dtype {owner.dtype} and shape "
                    f"{tuple(owner.shape[1:])}."
                )
        self._reset_unsaved()
        for _, layer, attribute, tensor in self._slots.values():  # the module's original tensor is restored
            if getattr(layer, attribute) is not tensor:
                setattr(layer, attribute, tensor)
        if self._resizes:
            resize_module(self._module, {name: value for name, value in state.items() if name not in self.sliced})
        self._find_entries()
        load_entries(
            {name: value for name, value in self.entries.items() if name not in self.sliced},
            {name: value for name, value in state.items() if name not in self.sliced},
        )
        for name, owner in self.sliced.items():
            set_tensor_data(owner, state.get(name, owner).detach())
            self.entries[name] = owner.detach()

    def _check_unsaved(self) -> None:
        changed = {
            path: attribute in vars(layer)["_non_persistent_buffers_set"]
            for (path, layer, attribute, _), before in self._buffers
            if _is_other(getattr(layer, attribute, None), before)
        }
        # Only norms are compared, because a frozen backbone outside `state_dict` may be large.
        lengths = zip(self._unsaved, self._unsaved_norms, self._find_unsaved_norms(), strict=True)
        changed |= {slot.path: False for slot, before, after in lengths if before != after and before == before}
        for path, is_declared in changed.items():
            if not is_declared:
                raise OptionError(
                    f"Expected `{type(self._module).__name__}.state_dict()` to contain every tensor that changes in "
                    f"training, but {path!r} has changed and shares no memory with an entry: include the tensor in "
                    "`state_dict`."
                )
        self.dropped |= changed.keys()

    def _find_unsaved_norms(self) -> list[float]:
        return [float(length) for length in norms(slot.tensor.detach() for slot in self._unsaved)]

    @torch.no_grad()
    def _reset_unsaved(self) -> None:
        # Removes additions of the last visit, so that visits pass on no information.
        differing = []
        for layer, before in self._members.items():
            for name, value in _members(layer).items():
                if value is None or before.get(name) is not None:
                    continue
                is_persistent = name not in vars(layer)["_non_persistent_buffers_set"]
                if name in before:
                    setattr(layer, name, None)
                else:
                    delattr(layer, name)
                first, _ = self._additions.setdefault((layer, name), (value, is_persistent))
                if not _are_alike(first, value):
                    self._additions[layer, name] = None, False
                    if is_persistent:
                        differing.append(f"{type(layer).__name__}.{name}")
        if differing:
            raise OptionError(
                f"Expected all clients to start from the same model, but training adds {differing[0]!r} with different"
                " values for two clients: create the tensor or layer before `fit`, for example by a dry run (one"
                " batch through the module)."
            )
        for (_, layer, attribute, tensor), start in self._buffers:
            if getattr(layer, attribute, None) is not tensor:
                setattr(layer, attribute, tensor)
            tensor.copy_(start)

    def _find_entries(self, names: Iterable[str] | None = None) -> None:
        # A module may assign tensors or data instead of writing in place.
        for name in self._slots if names is None else names:
            path, layer, attribute, tensor = self._slots[name]
            current = getattr(layer, attribute, None)
            if not isinstance(current, Tensor):
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise ValueError(f"Expected {kind} {path!r} to stay a tensor, but training replaced it by {current!r}.")
            if not current.is_set_to(self.entries[name]):  # faster than a new view
                self.entries[name] = as_real(current.detach())


def memory_of(stored: State) -> State:
    """Returns the tensors stored by callbacks and update steps (such as compression), without other client state."""
    return without_prefix(stored, _MEMORY)


def forget_memory(store: ClientStore, client: Client, round: int, prefix: str) -> None:
    """Deletes a client's stored callback tensors whose names start with ``prefix``. ``round`` is the current round."""
    client_state = store.get(client) or {}
    remaining = {name: value for name, value in client_state.items() if not name.startswith(f"{_MEMORY}{prefix}")}
    store.put(client, round, remaining)


def _members(layer: nn.Module) -> dict[str, Any]:
    return {name: value for kind in _KINDS for name, value in vars(layer).get(kind, {}).items()}


def _is_other(value: object, before: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.shape != before.shape or value.dtype != before.dtype:
        return False  # a cache whose size changed
    return value.layout == torch.strided and not _is_equal(value, before)


def _is_equal(left: Tensor, right: Tensor) -> bool:
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _are_alike(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, nn.Module) and isinstance(second, nn.Module):
        first_state, second_state = first.state_dict(), second.state_dict()
        names = first_state.keys() | second_state.keys()
        return all(_are_alike(first_state.get(name), second_state.get(name)) for name in names)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and first.dtype == second.dtype and _is_equal(first, second)
    return False
