"""Control for FedFusion: the operator's layer without the global model's features."""

from __future__ import annotations

from torch import nn

from lightning_fed.tasks import ClassificationTask


class OneMoreConvolution(ClassificationTask):
    """The network with an additional 1x1 convolution after the features, initialised as the identity.

    Network depth and initial function equal FedFusion's "conv" operator without the second extractor. The score
    difference between "conv" and this network is therefore due to the fusion.
    """

    def configure_network(self, name: str) -> nn.Module:
        network = super().configure_network(name)
        features = network.get_submodule("features")
        channels = [layer.out_channels for layer in features.modules() if isinstance(layer, nn.Conv2d)][-1]
        layer = nn.utils.skip_init(nn.Conv2d, channels, channels, 1)  # draws no random numbers
        nn.init.dirac_(layer.weight)
        nn.init.zeros_(layer.bias)
        features.append(layer)
        return network
