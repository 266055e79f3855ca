"""Asynchronous federated training in plain PyTorch: each client trains at the start of a visit, as in the papers.

This file does not import the package: tests compare the package's results with these references.
"""

import copy
import heapq

import torch


def fedbuff_reference(x, arrivals, weigh):
    """Nguyen et al. 2022, Algorithm 1, lines 11 to 13, with server rate 1."""
    total = {name: torch.zeros_like(value) for name, value in x.items()}
    for staleness, start, trained in arrivals:
        for name, value in total.items():
            value += weigh(staleness) * (trained[name] - start[name])
    return {name: value + total[name] / len(arrivals) for name, value in x.items()}


def fedasync_reference(x, arrivals, weigh):
    """Xie et al. 2019, Algorithm 1, server process, with alpha = 0.6."""
    for staleness, _, trained in arrivals:
        a = 0.6 * weigh(staleness)
        x = {name: (1 - a) * value + a * trained[name] for name, value in x.items()}
    return x


def polynomial(staleness):
    return 1 / (staleness + 1) ** 0.5


def hinge(staleness, a=2.0, b=1.0):
    return 1.0 if staleness <= b else 1 / (a * (staleness - b) + 1)


def train(module, loss, data, epochs, lr):
    """Full-batch gradient descent on a copy of a module."""
    module = copy.deepcopy(module)
    for _ in range(epochs):
        module.zero_grad()
        loss(module(data[0]), data[1]).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= lr * parameter.grad
    return state(module)


def state(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def asynchronous_reference(module, loss, clients, seconds, rounds, buffer, aggregate, epochs=3, lr=0.1):
    """All clients are in flight; a client with an update in the buffer waits for the next model.

    Args:
        module: The initial model.
        loss: Loss for (output, target).
        clients: Inputs and targets by client.
        seconds: Duration of a visit by client.
        rounds: Number of flushes.
        buffer: Number of arrivals per flush.
        aggregate: Function of (model, arrivals): staleness, start model and trained model per arrival.
        epochs: Gradient steps per visit.
        lr: Learning rate.

    Returns:
        The models, and per flush the time and the arrivals (client, start version).
    """
    queue, idle, now, count, log = [], list(clients), 0.0, 0, []
    models = [state(module)]
    for version in range(rounds):
        module.load_state_dict(models[-1])
        for client in idle:
            trained = train(module, loss, clients[client], epochs, lr)
            heapq.heappush(queue, (now + seconds[client], count, client, version, models[-1], trained))
            count += 1
        arrived = []
        for _ in range(buffer):
            now, _, client, start_version, start, trained = heapq.heappop(queue)
            arrived.append((client, start_version, (version - start_version, start, trained)))
        idle = [client for client in clients if client in {client for client, *_ in arrived}]
        models.append(aggregate(models[-1], [arrival for *_, arrival in arrived]))
        log.append((now, [(client, start_version) for client, start_version, _ in arrived]))
    return models, log
