"""Lightning callbacks: the federation itself, and what looks at it."""

from lightning_fed.callbacks.attention_map import AttentionMap as AttentionMap
from lightning_fed.callbacks.center_evaluation import CenterEvaluation as CenterEvaluation
from lightning_fed.callbacks.communication import CommunicationReport as CommunicationReport
from lightning_fed.callbacks.communication import PartTraffic as PartTraffic
from lightning_fed.callbacks.communication import Traffic as Traffic
from lightning_fed.callbacks.feature_fusion import FeatureFusion as FeatureFusion
from lightning_fed.callbacks.federated_callback import FederatedCallback as FederatedCallback
from lightning_fed.callbacks.federation import Federation as Federation
from lightning_fed.callbacks.federation import find_federation as find_federation
from lightning_fed.callbacks.gradient_correction import GradientCorrection as GradientCorrection
from lightning_fed.callbacks.head_then_body import HeadThenBody as HeadThenBody
from lightning_fed.callbacks.images import SegmentationImages as SegmentationImages
from lightning_fed.callbacks.layerwise import LayerwiseTraining as LayerwiseTraining
from lightning_fed.callbacks.local_evaluation import LocalEvaluation as LocalEvaluation
from lightning_fed.callbacks.own_class_confusion import Confusion as Confusion
from lightning_fed.callbacks.own_class_confusion import OwnClassConfusion as OwnClassConfusion
from lightning_fed.callbacks.presets import FedAwS as FedAwS
from lightning_fed.callbacks.presets import FedBN as FedBN
from lightning_fed.callbacks.presets import FedFusion as FedFusion
from lightning_fed.callbacks.presets import FedPer as FedPer
from lightning_fed.callbacks.presets import FedRep as FedRep
from lightning_fed.callbacks.presets import FedSS as FedSS
from lightning_fed.callbacks.progress import FederatedProgressBar as FederatedProgressBar
from lightning_fed.callbacks.prototype_plots import PrototypePlots as PrototypePlots
from lightning_fed.callbacks.prototypes import ClassPrototypes as ClassPrototypes
from lightning_fed.callbacks.proximal import ProximalTerm as ProximalTerm
from lightning_fed.callbacks.sampled_softmax import SampledSoftmax as SampledSoftmax
from lightning_fed.callbacks.segmentation_grid import segmentation_grid as segmentation_grid
from lightning_fed.callbacks.spreadout import SpreadOut as SpreadOut

__all__ = [
    "AttentionMap",
    "CenterEvaluation",
    "ClassPrototypes",
    "CommunicationReport",
    "Confusion",
    "FeatureFusion",
    "FedAwS",
    "FedBN",
    "FedFusion",
    "FedPer",
    "FedRep",
    "FedSS",
    "FederatedCallback",
    "FederatedProgressBar",
    "Federation",
    "GradientCorrection",
    "HeadThenBody",
    "LayerwiseTraining",
    "LocalEvaluation",
    "OwnClassConfusion",
    "PartTraffic",
    "PrototypePlots",
    "ProximalTerm",
    "SampledSoftmax",
    "SegmentationImages",
    "SpreadOut",
    "Traffic",
    "find_federation",
    "segmentation_grid",
]
