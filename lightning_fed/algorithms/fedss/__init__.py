"""FedSS: clients train the last layer's rows for only some classes (sampled softmax).

"Efficient image representation learning with federated sampled softmax", submission to ICLR 2022.
"""

from lightning_fed.algorithms.fedss.callback import SampledSoftmax as SampledSoftmax
from lightning_fed.algorithms.fedss.head import SampledSoftmaxHead as SampledSoftmaxHead
from lightning_fed.algorithms.fedss.head import find_sampled_softmax_head as find_sampled_softmax_head
from lightning_fed.algorithms.fedss.head_conversion import to_sampled_softmax as to_sampled_softmax
from lightning_fed.algorithms.fedss.losses import gradient_noise as gradient_noise
from lightning_fed.algorithms.fedss.losses import log_correction as log_correction
from lightning_fed.algorithms.fedss.losses import sample_negatives as sample_negatives
from lightning_fed.algorithms.fedss.losses import sampled_logits as sampled_logits
from lightning_fed.algorithms.fedss.losses import sampled_softmax_loss as sampled_softmax_loss
from lightning_fed.algorithms.fedss.losses import with_margin as with_margin
from lightning_fed.algorithms.fedss.sampled_classes import SampledClasses as SampledClasses

__all__ = [
    "SampledClasses",
    "SampledSoftmax",
    "SampledSoftmaxHead",
    "find_sampled_softmax_head",
    "gradient_noise",
    "log_correction",
    "sample_negatives",
    "sampled_logits",
    "sampled_softmax_loss",
    "to_sampled_softmax",
    "with_margin",
]
