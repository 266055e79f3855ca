"""Independent implementations of the papers and specs, in plain numpy and torch.

This file does not import the package: tests compare the package's results with these references.
"""

import hashlib
import itertools
import random

import numpy as np
import torch

# ---------------------------------------------------------------------------------------------------------------------
# Partitions: specs/baselines.md, section 3 (McMahan 2017; Hsu, Qi and Brown 2019; NIID-Bench's published program)
# ---------------------------------------------------------------------------------------------------------------------


def dirichlet_per_class_reference(labels, num_clients, alpha, rng, balance, min_size):
    """NIID-Bench's "noniid-labeldir": lists of indices per client; the published program uses `balance=True`."""
    clients = [[] for _ in range(num_clients)]
    smallest = -1
    while smallest < min_size:
        clients = [[] for _ in range(num_clients)]
        for label in sorted(set(labels)):
            members = [index for index, other in enumerate(labels) if other == label]
            rng.shuffle(members)
            shares = rng.dirichlet([alpha] * num_clients)
            if balance:
                room = [len(client) < len(labels) / num_clients for client in clients]
                shares = np.array([share if free else 0.0 for share, free in zip(shares, room, strict=True)])
                shares = shares / shares.sum()
            start, running = 0, 0.0
            for client in range(num_clients):
                running += shares[client]
                stop = len(members) if client == num_clients - 1 else int(running * len(members))
                clients[client].extend(members[start:stop])
                start = stop
        smallest = min(len(client) for client in clients)
    return clients


