"""A described photo: what inference returns, and what overlays, sidecars and metrics read."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from captioner.images import Geometry, load_photo

__all__ = ["Caption"]


@dataclass(frozen=True, eq=False)
class Caption:
    """One photo with its caption and, for every word, where the model looked.

    `T` is the number of words, `gh x gw` the encoder's grid of regions.

    Attributes:
        text: the caption as a sentence, as it would be printed.
        words: its `T` words, in order; special tokens never appear.
        word_probabilities: `(T,)`, the probability the model gave each word, 0..1.
        score: the search's score of the whole caption (higher is better): see `captioner.search`.
        attention: `(T, gh, gw)`, alpha of every word, each map summing to 1; `None` for a model
            without attention.
        gate: `(T,)`, beta of every word, 0..1: how much of the photo entered the decoder
            (Xu et al. 2015, section 4.2.1); `None` for a model without attention.
        evidence: `(T, gh, gw)`, the regions that spoke for each word once it was chosen, each map
            summing to 1 (see `captioner.evidence`); `None` unless it was asked for.
        self_attention: `(layers, heads, L, L)`, where every region looked among the regions before
            decoding; `None` unless it was asked for and the model has such layers.
        runners_up: for every word the most probable others at its place, best first, each with the
            probability that the model gave it, `<end>` among them; `None` unless it was asked for,
            or where regions were drawn (`look` sampled).
        geometry: how the photo became the square that the encoder saw.
        photo: the photo's file, or `None` when it was given as an image.
        image: the photo itself when it was given as an image, upright RGB; `None` otherwise.
    """

    text: str
    words: tuple[str, ...]
    word_probabilities: np.ndarray
    score: float
    attention: np.ndarray | None
    gate: np.ndarray | None
    geometry: Geometry
    photo: Path | None = None
    image: Image.Image | None = None
    evidence: np.ndarray | None = None
    self_attention: np.ndarray | None = None
    runners_up: tuple[tuple[tuple[str, float], ...], ...] | None = None

    def pixels(self) -> Image.Image:
        """The photo in its own aspect ratio, upright RGB.

        Raises:
            InputError: the photo's file is gone or no longer readable.
        """
        if self.image is not None:
            return self.image
        if self.photo is None:
            raise ValueError("this Caption has neither a photo file nor an image")
        return load_photo(self.photo)
