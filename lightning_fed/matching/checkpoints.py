"""Loads checkpoints, also into modules with different layer widths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import lightning as L
import torch
from torch import Tensor, nn

from lightning_fed.console import list_first
from lightning_fed.matching.match_widths import match_widths
from lightning_fed.matching.permutation_check import restored_afterwards, split_inputs
from lightning_fed.numerics.trees import move_tensors

# Path, content of a Lightning checkpoint, or module state.
Checkpoint: TypeAlias = str | Path | Mapping[str, Any]

M = TypeVar("M", bound=nn.Module)

_OF_ONE_RUN = ("callbacks", "loops", "lr_schedulers", "optimizer_states")


def load_matched(module: M, checkpoint: Checkpoint, example_input: Any = None) -> M:
    """Loads a checkpoint with other layer widths than the module.

    Matched averaging can change widths, so ``load_from_checkpoint`` fails. This function first resizes the module's
    layers, including the output layer. Files are loaded with ``weights_only=True``.

    Args:
        module: Module with the same architecture, changed in place and returned.
        checkpoint: Path or content of a checkpoint, or a state dict.
        example_input: Input of ``forward`` to test other widths: a tensor, a tuple, or a dictionary of named inputs.
            The default is a LightningModule's ``example_input_array``; otherwise ``forward`` is not tested.

    Raises:
        ValueError: If the checkpoint does not fit the module's layers. The module is then unchanged.

    Example:
        >>> wide = nn.Sequential(nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 1))
        >>> net = load_matched(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), wide.state_dict())
        >>> net[0].out_features, torch.equal(net(torch.ones(4, 2)), wide(torch.ones(4, 2)))
        (9, True)
    """
    content = read_checkpoint(checkpoint)
    if "state_dict" in content and isinstance(module, L.LightningModule):
        module.on_load_checkpoint(content)
    state = state_of(content)
    module_state = module.state_dict()
    check_entries(module_state, state, "the checkpoint")
    for name, value in module_state.items():
        if isinstance(value, Tensor) and not isinstance(state[name], Tensor):
            raise ValueError(
                f"Expected {name!r} of the checkpoint to be a tensor, but got {type(state[name]).__name__}."
            )
    if example_input is None and isinstance(module, L.LightningModule):
        example_input = module.example_input_array
    if example_input is not None and any(
        module_state[name].shape != value.shape for name, value in _tensors(state).items()
    ):
        _run_example(module, state, example_input)
    match_widths(module, state)
    module.load_state_dict(state)
    return module


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _run_example(module: nn.Module, state: Mapping[str, Any], example: Any) -> None:
    device = next((value.device for value in module.state_dict().values() if isinstance(value, Tensor)), None)
    example = move_tensors(example, device)
    args, kwargs = split_inputs(example)
    with restored_afterwards(module), torch.random.fork_rng(devices=[]):
        match_widths(module, state)
        torch.default_generator.manual_seed(0)
        try:
            module(*args, **kwargs)
        except Exception as error:  # modules with fixed widths in their code may raise any exception
            raise ValueError(
                "Expected `forward` to work with the checkpoint's layer widths (instead of widths fixed in the code), "
                f"but a call with the example input raised {_first_line(error)}"
            ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}{f': {lines[0]}' if lines else '.'}"


def read_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Loads a checkpoint file onto the CPU. Copies the dictionaries of a checkpoint that is already loaded."""
    if isinstance(checkpoint, Mapping):
        content, label = dict(checkpoint), "the checkpoint"
    else:
        label = str(checkpoint)
        if Path(checkpoint).is_dir():
            raise ValueError(f"Expected {label} to be a checkpoint, but got a folder.")
        try:
            content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        except OSError:  # missing or unreadable file
            raise
        except Exception as error:  # other file formats may raise any exception
            raise ValueError(
                f"Expected {label} to be a checkpoint with tensors and primitives only, but reading raises "
                f"{_first_line(error)}: pass a file from `Trainer.save_checkpoint` or `torch.save`."
            ) from error
        if not isinstance(content, dict):
            raise ValueError(f"Expected {label} to be a checkpoint, but got {type(content).__name__}.")
    state = content.get("state_dict", {})
    if not isinstance(state, Mapping):
        raise ValueError(
            f"Expected the `state_dict` of {label} to have entries by name, but got {type(state).__name__}."
        )
    if "state_dict" in content:
        content["state_dict"] = dict(state)
    return content


def state_of(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the model state in a checkpoint's content. A bare model state is returned unchanged."""
    state: dict[str, Any] = content.get("state_dict", content)
    return state


def check_entries(module_names: Iterable[str], state: Iterable[str], label: str) -> None:
    """Raises ``ValueError`` if a module and a state have different entry names."""
    expected, actual = set(module_names), set(state)
    faults = [
        f"{words} {list_first(sorted(names))}"
        for words, names in (("lacks", expected - actual), ("contains unexpected", actual - expected))
        if names
    ]
    if faults:
        raise ValueError(f"Expected {label} to have the module's entries, but it {' and '.join(faults)}.")


def with_state(content: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a checkpoint's content with another state dict, and without optimizer and loop states."""
    if "state_dict" not in content:
        return dict(state)
    return {name: value for name, value in content.items() if name not in _OF_ONE_RUN} | {"state_dict": dict(state)}