def dirichlet_per_client_reference(labels, num_clients, alpha, rng, prior):
    """Hsu, Qi and Brown 2019: sample by sample; a class is excluded once all samples are taken."""
    unused = {label: [i for i, other in enumerate(labels) if other == label] for label in sorted(set(labels))}
    classes = list(unused)
    clients = []
    for _ in range(num_clients):
        q = dict(zip(classes, rng.dirichlet([alpha * prior[label] for label in classes]), strict=True))
        client = []
        for _ in range(len(labels) // num_clients):
            available = [label for label in classes if unused[label]]
            mass = sum(q[label] for label in available)
            if mass == 0:  # not specified in the paper: CHOSEN, a new q over the remaining classes
                q.update(zip(available, rng.dirichlet([alpha * prior[label] for label in available]), strict=True))
                mass = 1.0
            label = available[rng.choice(len(available), p=[q[label] / mass for label in available])]
            client.append(unused[label].pop(int(rng.integers(len(unused[label])))))
        clients.append(client)
    return clients


def shards_reference(labels, num_shards):
    """McMahan et al. 2017: the shards before assignment."""
    by_label = sorted(range(len(labels)), key=lambda index: (labels[index], index))
    size = len(labels) // num_shards
    return [frozenset(by_label[shard * size : (shard + 1) * size]) for shard in range(num_shards)]


def label_owners_reference(num_clients, num_classes, num_labels, rng):
    """NIID-Bench's "noniid-#label": each client's set of labels."""
    owners = []
    for client in range(num_clients):
        current = {client % num_classes}
        while len(current) < num_labels:
            current.add(int(rng.integers(num_classes)))
        owners.append(current)
    return owners


def two_digit_users_reference(class_sizes, num_users, rng):
    """FedProx's MNIST users: two consecutive labels each, 5 samples of both and a power-law share of the rest.

    Sample counts, [user][label]. The program rounds every share down and drops the remainder.
    """
    num_classes = len(class_sizes)
    counts = [[0] * num_classes for _ in range(num_users)]
    shares = rng.lognormal(0, 2.0, (num_classes, num_users // num_classes, 2))
    for label in range(num_classes):
        shares[label] *= (class_sizes[label] - 2 * 5 * num_users // num_classes) / shares[label].sum()
    for user in range(num_users):
        for position in range(2):
            label = (user + position) % num_classes
            counts[user][label] += 5 + int(shares[label, user // num_classes, position])
    return counts


def quantity_skew_reference(num_samples, num_clients, beta, rng, min_size):
    """NIID-Bench's "iid-diff-quantity": client sizes."""
    while True:
        shares = rng.dirichlet([beta] * num_clients)
        stops = [0, *(int(stop) for stop in np.cumsum(shares)[:-1] * num_samples), num_samples]
        sizes = [stop - start for start, stop in itertools.pairwise(stops)]
        if min(sizes) >= min_size:
            return sizes


def dominant_class_reference(mask, ignore_index, background):
    """Most frequent value without two excluded values, pixel by pixel; the smaller value wins ties."""
    counts = {}
    for row in mask:
        for value in row:
            if value not in (ignore_index, background):
                counts[int(value)] = counts.get(int(value), 0) + 1
    return min(counts, key=lambda value: (-counts[value], value)) if counts else background


def permuted_pixels_reference(image, permutation):
    """Pixel i in the new image is pixel permutation[i] in the old image, for every channel of (C, H, W)."""
    channels, height, width = image.shape
    permuted = np.empty_like(image)
    for channel in range(channels):
        for place in range(height * width):
            source = int(permutation[place])
            permuted[channel, place // width, place % width] = image[channel, source // width, source % width]
    return permuted


def synthetic_client_reference(alpha, beta, rng, num_features, num_classes):
    """The FedProx authors' Synthetic(alpha, beta), one client: inputs and labels, sample by sample."""
    num_samples = int(rng.lognormal(4, 2)) + 50
    u, big_b = rng.normal(0, alpha), rng.normal(0, beta)
    v = [rng.normal(big_b, 1) for _ in range(num_features)]
    weight = [[rng.normal(u, 1) for _ in range(num_classes)] for _ in range(num_features)]
    bias = [rng.normal(u, 1) for _ in range(num_classes)]
    covariance = np.diag([(j + 1) ** -1.2 for j in range(num_features)])
    inputs = rng.multivariate_normal(v, covariance, num_samples)
    labels = []
    for x in inputs:
        logits = (np.dot(x, weight) + bias).tolist()
        labels.append(logits.index(max(logits)))
    return inputs, labels


# ---------------------------------------------------------------------------------------------------------------------
# Federated averaging: McMahan et al. 2017, Algorithm 1, with an independent schedule as in DESIGN section 3
# ---------------------------------------------------------------------------------------------------------------------


def client_key_reference(client):
    """The first 8 bytes, big endian, of the SHA-256 hash for "s:name" or "i:number"."""
    text = ("s:" if isinstance(client, str) else "i:") + str(client)
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)


def visit_seed_reference(seed, round, client):
    return int(np.random.SeedSequence([seed, round, 3, client_key_reference(client)]).generate_state(1)[0])


def recalibration_seed_reference(visit_seed):
    """Seed for the pass that measures BatchNorm statistics."""
    return int(np.random.SeedSequence([visit_seed, 1]).generate_state(1)[0])


def cohort_reference(seed, round, clients, size):
    clients = list(clients)
    if size == len(clients):
        return clients
    places = np.random.default_rng(np.random.SeedSequence([seed, round, 0])).choice(len(clients), size, replace=False)
    return [clients[place] for place in sorted(places.tolist())]


def epoch_reference(num_samples, batch_size, visit_seed, epoch):
    """One epoch's batches as lists of positions: a new permutation; a single last example joins the previous batch."""
    order = np.random.default_rng([visit_seed, epoch]).permutation(num_samples).tolist()
    batches = []
    while order:
        batches.append(order[:batch_size])
        order = order[batch_size:]
    if len(batches) > 1 and len(batches[-1]) == 1 < batch_size:
        single = batches.pop()
        batches[-1] = batches[-1] + single
    return batches


def visit_batches_reference(tensors, batch_size, visit_seed, epochs=1, steps=None):
    """A visit's batches, each a list of tensors; ``steps`` batches, or ``epochs`` epochs."""
    batches, epoch = [], 0
    while epoch < epochs if steps is None else len(batches) < steps:
        for places in epoch_reference(len(tensors[0]), batch_size, visit_seed, epoch):
            batches.append([tensor[places] for tensor in tensors])
        epoch += 1
    return batches if steps is None else batches[:steps]


def seed_reference(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - as a visit does
    torch.manual_seed(seed)


def average_reference(states, sizes, equal=False):
    """Weighted mean in float64; for integers the largest client's value, or the largest value among equal clients."""
    weights = [1.0 if equal else float(size) for size in sizes]
    mean = {}
    for name, value in states[0].items():
        if value.is_floating_point():
            total = torch.zeros_like(value, dtype=torch.float64)
            for weight, state in zip(weights, states, strict=True):
                total += weight * state[name].double()
            mean[name] = (total / sum(weights)).to(value.dtype)
        else:
            largest = [state[name] for size, state in zip(sizes, states, strict=True) if size == max(sizes)]
            mean[name] = torch.stack(largest).amax(0)
    return mean


def fedavg_reference(
    net, clients, loss, optimizer, rounds, cohort_size, seed, batch_size, epochs=1, steps=None, clip=None, equal=False
):
    """Federated averaging with one plain PyTorch loop per client; changes the network, returns the global states.

    Args:
        net: A ``torch.nn.Module``.
        clients: Tensors by client, with examples on the first dimension.
        loss: Function of (net, batch).
        optimizer: Function of parameters, called for every visit.
        rounds: Rounds.
        cohort_size: Clients per round.
        seed: Schedule seed.
        batch_size: Examples per batch.
        epochs: Local epochs.
        steps: Local batches instead of epochs.
        clip: Largest gradient norm.
        equal: Whether clients have equal weights.
    """
    history = []
    for round in range(rounds):
        start = {name: value.clone() for name, value in net.state_dict().items()}
        states, sizes = [], []
        for client in cohort_reference(seed, round, clients, cohort_size):
            visit_seed = visit_seed_reference(seed, round, client)
            batches = visit_batches_reference(clients[client], batch_size, visit_seed, epochs, steps)
            net.load_state_dict(start)
            net.train()
            seed_reference(visit_seed)
            stepper = optimizer(net.parameters())
            for batch in batches:
                stepper.zero_grad()
                loss(net, batch).backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                stepper.step()
            states.append({name: value.clone() for name, value in net.state_dict().items()})
            sizes.append(len(clients[client][0]))
        net.load_state_dict(average_reference(states, sizes, equal))
        history.append({name: value.clone() for name, value in net.state_dict().items()})
    return history


def batch_norm_reference(net, layers, batches):
    """Mean and unbiased variance of BatchNorm inputs over all clients' batches, in float64.

    Args:
        net: The network; BatchNorm normalises by batch, all other layers are in evaluation mode.
        layers: Layers by name.
        batches: Network inputs, batch by batch.
    """
    seen = {name: [] for name in layers}
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: seen[name].append(inputs[0].double()))
        for name, layer in layers.items()
    ]
    net.eval()
    for layer in layers.values():
        layer.train()
    with torch.no_grad():
        for batch in batches:
            net(batch)
    for handle in handles:
        handle.remove()
    statistics = {}
    for name, values in seen.items():
        flat = torch.cat([value.movedim(1, -1).reshape(-1, value.shape[1]) for value in values])
        statistics[name] = flat.mean(0), flat.var(0)
    return statistics
