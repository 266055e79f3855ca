"""Check for equal class numbers in the clients' data sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_fed.messages import Client


class ClassNumbers:
    """Classes by ``class_to_idx``, the attribute of torchvision's image folders.

    An image folder numbers only existing classes. Two sites with different folders may give one number two meanings.

    Example:
        >>> class Folder(list):
        ...     class_to_idx = {"cat": 0, "dog": 1}
        >>> numbers = ClassNumbers()
        >>> numbers.check("a", Folder())
        >>> Folder.class_to_idx = {"dog": 0}
        >>> numbers.check("b", Folder())
        Traceback (most recent call last):
            ...
        ValueError: Expected one number for each class, but class 'dog' has 1 at client 'a' and 0 at client 'b': ...

    """

    def __init__(self) -> None:
        self._numbers: dict[str, tuple[int, Client]] = {}
        self._names: dict[int, tuple[str, Client]] = {}

    def check(self, client: Client, data: Any) -> None:
        """Adds a client's classes.

        Args:
            client: The client's key.
            data: The client's data set or loader.

        Raises:
            ValueError: If a class has another number at another client, or a number another class.

        """
        for classes in _named_classes(data):
            for name, number in classes.items():
                known, owner = self._numbers.setdefault(name, (number, client))
                other, namer = self._names.setdefault(number, (name, client))
                if known != number:
                    fault = f"class {name!r} has {known} at client {owner!r} and {number} at client {client!r}"
                elif other != name:
                    fault = f"{number} is {other!r} at client {namer!r} and {name!r} at client {client!r}"
                else:
                    continue
                raise ValueError(
                    f"Expected one number for each class, but {fault}: give every data set the same `class_to_idx`,"
                    " for example with empty folders for missing classes and `allow_empty=True`, or by a"
                    " `target_transform`, and delete the attribute if it is no longer true."
                )


def _named_classes(data: Any) -> Iterator[Mapping[str, int]]:
    classes = getattr(data, "class_to_idx", None)
    if isinstance(classes, Mapping):
        yield classes
    elif isinstance(data, ConcatDataset):
        for part in data.datasets:
            yield from _named_classes(part)
    elif isinstance(data, Subset | DataLoader):
        yield from _named_classes(data.dataset)
