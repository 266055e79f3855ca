"""Renders scenes with simple shapes. Lengths are fractions of the image's side."""

from __future__ import annotations

import numpy as np

SHAPES = ("disc", "square", "triangle", "ring", "cross")
_RING_HOLE, _CROSS_ARM = 0.5, 0.36  # inner radius and half the width of an arm; the outer radius and half length are 1
# Area of each shape at scale 1, so that areas are drawn independently of the class.
_UNIT_AREAS = (
    np.pi,
    4.0,
    0.75 * 3**0.5,
    np.pi * (1 - _RING_HOLE**2),
    4 * _CROSS_ARM * (2 - _CROSS_ARM),
)
_USUAL_TEXTURE = 0.9  # probability that a shape has the texture of its class


def render_scene(rng: np.random.Generator, image_size: int, dominant: float) -> tuple[np.ndarray, np.ndarray]:
    """Draws a scene for `ShapesDataset`. Returns an image (3, H, W) and a mask (H, W), both uint8.

    In the mask, 0 is background and `SHAPES` start at 1. With probability ``dominant``, a further shape has the first
    shape's class, otherwise a random class.
    """
    # One scene at a time: the arrays fit the cache, and a scene cannot depend on other scenes in a batch.
    axis = (np.arange(image_size) + 0.5) / image_size
    x, y = axis[None, :], axis[:, None]
    ground = rng.uniform(0.25, 0.75) + rng.uniform(-0.1, 0.1, 3)  # dull colours, close to grey
    image = _texture(rng, int(rng.integers(len(SHAPES))), ground, 0.06, *_rotated(x, y, rng.uniform(-0.35, 0.35)))
    mask = np.zeros((image_size, image_size), dtype=np.uint8)

    for _ in range(rng.integers(2, 7)):  # clutter: strokes, or specks with length 0
        center, angle, half_width = rng.random(2), rng.uniform(0, np.pi), rng.uniform(0.006, 0.022)
        half_length = rng.choice([0.0, rng.uniform(0.08, 0.3)])
        along, across = _rotated(x - center[0], y - center[1], angle)
        distance = np.hypot(np.maximum(np.abs(along) - half_length, 0), across) - half_width
        _paint(image, _colour(rng, ground)[:, None, None], distance)

    main = int(rng.integers(len(SHAPES)))
    objects = [(main, rng.uniform(0.1, 0.22), rng.uniform(0.3, 0.7, 2))]
    for _ in range(rng.integers(1, 4)):
        shape = main if rng.random() < dominant else int(rng.integers(len(SHAPES)))
        objects.append((shape, rng.uniform(0.04, 0.08), rng.uniform(0.1, 0.9, 2)))
    for number in rng.permutation(len(objects)):  # from back to front
        shape, area, center = objects[number]
        angle, stretch, scale = rng.uniform(-0.35, 0.35), rng.uniform(0.9, 1.11), (area / _UNIT_AREAS[shape]) ** 0.5
        along, across = _rotated(x - center[0], y - center[1], angle)
        distance = scale * _outline(shape, along / (scale * stretch), across * (stretch / scale))
        kind = shape if rng.random() < _USUAL_TEXTURE else int(rng.integers(len(SHAPES)))
        _paint(image, _texture(rng, kind, _colour(rng, ground), 0.4, along, across), distance)
        mask[distance <= 0] = shape + 1

    angle, slope, gain = rng.uniform(0, 2 * np.pi), rng.uniform(0, 0.6), rng.uniform(0.75, 1.15)
    image *= gain * (1 + slope * _rotated(x - 0.5, y - 0.5, angle)[0])
    image += rng.uniform(0.01, 0.04) * rng.standard_normal(image.shape, dtype=np.float32)
    return (image * 255 + 0.5).clip(0, 255).astype(np.uint8), mask


def _rotated(x: np.ndarray, y: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    cosine, sine = np.cos(angle), np.sin(angle)
    return cosine * x + sine * y, cosine * y - sine * x


def _colour(rng: np.random.Generator, ground: np.ndarray) -> np.ndarray:
    colour = rng.permutation([rng.uniform(0.7, 1), rng.random(), rng.uniform(0, 0.3)])
    if np.abs(colour - ground).mean() < 0.2:
        colour = 1 - colour
    return colour


def _texture(
    rng: np.random.Generator, kind: int, colour: np.ndarray, contrast: float, x: np.ndarray, y: np.ndarray
) -> np.ndarray:
    phases, frequency = rng.uniform(0, 2 * np.pi, 2), 2 * np.pi * rng.uniform(7, 10)
    rows = np.sin(frequency * y + phases[0])
    columns = np.sin(frequency * x + phases[1])
    slanted = np.sin(frequency / 2**0.5 * (x + y) + phases[0])
    pattern = (0 * rows, rows, columns, np.sign(rows * columns), slanted)[kind]
    tint = rng.choice([-1, 1]) * rng.uniform(0.5 * contrast, contrast, 3)
    field: np.ndarray = colour[:, None, None] + tint[:, None, None] * pattern
    return field


def _paint(image: np.ndarray, colour: np.ndarray, distance: np.ndarray) -> None:
    cover = (0.5 - distance * image.shape[-1]).clip(0, 1)
    image += cover * (colour - image)


def _outline(shape: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    distance: np.ndarray
    if shape == 0:
        distance = np.hypot(x, y) - 1
    elif shape == 1:
        distance = np.maximum(np.abs(x), np.abs(y)) - 1
    elif shape == 2:
        distance = np.maximum(-y, 0.5 * y + 0.75**0.5 * np.abs(x)) - 0.5
    elif shape == 3:
        distance = np.abs(np.hypot(x, y) - 0.5 * (1 + _RING_HOLE)) - 0.5 * (1 - _RING_HOLE)
    else:
        longer, shorter = np.maximum(np.abs(x), np.abs(y)), np.minimum(np.abs(x), np.abs(y))
        distance = np.maximum(longer - 1, shorter - _CROSS_ARM)
    return distance
