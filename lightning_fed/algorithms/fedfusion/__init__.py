"""FedFusion: fuses a client's features with the received global model's features.

Yao, Huang, Wu, Zhang and Sun, "Towards Faster and Better Federated Learning: A Feature Fusion Approach", ICIP 2019.
"""

from lightning_fed.algorithms.fedfusion.callback import FeatureFusion as FeatureFusion
from lightning_fed.algorithms.fedfusion.equations import fuse_conv as fuse_conv
from lightning_fed.algorithms.fedfusion.equations import fuse_multi as fuse_multi
from lightning_fed.algorithms.fedfusion.equations import fuse_single as fuse_single
from lightning_fed.algorithms.fedfusion.equations import smooth_weight as smooth_weight
from lightning_fed.algorithms.fedfusion.extractors import Extractor as Extractor
from lightning_fed.algorithms.fedfusion.extractors import find_extractor as find_extractor
from lightning_fed.algorithms.fedfusion.frozen_extractor import FrozenExtractor as FrozenExtractor
from lightning_fed.algorithms.fedfusion.layers import FusedExtractor as FusedExtractor
from lightning_fed.algorithms.fedfusion.layers import FusionLayer as FusionLayer
from lightning_fed.algorithms.fedfusion.model_surgery import find_fusion as find_fusion
from lightning_fed.algorithms.fedfusion.model_surgery import fuse as fuse
from lightning_fed.algorithms.fedfusion.model_surgery import plain_state as plain_state
from lightning_fed.algorithms.fedfusion.model_surgery import unwrap as unwrap
from lightning_fed.algorithms.fedfusion.operators import ConvFusion as ConvFusion
from lightning_fed.algorithms.fedfusion.operators import FusionOperator as FusionOperator
from lightning_fed.algorithms.fedfusion.operators import MultiFusion as MultiFusion
from lightning_fed.algorithms.fedfusion.operators import NoFusion as NoFusion
from lightning_fed.algorithms.fedfusion.operators import SingleFusion as SingleFusion
from lightning_fed.algorithms.fedfusion.operators import build_operator as build_operator

__all__ = [
    "ConvFusion",
    "Extractor",
    "FeatureFusion",
    "FrozenExtractor",
    "FusedExtractor",
    "FusionLayer",
    "FusionOperator",
    "MultiFusion",
    "NoFusion",
    "SingleFusion",
    "build_operator",
    "find_extractor",
    "find_fusion",
    "fuse",
    "fuse_conv",
    "fuse_multi",
    "fuse_single",
    "plain_state",
    "smooth_weight",
    "unwrap",
]
