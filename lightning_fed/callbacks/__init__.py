"""Callbacks for a Trainer: the federation, pictures, reports; and the methods' own callbacks."""

from lightning_fed.algorithms.ditto import PersonalModel as PersonalModel
from lightning_fed.algorithms.fedala import AdaptiveAggregation as AdaptiveAggregation
from lightning_fed.algorithms.fedaws.callback import SpreadOut as SpreadOut
from lightning_fed.algorithms.feddane.gradient_correction import GradientCorrection as GradientCorrection
from lightning_fed.algorithms.feddyn import DynamicRegularizer as DynamicRegularizer
from lightning_fed.algorithms.fedfusion.callback import FeatureFusion as FeatureFusion
from lightning_fed.algorithms.fedma.callback import LayerwiseTraining as LayerwiseTraining
from lightning_fed.algorithms.fedmargin.attention_map import AttentionMap as AttentionMap
from lightning_fed.algorithms.fedmargin.callback import ClassPrototypes as ClassPrototypes
from lightning_fed.algorithms.fedmargin.prototype_plots import PrototypePlots as PrototypePlots
from lightning_fed.algorithms.fednova import StepLength as StepLength
from lightning_fed.algorithms.fedrep import HeadThenBody as HeadThenBody
from lightning_fed.algorithms.fedss.callback import SampledSoftmax as SampledSoftmax
from lightning_fed.algorithms.fesem.center_evaluation import CenterEvaluation as CenterEvaluation
from lightning_fed.algorithms.moon import ContrastiveTerm as ContrastiveTerm
from lightning_fed.algorithms.proximal_term import ProximalTerm as ProximalTerm
from lightning_fed.algorithms.qffl import LossReport as LossReport
from lightning_fed.algorithms.scaffold import ControlVariates as ControlVariates
from lightning_fed.backends.client_parallel import strategy as _strategy  # noqa: F401 - gives it its name in Lightning
from lightning_fed.callbacks.class_confusion import Confusion as Confusion
from lightning_fed.callbacks.class_confusion import OwnClassConfusion as OwnClassConfusion
from lightning_fed.callbacks.client_segmentations import ClientSegmentations as ClientSegmentations
from lightning_fed.callbacks.communication import CommunicationReport as CommunicationReport
from lightning_fed.callbacks.communication import PartTraffic as PartTraffic
from lightning_fed.callbacks.communication import Traffic as Traffic
from lightning_fed.callbacks.evaluation.client_evaluation import ClientEvaluation as ClientEvaluation
from lightning_fed.callbacks.evaluation.local_evaluation import LocalEvaluation as LocalEvaluation
from lightning_fed.callbacks.evaluation.site_matrix import SiteMatrix as SiteMatrix
from lightning_fed.callbacks.federation import Federation as Federation
from lightning_fed.callbacks.federation import find_federation as find_federation
from lightning_fed.callbacks.progress_bar import FederatedProgressBar as FederatedProgressBar
from lightning_fed.callbacks.progress_bar import FederatedRichProgressBar as FederatedRichProgressBar
from lightning_fed.callbacks.segmentation_grid import segmentation_grid as segmentation_grid
from lightning_fed.callbacks.segmentation_images import SegmentationImages as SegmentationImages
from lightning_fed.federated_callback import FederatedCallback as FederatedCallback

__all__ = [
    "AdaptiveAggregation",
    "AttentionMap",
    "CenterEvaluation",
    "ClassPrototypes",
    "ClientEvaluation",
    "ClientSegmentations",
    "CommunicationReport",
    "Confusion",
    "ContrastiveTerm",
    "ControlVariates",
    "DynamicRegularizer",
    "FeatureFusion",
    "FederatedCallback",
    "FederatedProgressBar",
    "FederatedRichProgressBar",
    "Federation",
    "GradientCorrection",
    "HeadThenBody",
    "LayerwiseTraining",
    "LocalEvaluation",
    "LossReport",
    "OwnClassConfusion",
    "PartTraffic",
    "PersonalModel",
    "PrototypePlots",
    "ProximalTerm",
    "SampledSoftmax",
    "SegmentationImages",
    "SiteMatrix",
    "SpreadOut",
    "StepLength",
    "Traffic",
    "find_federation",
    "segmentation_grid",
]
