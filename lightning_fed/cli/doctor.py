"""``lightning-fed doctor``: prints versions, devices and missing extras."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

from lightning_fed import __version__
from lightning_fed.errors import describe
from lightning_fed.lazy_names import installed_version

PACKAGE = "lightning-fed"
FEATURES = {
    "demo": "`lightning-fed demo`, TensorBoard logs, all pictures and curves",
    "flower": "clients on other machines: `lightning-fed flower`, `lightning_fed.backends.flower`",
    "nvflare": "clients on other machines: `lightning-fed nvflare`, `lightning_fed.backends.nvflare`",
    "peft": "models for text, and low-rank adapters (LoRA)",
    "privacy": "privacy budgets, `CentralDP`, `DPSGD`, `lightning-fed privacy`",
}
"""Purpose by extra. The list excludes extras for development."""


@dataclass(frozen=True)
class PackageState:
    """Requirement for a package, and the installed version, or ``None`` if the package is missing."""

    requirement: Requirement
    installed: str | None

    @property
    def is_good(self) -> bool:
        return self.installed is not None and self.requirement.specifier.contains(self.installed, prereleases=True)

    def __str__(self) -> str:
        wanted = "" if self.is_good else f"   expected {self.requirement.specifier or 'any version'}"
        return f"{self.requirement.name:30} {self.installed or 'missing'}{wanted}"


def run(args: Sequence[str]) -> None:
    """Runs ``lightning-fed doctor`` with arguments ``args``. Exits with status 1 if a check fails."""
    options = _parser().parse_args(args)
    if options.flower is not None:
        _check_flower(options)
        return
    try:
        requirements = requires(PACKAGE) or []
    except PackageNotFoundError:
        sys.stderr.write(f"error: {PACKAGE} {__version__} is imported without an installation: pip install PATH\n")
        raise SystemExit(1) from None
    for line in examine(requirements):
        print(line, flush=True)  # noqa: T201 - the devices take seconds
    if not all(state.is_good for state in states_of(_needed(requirements))):
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-fed doctor",
        description="Print the versions of required packages, the devices, and the installed extras. For missing "
        "extras, print their purpose and the command to install them. The exit status is 1 if a required "
        "package is missing. With --flower, check the connection to a server instead.",
    )
    parser.add_argument("--flower", metavar="NAME:PORT", help="check a node's connection to the server at this address")
    parser.add_argument("--ca", type=Path, default=Path("keys/ca.crt"), help="the server's ca.crt (keys/ca.crt)")
    parser.add_argument("--key", type=Path, help="the node's private key, to check the registration")
    return parser


def _check_flower(options: argparse.Namespace) -> None:
    from lightning_fed.backends.flower.connection_check import Broken, check_connection

    try:
        for line in check_connection(options.flower, options.ca, options.key):
            sys.stdout.write(f"{line}\n")
    except Broken as error:
        sys.stderr.write(f"error: {error}.\n")
        raise SystemExit(1) from None


def examine(requirements: Sequence[str]) -> Iterator[str]:
    """Yields lines about versions, devices and extras. ``requirements`` lists all dependencies, also for extras."""
    yield f"{PACKAGE} {__version__}"
    yield f"Python {platform.python_version()}, {platform.platform()}"
    yield from ("", "Always needed", *(f"  {state}" for state in states_of(_needed(requirements))), "", "Devices")
    yield from (f"  {device}" for device in devices())
    yield from ("", "Extras")
    parsed = [Requirement(text) for text in requirements]
    for extra, feature in FEATURES.items():
        states = states_of([requirement for requirement in parsed if is_of_extra(requirement, extra)])
        is_installed = all(state.is_good for state in states)
        yield f"  {extra}: {'installed' if is_installed else 'missing'}, for {feature}"
        yield from (f"    {state}" for state in states)
        if not is_installed:
            yield f"    pip install '{PACKAGE}[{extra}]'"


def _needed(requirements: Sequence[str]) -> list[Requirement]:
    parsed = [Requirement(text) for text in requirements]
    return [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]


def is_of_extra(requirement: Requirement, extra: str) -> bool:
    """True if a requirement belongs only to the optional dependencies named ``extra``."""
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def states_of(requirements: Sequence[Requirement]) -> list[PackageState]:
    """Returns the installed version of each requirement."""
    return [PackageState(requirement, installed_version(requirement.name)) for requirement in requirements]


def devices() -> list[str]:
    """Describes all devices known to Lightning, or the error from ``import torch``."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return [f"torch cannot be imported: {describe(error)}"]
    count = os.cpu_count() or 1
    descriptions = [f"cpu: {count} cores, threads for PyTorch: {torch.get_num_threads()}"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        descriptions.append(f"cuda:{index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        descriptions.append("mps: Apple's GPU")
    return descriptions if len(descriptions) > 1 else [*descriptions, "no GPU visible to PyTorch"]
