"""SiloBN and FixBN in plain torch loops, written from their papers, and sums over BatchNorm inputs.

This file does not import the package: tests compare the package's results with these references.
"""

import torch
from torch import nn

from tests.references import average_reference, cohort_reference, visit_batches_reference, visit_seed_reference
from tests.references_baselines import copied, visit_reference

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def is_statistic(name):
    return name.rpartition(".")[2] in STATISTICS


def norms_of(net):
    return [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)]


def silobn_reference(net, clients, loss, optimizer, rounds, cohort_size, seed, batch_size=32, epochs=1):
    """Andreux et al. 2020: averages all entries except running statistics, which stay with the clients.

    Returns the shared entries by round, and the statistics of the trained clients.
    """
    initial = copied(net)
    shared = {name: value for name, value in initial.items() if not is_statistic(name)}
    own, history = {}, []
    for round in range(rounds):
        states, sizes = [], []
        for client in cohort_reference(seed, round, clients, cohort_size):
            statistics = own.get(client, {name: value for name, value in initial.items() if is_statistic(name)})
            visit_seed = visit_seed_reference(seed, round, client)
            batches = visit_batches_reference(clients[client], batch_size, visit_seed, epochs)
            state = visit_reference(net, {**shared, **statistics}, batches, loss, optimizer, visit_seed)
            own[client] = {name: value for name, value in state.items() if is_statistic(name)}
            states.append({name: value for name, value in state.items() if not is_statistic(name)})
            sizes.append(len(clients[client][0]))
        shared = average_reference(states, sizes)
        history.append(shared)
    return history, own


def fixbn_reference(net, clients, loss, optimizer, rounds, after, cohort_size, seed, batch_size=32, epochs=1):
    """Zhong et al. 2023: averaging; from round ``after`` on the global statistics also normalise in training.

    Returns the global states.
    """

    class Fixed(nn.Module):
        """The network with BatchNorm in evaluation mode."""

        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, inputs):
            return net(inputs)

        def state_dict(self):
            return net.state_dict()

        def load_state_dict(self, state):
            return net.load_state_dict(state)

        def train(self, mode=True):
            net.train(mode)
            for layer in norms_of(net):
                layer.eval()
            return self

    history = []
    for round in range(rounds):
        trained = Fixed() if round >= after else net
        start, states, sizes = copied(net), [], []
        for client in cohort_reference(seed, round, clients, cohort_size):
            visit_seed = visit_seed_reference(seed, round, client)
            batches = visit_batches_reference(clients[client], batch_size, visit_seed, epochs)
            states.append(visit_reference(trained, start, batches, loss, optimizer, visit_seed))
            sizes.append(len(clients[client][0]))
        net.load_state_dict(average_reference(states, sizes))
        history.append(copied(net))
    return history


def normalised_by_batch(net, inputs):
    """Outputs with every BatchNorm layer normalised by batch, without dropout."""
    net.eval()
    for layer in norms_of(net):
        layer.train()
        layer.momentum = 0.0
    with torch.no_grad():
        outputs = net(inputs)
    for layer in norms_of(net):
        layer.eval()
    return outputs


def between_share_reference(inputs_by_client):
    """Share of variation between clients in means and in variances, from all inputs; the larger mean over channels.

    The second share excludes the noise in variances from few values, with a kurtosis of 65.
    """
    flat = [values.double().movedim(1, -1).reshape(-1, values.shape[1]) for values in inputs_by_client]
    everything = torch.cat(flat)
    means = torch.cat([values.mean(0).expand_as(values) for values in flat])
    between = (means - everything.mean(0)).square().sum(0)
    total = (everything - everything.mean(0)).square().sum(0)
    spreads = torch.cat([values.var(0, correction=0).expand_as(values) for values in flat])
    of_means = (between / total)[total > 0].mean()
    noise = sum(64 * (1 - len(part) / len(everything)) * part.var(0, correction=0).square() for part in flat)
    of_variances = 1 - (spreads.mean(0).square() * len(everything) + noise) / spreads.square().sum(0)
    return float(max(of_means, of_variances[total > 0].mean()))
