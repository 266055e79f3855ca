"""Complex parameters and activation checkpointing do not change the result of any method.

The reference is the same network with pairs of real numbers and without checkpointing. Results agree to rounding.
"""

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.algorithms import FedAvgM, FedDyn
from lightning_fed.algorithms.robust import AdaptiveClipping, Bucketing, NearestNeighborMixing
from lightning_fed.attacks import ALIE, GaussianNoise, SignFlip
from lightning_fed.compression import Downlink, Float16, Quantized, TopK
from lightning_fed.privacy import SecureSum
from lightning_fed.steps import MaxMedianNorm, MaxNorm, UniformWeights

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Spectrum(nn.Module):
    """Multiplies by complex weights, stored as one complex parameter or as pairs of real numbers."""

    def __init__(self, is_complex):
        super().__init__()
        pairs = 0.3 * torch.randn(6, 8, 2, dtype=torch.float64)
        self.weight = nn.Parameter(torch.view_as_complex(pairs) if is_complex else pairs)

    def forward(self, inputs):
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return (inputs.to(weight.dtype) @ weight).abs()


class Net(L.LightningModule):
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(3)
        spectrum = Spectrum(form in ("complex", "both"))
        layers = [spectrum, nn.Linear(8, 8)]
        if form == "wrapped":
            layers = [checkpoint_wrapper(layer) for layer in layers]
        elif form == "both":
            layers[1] = checkpoint_wrapper(layers[1])
        self.net = nn.Sequential(*layers, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def clients(count):
    generator = torch.Generator().manual_seed(0)
    made = {}
    for client, size in list(zip("abcdef", (12, 8, 10, 8, 8, 6), strict=True))[:count]:
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        made[client] = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=4)
    return made


METHODS = ["ditto", "fedala", "fedavg", "feddane", "scaffold"]
SLOW = ["fairavg", "fedadagrad", "fedatt", "fedbn", "fedyogi", "fesem", "fixbn:after=1"]
SLOW += ["trimmedmean", "multikrum", "normclipping", "centeredclipping", "bulyan", "krum", "neighbours", "noisy"]
SLOW += ["16 bits", "median bound", "collusion", "bucketing", "clipped"]
SLOW += ["fedadam", "fedprox:mu=1.0", "fednova:mu=0.5", "median", "momentum of the server", "downlink"]
SLOW += ["attacked", "bounded", "personal", "personal by name", "frozen", "kept optimizers"]
SLOW += ["fedrep:head_epochs=1", "moon", "silobn", "fedper", "geometricmedian", "qffl"]
CASES = {method: {"method": method} for method in [*METHODS, *SLOW]} | {
    "feddyn": {"method": FedDyn(0.5)},
    "momentum of the server": {"method": FedAvgM(momentum=0.9)},
    "bucketing": {"method": "median", "steps": [Bucketing(2)]},
    "neighbours": {"method": "median", "steps": [NearestNeighborMixing(1)]},
    "adaptive clipping": {"method": "median", "steps": [AdaptiveClipping(1)]},
    "8 bits": {"steps": [Quantized(8)]},
    "16 bits": {"steps": [Float16()]},
    "downlink": {"steps": [Downlink(TopK(0.5))]},
    "top": {"steps": [TopK(0.3)]},
    "bounded": {"steps": [MaxNorm(0.01)]},
    "median bound": {"steps": [MaxMedianNorm(0.5)]},
    "attacked": {"steps": [SignFlip(1)]},
    "noisy": {"steps": [GaussianNoise(1, 0.1)]},
    "collusion": {"steps": [ALIE(2)]},
    "secure sum": {"steps": [UniformWeights(), SecureSum(1.0)], "batch_norm": "frozen"},
    "frozen": {"frozen": [Spectrum]},
    "personal": {"personal": [Spectrum]},
    "personal by name": {"personal": ["net.0.*"]},
    "kept optimizers": {"optimizer_state": "keep"},
    "clipped": {"gradient_clip_val": 0.01},
}


def fit(trainer, form, case):
    module = Net(form)
    trainer(max_rounds=2, seed=0, **CASES[case]).fit(module, clients(6 if case in SLOW else 3))
    tensors = [*module.parameters(), *module.buffers()]
    return [torch.view_as_real(value) if value.is_complex() else value for value in tensors]


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_the_form_of_a_layer_changes_no_method(case, federated_trainer):
    reference = fit(federated_trainer, "plain", case)
    for form in ("complex", "wrapped") if case in SLOW else ("both",):
        torch.testing.assert_close(fit(federated_trainer, form, case), reference, rtol=1e-6, atol=1e-8)
