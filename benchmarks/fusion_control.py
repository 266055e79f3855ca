"""The control of FedFusion: the operator's layer without the global model's features."""

from __future__ import annotations

from torch import nn

from lightning_fed.tasks import ClassificationTask


class OneMoreConvolution(ClassificationTask):
    """The network with a 1x1 convolution behind its features, which starts as the identity.

    It starts as FedFusion's "conv" from the client's own features does and has as deep a network, but no second
    extractor: what "conv" gains over it is due to the fusion.
    """

    def configure_network(self, name: str) -> nn.Module:
        """Returns the network of that name with one layer more."""
        network = super().configure_network(name)
        features = network.get_submodule("features")
        channels = [layer.out_channels for layer in features.modules() if isinstance(layer, nn.Conv2d)][-1]
        layer = nn.utils.skip_init(nn.Conv2d, channels, channels, 1)  # draws nothing: the rest starts as without it
        nn.init.dirac_(layer.weight)
        nn.init.zeros_(layer.bias)
        features.append(layer)
        return network
