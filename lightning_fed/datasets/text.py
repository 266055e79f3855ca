"""Reads or generates the text of each speaking role in a play, and cuts the text into samples."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_fed.datasets.arrays import ArrayDataset

LEAF_VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The LEAF benchmark's 80 characters, in LEAF's order."""

_WORDS = (
    "the and to of a my in you is that not with me it for be his your this but he have as thou so him will what thy all"
    " her no by do shall if are we thee on lord our king good now sir from come at they she or let enter love hath more"
    " man here would was well there am how them know may death heart night sweet noble sword crown friend speak honour"
)
_MARKS = ",.;!?"


def encode_text(text: str, vocabulary: str) -> Tensor:
    """Converts characters to positions in the vocabulary. Unknown characters become spaces."""
    numbers = {character: number for number, character in enumerate(vocabulary)}
    codes = [numbers.get(character, numbers.get(" ", -1)) for character in text]
    if -1 in codes:
        raise ValueError(
            "Expected `vocabulary` to contain all characters, or a space to replace others, but got neither."
        )
    return torch.tensor(codes, dtype=torch.int64)


def decode_text(codes: Tensor, vocabulary: str) -> str:
    """Converts positions in the vocabulary, shape ``(length,)``, to text."""
    return "".join(vocabulary[code] for code in codes.tolist())


def text_windows(codes: Tensor, length: int, first: int, end: int, stride: int, every_step: bool) -> ArrayDataset:
    """Cuts a text into N windows, each with the next character as target.

    A window starts at every ``stride``-th position from ``first`` to ``end``, exclusive. Inputs have shape
    ``(N, length)``, and targets ``(N,)``. With ``every_step``, each character of a window has a target, shape
    ``(N, length)``.
    """
    text = codes[first : end + length]
    inputs, following = (characters.unfold(0, length, stride) for characters in (text[:-1], text[1:]))
    return ArrayDataset(inputs, following if every_step else following[:, -1])


def read_roles(path: Path) -> dict[str, str]:
    """Reads the text of every speaking role from a file.

    :class:`~lightning_fed.datasets.Shakespeare` describes the two file formats.
    """
    speeches: dict[str, list[str]] = {}
    if path.name.endswith(".json.gz"):
        content = json.loads(gzip.decompress(path.read_bytes()))
        if not isinstance(content, dict) or not {"roles", "speeches"} <= content.keys():
            raise ValueError(
                f"Expected {path} to contain the entries 'roles' and 'speeches', but at least one is missing."
            )
        for role, speech in content["speeches"]:
            speeches.setdefault(content["roles"][role], []).append(speech)
    else:
        for block in path.read_text().split("\n\n"):
            role, colon, speech = block.strip("\n").partition(":\n")
            if colon:
                speeches.setdefault(role, []).append(speech)
        if not speeches:
            raise ValueError(f"Expected {path} to hold blocks that begin with the line `ROLE:`, but it has none.")
    return {role: "\n".join(texts) for role, texts in speeches.items()}


def make_roles(count: int, seed: int) -> dict[str, str]:
    """Generates random text for ``count`` speaking roles, with 1,500 to 4,500 characters each.

    All roles share transition probabilities between words, and every role prefers some words.
    """
    words = _WORDS.split()
    transitions = np.random.default_rng([seed, 0]).dirichlet(np.full(len(words), 0.02), len(words)).cumsum(1)
    roles = {}
    for number in range(1, count + 1):
        generator = np.random.default_rng([seed, number])
        preferred = generator.dirichlet(np.full(len(words), 0.1)).cumsum()
        size = int(generator.integers(1500, 4500))
        word, text = 0, ""
        while len(text) < size:
            line = []
            for chance, is_preferred in zip(generator.random(6), generator.random(6) < 0.25, strict=True):
                row = preferred if is_preferred else transitions[word]
                word = min(int(np.searchsorted(row, chance)), len(words) - 1)
                line.append(words[word])
            text += f"{' '.join(line).capitalize()}{_MARKS[generator.integers(len(_MARKS))]}\n"
        roles[f"generated/ROLE {number}"] = text
    return roles
