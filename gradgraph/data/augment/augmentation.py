"""The table of augmentations, and their application to images, arrays and batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal, ParamSpec, cast

import numpy as np

from gradgraph.arguments import NUMBER, NUMBERS, Kind, Makers, checked, described
from gradgraph.errors import ArgumentError, DataError
from gradgraph.rivals import entries
from gradgraph.rivals.objects import library_of

P = ParamSpec("P")
Array = np.ndarray[Any, Any]
Generator = np.random.Generator
Own = Callable[[Array, Generator], Array]  # a user's function
Stage = Literal["stored", "sized", "array", "batch", "sound"]
Size = tuple[int, int]  # height and width

PROBABILITY = Kind("a number from 0 to 1", lambda value: NUMBER.fits(value) and 0 <= value <= 1)
ABOVE_ZERO = Kind("a number above zero", lambda value: NUMBER.fits(value) and 0 < value < float("inf"))
RANGE = Kind("two numbers above zero, the smaller one first",
             lambda value: NUMBERS.fits(value) and len(value) == 2 and 0 < value[0] <= value[1])  # fmt: skip
INTERPOLATIONS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}  # Pillow's constants
INTERPOLATION = Kind(f"one of {', '.join(INTERPOLATIONS)}",
                     lambda value: isinstance(value, str) and value in INTERPOLATIONS)  # fmt: skip


@dataclass(frozen=True)
class Augmentation:
    """A random change of images, or of sounds.

    Attributes:
        stage: the input. ``"stored"``: the image as stored, which it resizes to the size (height, width) of the model;
            ``"sized"``: the image at that size; ``"array"``: its array [height, width, channels] after normalisation,
            in place; ``"batch"``: images and class probabilities of a batch; ``"sound"``: [samples], with the rate.
        function: called with the input and a random generator; for a stored image, also with the size.
        call: the call that created the augmentation, as text.
    """

    stage: Stage
    function: Callable[..., Any]
    call: str = ""

    def __repr__(self) -> str:
        return f"gradgraph.augment.{self.call}"


AUGMENTATIONS: Makers[Augmentation] = Makers(
    "augmentation", Augmentation, "gradgraph.augment", "mixup(alpha=0.2)", entries.AUGMENTATIONS
)


def augmentation(**kinds: Kind) -> Callable[[Callable[P, Augmentation]], Callable[P, Augmentation]]:
    """Return a decorator that registers a function in ``AUGMENTATIONS`` and checks its arguments by ``kinds``."""

    def register(function: Callable[P, Augmentation]) -> Callable[P, Augmentation]:
        signature, name = inspect.signature(function), function.__name__

        @wraps(function)
        def make(*args: P.args, **kwargs: P.kwargs) -> Augmentation:
            given = ", ".join(f"{key}={value!r}" for key, value in signature.bind(*args, **kwargs).arguments.items())
            return replace(function(*args, **kwargs), call=f"{name}({given})")

        made = checked(**kinds)(make)
        AUGMENTATIONS.add(name, made)
        return made

    return register


class Augmentations:
    """A sequence of augmentations.

    An image is resized to the model's size by ``random_resized_crop``, or else before the first augmentation that
    requires that size. Erasing follows normalisation, and mixing is last, regardless of their position in the list. If
    several augmentations mix batches, one of them is drawn per batch.

    Args:
        given: augmentations, their names or calls, and user functions from bytes [height, width, channels] and a
            generator to bytes of equal shape; or one of these.

    Raises:
        BuildError: a name is unknown.
        ArgumentError: an element has an invalid type.
    """

    def __init__(self, given: Any) -> None:
        self.steps: list[Augmentation | Own] = []
        self.on_arrays: list[Augmentation] = []
        self.mixing: list[Augmentation] = []
        for made in _made(given):
            if isinstance(made, Augmentation) and made.stage == "sound":
                raise ArgumentError(f"{made!r} changes sounds, but these are images; omit it")
            if isinstance(made, Augmentation) and made.stage in ("array", "batch"):
                (self.on_arrays if made.stage == "array" else self.mixing).append(made)
            else:
                self.steps.append(made)
        if sum(isinstance(step, Augmentation) and step.stage == "stored" for step in self.steps) > 1:
            raise ArgumentError("an image is cropped and resized only once; keep one random_resized_crop")

    def of_image(self, image: Any, rng: Generator, size: Size | None, resize: Callable[[Any], Any]) -> Any:
        """Return the augmented image at ``size`` (height, width); ``size`` is None if the model accepts any size.

        ``resize`` resizes an image to that size; used unless an augmentation resizes it.
        """
        mode, is_sized = image.mode, False
        for step in self.steps:
            if not isinstance(step, Augmentation):
                image = _by_own(step, image, rng)
            elif step.stage == "stored":
                if is_sized:
                    raise ArgumentError(
                        f"{step!r} resizes images, but an augmentation before it has resized them; list it first"
                    )
                image, is_sized = step.function(image, rng, size), True
            else:
                image, is_sized = step.function(image if is_sized else resize(image), rng), True
            image = image if image.mode == mode else image.convert(mode)
        return image if is_sized else resize(image)

    def of_array(self, array: Array, rng: Generator) -> None:
        """Augment an image array [height, width, channels] in place."""
        for step in self.on_arrays:
            step.function(array, rng)

    def of_batch(self, images: Array, shares: Array, axes: Size, rng: Generator) -> tuple[Array, Array]:
        """Return the images and class probabilities [samples, classes] of a batch, mixed by an augmentation."""
        if not self.mixing:
            return images, shares
        chosen = self.mixing[int(rng.integers(len(self.mixing)))]
        mixed: tuple[Array, Array] = chosen.function(images, shares, axes, rng)
        return mixed


class SoundAugmentations:
    """A sequence of augmentations of sounds.

    Args:
        given: augmentations, their names or calls, and user functions from float32 [samples] and a generator to
            samples of equal shape; or one of these.

    Raises:
        BuildError: a name is unknown.
        ArgumentError: an element has an invalid type, or changes images.
    """

    def __init__(self, given: Any) -> None:
        self.steps = _made(given)
        for step in self.steps:
            if isinstance(step, Augmentation) and step.stage != "sound":
                raise ArgumentError(f"{step!r} changes images, but these are sounds; omit it")

    def __call__(self, samples: Array, rng: Generator, rate: int) -> Array:
        """Return the changed samples at their rate; raise DataError for an invalid result."""
        for step in self.steps:
            changed = step.function(samples, rng, rate) if isinstance(step, Augmentation) else step(samples, rng)
            changed = np.asarray(changed)
            if changed.shape != samples.shape or changed.dtype.kind != "f":
                raise DataError(
                    f"augment returned {changed.dtype} of shape {list(changed.shape)}; return floating-point samples "
                    f"of shape {list(samples.shape)}"
                )
            samples = changed.astype(np.float32)
        return samples


def _made(given: Any) -> list[Augmentation | Own]:
    every: Any = [given] if isinstance(given, str | Augmentation) or callable(given) else given
    return [_made_of(one) for one in every]


def _made_of(given: Any) -> Augmentation | Own:
    if isinstance(given, str | Augmentation):
        return AUGMENTATIONS.given(given)
    if isinstance(given, Iterable):
        raise ArgumentError(f"{described(given)} is not an augmentation; pass a flat list of augmentations")
    if not callable(given) or given in AUGMENTATIONS.values() or library_of(given):
        return AUGMENTATIONS.given(given)  # raises an error that suggests the right name
    own: Any = given
    return cast("Own", own)


def _by_own(function: Own, image: Any, rng: Generator) -> Any:
    """Apply a user function to an image, as bytes (uint8) of shape [height, width, channels]."""
    from PIL import Image

    array = np.asarray(image)
    channels = len(image.getbands())
    made = np.asarray(function(array[:, :, None] if array.ndim == 2 else array, rng))
    if made.dtype != np.uint8 or made.ndim != 3 or made.shape[2] != channels or not made.size:
        raise DataError(
            f"augment returned {made.dtype} of shape {list(made.shape)}; return bytes (uint8) of shape [height, width, "
            f"{channels}]"
        )
    return Image.fromarray(np.ascontiguousarray(made[:, :, 0] if channels == 1 else made))
