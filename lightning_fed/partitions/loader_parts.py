"""Reads a ``DataLoader``'s sampler and batch size, and finds methods overridden by the user."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lightning_fed.errors import OptionError

LOADER_OPTIONS = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
)  # fmt: skip
_ATTRIBUTES = ("dataset", "sampler", "batch_sampler", "batch_size", "drop_last", "collate_fn", "generator")
LOADERS_REMEDY = "Give each client its own loader in a FederatedDataModule."


def batches_of(loader: DataLoader[Any]) -> tuple[Any, int | None, bool]:
    """Returns a loader's sampler, batch size and ``drop_last``. For a custom batch sampler, the size is ``None``."""
    batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(batches) is BatchSampler:
        return batches.sampler, batches.batch_size, batches.drop_last
    return batches, None, False


def is_whole(sampler: Any, dataset: Any) -> bool:
    """True if a sampler from torch draws every example of ``dataset`` exactly once per pass."""
    if type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples != len(dataset)):
        return False
    return type(sampler) in (RandomSampler, SequentialSampler) and len(sampler.data_source) == len(dataset)


def changed_methods(loader: DataLoader[Any]) -> set[str]:
    """Names of ``DataLoader`` methods and attributes that a loader or the loader's class overrides."""
    methods = {name for name, value in vars(DataLoader).items() if callable(value) or isinstance(value, property)}
    # Lightning wraps every `__init__` during `train_dataloader`, and saves the original under the second name.
    methods = (methods | {"__getattribute__"}) - {"__init__", "__old__init__"}
    changed = vars(loader).keys() & methods
    for layer in itertools.takewhile(lambda layer: layer is not DataLoader, type(loader).__mro__):
        changed |= vars(layer).keys() & methods
        changed |= {name for name in _ATTRIBUTES if inspect.isdatadescriptor(vars(layer).get(name))}
    return changed


def check_class(loader: DataLoader[Any], purpose: str) -> None:
    """Refuses a loader whose class overrides ``DataLoader`` methods. ``purpose`` is a part of the error message."""
    changed = changed_methods(loader)
    if changed:
        raise OptionError(
            f"Expected a DataLoader {purpose}, but {type(loader).__name__} overrides `{min(changed)}`, which would "
            "have no effect: change batches in `collate_fn`, in the module's `on_after_batch_transfer`, or in a "
            f"`sampler`. {LOADERS_REMEDY}"
        )
