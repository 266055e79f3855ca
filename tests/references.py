"""Independent implementations written from the papers and the specs, in plain numpy and torch.

Nothing here imports the package: these are what its results are compared with.
"""

import itertools

import numpy as np

# ---------------------------------------------------------------------------------------------------------------------
# Partitions: specs/baselines.md, section 3 (McMahan 2017; Hsu, Qi and Brown 2019; NIID-Bench's published program)
# ---------------------------------------------------------------------------------------------------------------------


def dirichlet_per_class_reference(labels, num_clients, alpha, rng, balance, min_size):
    """NIID-Bench's "noniid-labeldir": lists of indices per client; its program has `balance=True`."""
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
    """Hsu, Qi and Brown 2019: sample by sample, without a class once its last sample is taken."""
    unused = {label: [i for i, other in enumerate(labels) if other == label] for label in sorted(set(labels))}
    classes = list(unused)
    clients = []
    for _ in range(num_clients):
        q = dict(zip(classes, rng.dirichlet([alpha * prior[label] for label in classes]), strict=True))
        client = []
        for _ in range(len(labels) // num_clients):
            available = [label for label in classes if unused[label]]
            mass = sum(q[label] for label in available)
            if mass == 0:  # the paper is silent: CHOSEN, a new q over what is left
                q.update(zip(available, rng.dirichlet([alpha * prior[label] for label in available]), strict=True))
                mass = 1.0
            label = available[rng.choice(len(available), p=[q[label] / mass for label in available])]
            client.append(unused[label].pop(int(rng.integers(len(unused[label])))))
        clients.append(client)
    return clients


def shards_reference(labels, num_shards):
    """McMahan et al. 2017: the shards, before they are handed out."""
    by_label = sorted(range(len(labels)), key=lambda index: (labels[index], index))
    size = len(labels) // num_shards
    return [frozenset(by_label[shard * size : (shard + 1) * size]) for shard in range(num_shards)]


def label_owners_reference(num_clients, num_classes, num_labels, rng):
    """NIID-Bench's "noniid-#label": the set of labels of every client."""
    owners = []
    for client in range(num_clients):
        current = {client % num_classes}
        while len(current) < num_labels:
            current.add(int(rng.integers(num_classes)))
        owners.append(current)
    return owners


def quantity_skew_reference(num_samples, num_clients, beta, rng, min_size):
    """NIID-Bench's "iid-diff-quantity": sizes of the clients."""
    while True:
        shares = rng.dirichlet([beta] * num_clients)
        stops = [0, *(int(stop) for stop in np.cumsum(shares)[:-1] * num_samples), num_samples]
        sizes = [stop - start for start, stop in itertools.pairwise(stops)]
        if min(sizes) >= min_size:
            return sizes


def dominant_class_reference(mask, ignore_index, background):
    """Most frequent value but for two, pixel by pixel; the smaller of two equals."""
    counts = {}
    for row in mask:
        for value in row:
            if value not in (ignore_index, background):
                counts[int(value)] = counts.get(int(value), 0) + 1
    return min(counts, key=lambda value: (-counts[value], value)) if counts else background


def permuted_pixels_reference(image, permutation):
    """Pixel i of the new image is pixel permutation[i] of the old one, for every channel of (C, H, W)."""
    channels, height, width = image.shape
    permuted = np.empty_like(image)
    for channel in range(channels):
        for place in range(height * width):
            source = int(permutation[place])
            permuted[channel, place // width, place % width] = image[channel, source // width, source % width]
    return permuted
