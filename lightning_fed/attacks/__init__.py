"""Simulated attacks by malicious clients, for testing a federation."""

from lightning_fed.attacks.attack import Attack as Attack
from lightning_fed.attacks.data import Backdoor as Backdoor
from lightning_fed.attacks.data import LabelFlip as LabelFlip
from lightning_fed.attacks.data import add_trigger as add_trigger
from lightning_fed.attacks.data import flip_labels as flip_labels
from lightning_fed.attacks.omniscient import ALIE as ALIE
from lightning_fed.attacks.omniscient import IPM as IPM
from lightning_fed.attacks.omniscient import HonestSteps as HonestSteps
from lightning_fed.attacks.omniscient import Mimic as Mimic
from lightning_fed.attacks.omniscient import OmniscientAttack as OmniscientAttack
from lightning_fed.attacks.updates import BadValues as BadValues
from lightning_fed.attacks.updates import FreeRider as FreeRider
from lightning_fed.attacks.updates import GaussianNoise as GaussianNoise
from lightning_fed.attacks.updates import Scaling as Scaling
from lightning_fed.attacks.updates import SignFlip as SignFlip
from lightning_fed.attacks.updates import UpdateAttack as UpdateAttack

__all__ = [
    "ALIE",
    "IPM",
    "Attack",
    "Backdoor",
    "BadValues",
    "FreeRider",
    "GaussianNoise",
    "HonestSteps",
    "LabelFlip",
    "Mimic",
    "OmniscientAttack",
    "Scaling",
    "SignFlip",
    "UpdateAttack",
    "add_trigger",
    "flip_labels",
]
