"""FedFusion in plain torch, written from the paper (Yao et al., ICIP 2019): operators by element, and a fit.

This file does not import the package: tests compare the package's results with these references.
"""

import copy

import torch
from torch import nn

from tests.references import (
    average_reference,
    cohort_reference,
    seed_reference,
    visit_batches_reference,
    visit_seed_reference,
)
from tests.references_baselines import copied


def fuse_reference(kind, local, reference, weight=None, bias=None, axis=1):
    """Equations 1 to 3 channel by channel, for features with examples first and channels on `axis`."""
    local, reference = local.movedim(axis, 0), reference.movedim(axis, 0)
    fused = []
    for channel in range(len(local)):
        if kind == "none":
            fused.append(local[channel])
        elif kind == "conv":
            both = [*reference, *local]  # the global features first
            total = sum(weight[channel, column] * both[column] for column in range(len(both)))
            fused.append(total if bias is None else total + bias[channel])
        else:
            share = weight if kind == "single" else weight[channel]
            fused.append(share * reference[channel] + (1 - share) * local[channel])
    return torch.stack(fused).movedim(0, axis)


class FusedReference(nn.Module):
    """E_l, C, the parameters of F, and E_g outside the state: a network in two parts with fusion in between."""

    def __init__(self, kind, features, classifier, parameters, axis=1):
        super().__init__()
        self.kind, self.axis = kind, axis
        self.features, self.classifier = features, classifier
        self.operator = nn.ParameterDict({name: nn.Parameter(value.clone()) for name, value in parameters.items()})
        self.frozen = []  # a list hides the submodule

    def refer(self, state=None):
        """Sets E_g to a copy of this network's extractor, or to an extractor with these values."""
        extractor = copy.deepcopy(self.features)
        if state is not None:
            extractor.load_state_dict(state)
        self.frozen = [extractor.eval().requires_grad_(False)]

    def forward(self, inputs):
        local = self.features(inputs)
        with torch.no_grad():
            reference = self.frozen[0](inputs) if self.frozen else local.detach()
        parameters = dict(self.operator.items())
        return self.classifier(
            fuse_reference(self.kind, local, reference, parameters.get("weight"), parameters.get("bias"), self.axis)
        )


def fedfusion_reference(
    net, clients, loss, optimizer, rounds, cohort_size, seed, batch_size=32, epochs=1, ema=0.9, probe=None
):
    """Algorithm 1.

    Returns for every round the global state, the clients' E_g after their visits, and two outputs for `probe`: with E_g
    from the previous round, and with the current extractor.
    """
    history = []
    for round in range(rounds):
        start, states, sizes, frozen = copied(net), [], [], []
        before = copied(net.features)
        for client in cohort_reference(seed, round, clients, cohort_size):
            visit_seed = visit_seed_reference(seed, round, client)
            net.load_state_dict(start)
            net.refer()
            net.train()
            net.frozen[0].eval()
            seed_reference(visit_seed)
            stepper = optimizer(net.parameters())
            for batch in visit_batches_reference(clients[client], batch_size, visit_seed, epochs):
                stepper.zero_grad()
                loss(net, batch).backward()
                stepper.step()
            frozen.append(copied(net.frozen[0]))
            states.append(copied(net))
            sizes.append(len(clients[client][0]))
        new = average_reference(states, sizes)
        if net.kind in ("multi", "single"):
            name = "operator.weight"
            new[name] = (1 - ema) * new[name] + ema * start[name]
        net.load_state_dict(new)
        net.eval()
        outputs = []
        for state in (before, None):
            net.refer(state)
            with torch.no_grad():
                outputs.append(None if probe is None else net(probe))
        history.append((copied(net), frozen, *outputs))
    return history
