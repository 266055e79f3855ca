"""Tasks for classification, segmentation and character prediction, as ordinary LightningModules."""

from lightning_fed.tasks.base import Task as Task
from lightning_fed.tasks.char_language import CharLanguageTask as CharLanguageTask
from lightning_fed.tasks.char_language import CharLSTM as CharLSTM
from lightning_fed.tasks.classification import ClassificationTask as ClassificationTask
from lightning_fed.tasks.networks import NETWORKS as NETWORKS
from lightning_fed.tasks.networks import build_network as build_network
from lightning_fed.tasks.segmentation import SegmentationTask as SegmentationTask

__all__ = [
    "NETWORKS",
    "CharLSTM",
    "CharLanguageTask",
    "ClassificationTask",
    "SegmentationTask",
    "Task",
    "build_network",
]
