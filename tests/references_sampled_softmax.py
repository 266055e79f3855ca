"""FedSS's losses, corrections and logits in plain loops, written from the spec.

This file does not import the package. A client's classes are lists of class numbers; an example's logits are numbers by
class.
"""

import math

# ---------------------------------------------------------------------------------------------------------------------
# Section 2: the client's loss
# ---------------------------------------------------------------------------------------------------------------------


def corrected_reference(o, positives, negatives, n):
    """(3), for the negatives: o' by class."""
    corrected = dict(o)
    if not negatives:
        return corrected
    shift = -math.log(len(negatives) / (n - len(positives)))
    for j in negatives:
        corrected[j] = o[j] + shift
    return corrected


def pushing_reference(positives, negatives, t, n, objective):
    """The classes in the sums of exponentials in (2), (6), (7) and (8)."""
    return {
        "fedss": [j for j in [*positives, *negatives] if j != t],
        "negonly": list(negatives),
        "posonly": [j for j in positives if j != t],
        "full": [j for j in range(n) if j != t],
    }[objective]


def loss_reference(o, positives, negatives, t, n, objective="fedss"):
    """(2), (6), (7), (8): ln(1 + sum exp(o'_j - o'_t)) for one example."""
    drawn = [] if objective in ("posonly", "full") else negatives  # without negatives, o' = o
    corrected = corrected_reference(o, positives, drawn, n)
    terms = [math.exp(corrected[j] - corrected[t]) for j in pushing_reference(positives, negatives, t, n, objective)]
    return math.log1p(math.fsum(terms))


def gradient_reference(o, positives, negatives, t, n, objective="fedss"):
    """Derivatives of the loss with respect to the logits, by class."""
    drawn = [] if objective in ("posonly", "full") else negatives
    corrected = corrected_reference(o, positives, drawn, n)
    pushing = pushing_reference(positives, negatives, t, n, objective)
    shares = {j: math.exp(corrected[j] - corrected[t]) for j in pushing}
    total = 1 + math.fsum(shares.values())
    gradient = dict.fromkeys(o, 0.0)
    for j in pushing:
        gradient[j] = shares[j] / total
    gradient[t] = 1 / total - 1
    return gradient


# ---------------------------------------------------------------------------------------------------------------------
# Section 1: logits and negatives
# ---------------------------------------------------------------------------------------------------------------------


def logits_reference(feature, weight, scale=None, bias=None):
    """Section 1.1 for one example: a list over the rows of the weight; ``scale=None`` for linear logits."""

    def length(vector):
        return max(math.sqrt(math.fsum(x * x for x in vector)), 1e-12)

    logits = []
    for j, row in enumerate(weight):
        dot = math.fsum(x * y for x, y in zip(feature, row, strict=True))
        value = dot if scale is None else scale * dot / (length(feature) * length(row))
        logits.append(value + (0.0 if bias is None else bias[j]))
    return logits


def negatives_reference(positives, n, m, generator):
    """Section 1.2: draws positions in the list of all other classes."""
    excluded = set(positives)
    others = [c for c in range(n) if c not in excluded]
    places = generator.choice(len(others), min(m, len(others)), replace=False, shuffle=False)
    return sorted(others[place] for place in places)


# ---------------------------------------------------------------------------------------------------------------------
# Margins: Deng et al. 2019 (ArcFace, continued as in the authors' program), Wang et al. 2018 (CosFace)
# ---------------------------------------------------------------------------------------------------------------------


def margin_reference(cosines, t, margin, margin_of):
    """The cosines of an example by class, with a margin for the true class t."""
    changed = dict(cosines)
    if margin_of == "cosine":
        changed[t] = cosines[t] - margin
    elif math.acos(cosines[t]) <= math.pi - margin:
        changed[t] = math.cos(math.acos(cosines[t]) + margin)
    else:
        changed[t] = cosines[t] - margin * math.sin(margin)
    return changed
