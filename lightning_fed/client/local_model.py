"""The client half of a round: load what the server sent, keep at home what stays, answer with an update."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torch import Tensor, nn

from lightning_fed.client.client_store import ClientStore
from lightning_fed.client.local_optimizers import OPTIMIZER
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.model.entries import Policy, copy_state, live_entries, load_entries, norm
from lightning_fed.model.resize import resize_module, set_tensor_data
from lightning_fed.numerics.chunks import cache_chunks

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
        policies: The policy of every entry, of :func:`lightning_fed.model.entries.entry_policies`.
        store: Where clients keep their personal entries.
        resizes: Whether entries may come with other shapes, which the module's then take.

    Attributes:
        memory: What callbacks keep for the client between its visits, after :meth:`recall`: empty before its first.

    Raises:
        ValueError: If the module has entries without a policy, which were added since the policies were decided.

    """

    def __init__(
        self, module: nn.Module, policies: Mapping[str, Policy], store: ClientStore, resizes: bool = False
    ) -> None:
        self._module = module if resizes else None
        self.entries = live_entries(module)
        added = [name for name in self.entries if name not in policies]
        if added:
            raise ValueError(
                "Expected the module to keep its parameters and buffers until the fit ends, but these were added since"
                f" it began: {', '.join(added[:5])}."
            )
        self.store = store
        self.parameters = [
            name for name, _ in module.named_parameters() if policies.get(name) in _TRAVELS and name in self.entries
        ]
        self.shared = [name for name in self.entries if policies[name] in _TRAVELS]
        self.personal = [name for name in self.entries if policies[name] == "personal"]
        self.server_entries = copy_state(
            {name: value for name, value in self.entries.items() if policies[name] not in _TRAVELS}
        )
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
        self._load({**state, **self.server_entries})

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
        personal = {name: value for name, value in kept.items() if not name.startswith((OPTIMIZER, _MEMORY))}
        own = {name: state[name].clone() for name in self.sliced if name in state} if trains else {}
        self._load({**state, **own, **self.server_entries, **personal})

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
        return {name: value for name, value in (self.store.get(client) or {}).items() if name.startswith(OPTIMIZER)}

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
            set_tensor_data(owner, state.get(name, owner).detach())
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
        pairs = (zip(cache_chunks(ours[name]), cache_chunks(theirs[name]), strict=True) for name in names)
        return float(norm(one - other for one, other in itertools.chain.from_iterable(pairs))) if names else None


def forget_memory(store: ClientStore, client: Client, round: int, prefix: str) -> None:
    """Has a client forget what callbacks keep for it under names that begin with ``prefix``, as of ``round``.

    Example:
        >>> import torch
        >>> from lightning_fed.client.client_store import MemoryStore
        >>> store = MemoryStore()
        >>> store.put("a", 0, {"head": torch.tensor(1.0), "memory:visits": torch.tensor(2)})
        >>> forget_memory(store, "a", 1, "visits")
        >>> store.get("a")
        {'head': tensor(1.)}

    """
    kept = store.get(client) or {}
    store.put(client, round, {name: kept[name] for name in kept if not name.startswith(f"{_MEMORY}{prefix}")})
