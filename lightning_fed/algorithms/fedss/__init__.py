"""FedSS: a sampled softmax over the classes that a client holds."""

from lightning_fed.algorithms.fedss.callback import SampledSoftmax as SampledSoftmax
from lightning_fed.algorithms.fedss.head import SampledSoftmaxHead as SampledSoftmaxHead
from lightning_fed.algorithms.fedss.head import find_sampled_softmax_head as find_sampled_softmax_head
from lightning_fed.algorithms.fedss.head_conversion import to_sampled_softmax as to_sampled_softmax
from lightning_fed.algorithms.fedss.held_classes import HeldClasses as HeldClasses
from lightning_fed.algorithms.fedss.losses import gradient_noise as gradient_noise
from lightning_fed.algorithms.fedss.losses import log_correction as log_correction
from lightning_fed.algorithms.fedss.losses import sample_negatives as sample_negatives
from lightning_fed.algorithms.fedss.losses import sampled_logits as sampled_logits
from lightning_fed.algorithms.fedss.losses import sampled_softmax_loss as sampled_softmax_loss

__all__ = [
    "HeldClasses",
    "SampledSoftmax",
    "SampledSoftmaxHead",
    "find_sampled_softmax_head",
    "gradient_noise",
    "log_correction",
    "sample_negatives",
    "sampled_logits",
    "sampled_softmax_loss",
    "to_sampled_softmax",
]
