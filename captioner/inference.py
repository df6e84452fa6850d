"""Photos to captions: the only road from a checkpoint to a `Caption`."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, overload

import numpy as np
import tensorflow as tf
from PIL import Image

from captioner import search
from captioner.caption import Caption
from captioner.config import CompleteSearch, SearchConfig
from captioner.decoder import DecoderState
from captioner.errors import InputError
from captioner.evidence import evidence_maps
from captioner.features import BATCH_PHOTOS, load_squares
from captioner.images import Geometry, load_square, to_upright_rgb
from captioner.model import Captioner, load_model
from captioner.text import END, NEVER_WRITTEN, PAD, START, join

__all__ = ["PHOTO", "Writer", "describe", "describe_files", "load", "model_file", "shipped_models"]

PHOTO = "photo"  # the shipped model that is taken if none is named
RUN_MODEL = "captioner.keras"
RUNNERS_UP = 4  # words that are named beside the one chosen
SEARCHES = 16  # kept compiled, of different options: some megabytes each


def shipped_models() -> dict[str, Path]:
    """The models that ship with the package, by name; the one that is taken by default first."""
    folder = Path(str(resources.files("captioner") / "checkpoints"))
    names = sorted((one.name for one in folder.iterdir()), key=lambda name: (name != PHOTO, name))
    return {name: folder / name / RUN_MODEL for name in names}


def load(path: str | Path | None = None) -> Captioner:
    """Loads a model to caption photos with.

    Args:
        path: a `.keras` file, a run folder, or the name of a model that ships with the package;
            `None` is `photo`.

    Raises:
        InputError: there is no model at `path`, or it cannot be read.
    """
    return load_model(model_file(path))


def model_file(path: str | Path | None = None) -> Path:
    """The file that `load` reads; `InputError` for a folder without one."""
    shipped = shipped_models()
    name = PHOTO if path is None else str(path)
    if name in shipped:  # a run of that name is found by its whole path
        return shipped[name]
    path = Path(name)
    if path.is_dir():
        if not (path / RUN_MODEL).is_file():
            raise InputError(f"{path}: no {RUN_MODEL} in this folder: is it a run of train.py?")
        return path / RUN_MODEL
    return path


class Writer:
    """Writes captions with one model: its compiled parts, for as many photos as there are.

    Args:
        model: float32, as `load` and `Captioner.in_float32` give it.
    """

    def __init__(self, model: Captioner) -> None:
        self.model = model
        self._encode = tf.function(
            model.encode,
            input_signature=[tf.TensorSpec((None, *model.encoder.input_shape[1:]), tf.uint8)],
            autograph=False,
        )
        self._encoded = 0
        self._searches: dict[CompleteSearch, Any] = {}

    def encode(self, squares: np.ndarray) -> Any:
        """Regions `(B, L, D)` of squares `(B, size, size, 3)`, uint8."""
        # Tracing takes as long as some photos: a command that is given one is done before.
        self._encoded += len(squares)
        if self._encoded == 1:
            return self.model.encode(tf.constant(squares))
        return self._encode(squares)

    def write(self, regions: Any, options: SearchConfig) -> list[list[search.Hypothesis]]:
        """Captions of regions `(B, L, D)`: for every photo its `n_best`, best first."""
        if options.seed < 0:
            raise InputError(f"seed is {options.seed}: it must be at least 0")
        self.model.decoder.reseed(options.seed)
        key = dataclasses.replace(options.completed(self.model.decoding), seed=0)
        if key not in self._searches:  # traced once for all numbers of photos
            if len(self._searches) == SEARCHES:
                del self._searches[next(iter(self._searches))]
            self._searches[key] = tf.function(
                functools.partial(self.find, key),
                input_signature=[
                    tf.TensorSpec((None, *self.model.encoder.output_shape[1:])),
                    tf.TensorSpec((), tf.int32),
                ],
                autograph=False,
            )
        found = self._searches[key](tf.cast(regions, tf.float32), tf.constant(options.seed))
        return search.hypotheses(found)

    def find(
        self, options: CompleteSearch, regions: Any, seed: Any, sums: tf.DType = tf.float64
    ) -> search.Found:
        """From regions `(B, L, D)` to what a search found; in a `tf.function` it is one graph.

        Args:
            options: how words are chosen; its seed does not count.
            regions: of the photos.
            seed: scalar, of what is drawn.
            sums: as for `search.beam`.
        """
        memory, state = self.model.begin(regions)
        decoder = self.model.decoder

        def step(tokens: Any, state: Any, photos: Any) -> search.StepOutput:
            shape = tf.shape(tokens)
            flat = DecoderState(*(tf.reshape(part, (-1, part.shape[-1])) for part in state))
            output = decoder.step(tokens, flat, memory._replace(**photos), options.look)
            beams = DecoderState(
                *(tf.reshape(part, (*tf.unstack(shape), part.shape[-1])) for part in output.state)
            )
            return search.StepOutput(
                tf.nn.log_softmax(output.logits), beams, output.attention, output.gate
            )

        initial = tf.nest.map_structure(lambda part: part[:, None], state)  # (B, 1, H)
        arguments: dict[str, Any] = {
            "memory": {"regions": memory.regions, "keys": memory.keys},
            "regions": memory.regions.shape[1] if self.model.has_attention else None,
            "start": START,
            "end": END,
            "banned": NEVER_WRITTEN,
            "max_words": options.max_words,
            "length_penalty": options.length_penalty,
            "no_repeat": options.no_repeat,
        }
        if options.sample:
            return search.sample(
                step,
                initial,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=1.0 if options.top_p is None else options.top_p,
                seed=seed,
                count=options.n_best,
                **arguments,
            )
        if options.beam == 1 and options.n_best == 1:
            return search.greedy(step, initial, sums=sums, **arguments)
        return search.beam(
            step, initial, beam=options.beam, n_best=options.n_best, sums=sums, **arguments
        )

    def extras(
        self, regions: Any, hypotheses: Sequence[search.Hypothesis], look: str
    ) -> list[dict[str, Any]]:
        """What a `Caption` carries on request: evidence, self-attention maps and runners-up.

        Args:
            regions: `(B, L, D)`.
            hypotheses: one caption per photo.
            look: what the words' contexts were made of.

        Returns:
            Per photo the arguments `evidence`, `self_attention` and `runners_up` of `Caption`.
        """
        rows = [[START, *one.tokens] for one in hypotheses]
        tokens = np.full((len(rows), max(map(len, rows))), PAD, np.int32)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = ids
        evidence = evidence_maps(self.model, regions, tokens)
        _, layers = self.model.relate(tf.cast(regions, tf.float32))
        between = np.stack(layers, axis=1) if layers else None  # (B, layers, heads, L, L)
        # Regions drawn anew would give other probabilities than those the words were chosen by.
        rivals = None if look == "sampled" else self._runners_up(regions, tokens, look)
        return [
            {
                "evidence": maps[: len(one.tokens)].reshape(-1, *self.model.grid),
                "self_attention": None if between is None else between[number],
                "runners_up": None if rivals is None else rivals[number][: len(one.tokens)],
            }
            for number, (maps, one) in enumerate(zip(evidence, hypotheses, strict=True))
        ]

    def _runners_up(
        self, regions: Any, tokens: np.ndarray, look: str
    ) -> list[tuple[tuple[tuple[str, float], ...], ...]]:
        """Reads captions `(B, T + 1)` again, a step after the other: `Caption.runners_up` of each,
        and of the pads."""
        memory, state = self.model.begin(tf.cast(regions, tf.float32))
        steps = []
        for place in range(tokens.shape[1] - 1):
            output = self.model.decoder.step(tokens[:, place, None], state, memory, look)
            state = output.state
            probabilities = tf.nn.softmax(output.logits)[:, 0].numpy()
            probabilities[:, NEVER_WRITTEN] = -1
            np.put_along_axis(probabilities, tokens[:, place + 1, None], -1, axis=1)
            steps.append([self._best_words(row) for row in probabilities])
        return list(zip(*steps, strict=True))

    def _best_words(self, probabilities: np.ndarray) -> tuple[tuple[str, float], ...]:
        """Words and their probabilities `(V,)`, best first, without those that are negative."""
        best = np.argsort(-probabilities, kind="stable")[:RUNNERS_UP]
        words = self.model.vocabulary.decode(best)
        return tuple(
            (word, float(probability))
            for word, probability in zip(words, probabilities[best], strict=True)
            if probability >= 0
        )

    def caption(
        self,
        hypothesis: search.Hypothesis,
        geometry: Geometry,
        photo: Path | Image.Image,
        **extras: Any,
    ) -> Caption:
        """A `Caption` of what the search found for a photo."""
        words = self.model.vocabulary.decode(hypothesis.tokens)
        attention = hypothesis.attention
        if attention is not None:
            attention = attention.reshape(len(words), *self.model.grid)
        return Caption(
            text=join(words),
            words=words,
            word_probabilities=np.exp(hypothesis.log_probabilities),
            score=hypothesis.score,
            attention=attention,
            gate=hypothesis.gate,
            geometry=geometry,
            photo=photo if isinstance(photo, Path) else None,
            image=photo if isinstance(photo, Image.Image) else None,
            **extras,
        )

    def captions(
        self,
        regions: Any,
        geometries: Sequence[Geometry],
        photos: Sequence[Path | Image.Image],
        options: SearchConfig,
        *,
        extras: Collection[int] = (),
    ) -> list[list[Caption]]:
        """Captions of regions `(B, L, D)`: for every photo its `n_best`, best first.

        Args:
            regions: of the photos.
            geometries: how each became the encoder's square.
            photos: the files or images that the captions are to name.
            options: how words are chosen.
            extras: numbers of the photos whose best caption carries evidence, self-attention maps
                and runners-up.
        """
        found = self.write(regions, options)
        more: list[dict[str, Any]] = [{} for _ in found]
        if extras:
            chosen, best = list(extras), [found[number][0] for number in extras]
            carried = self.extras(tf.gather(regions, chosen), best, options.look)
            for number, arguments in zip(chosen, carried, strict=True):
                more[number] = arguments
        return [
            [
                self.caption(one, geometry, photo, **(arguments if rank == 0 else {}))
                for rank, one in enumerate(hypotheses)
            ]
            for hypotheses, geometry, photo, arguments in zip(
                found, geometries, photos, more, strict=True
            )
        ]


def describe_files(
    writer: Writer,
    photos: Iterable[Path],
    options: SearchConfig,
    *,
    extras: Collection[Path] = (),
) -> Iterator[tuple[Path, list[Caption] | InputError]]:
    """Captions of many photos, in order, a batch at a time.

    Args:
        writer: a model's.
        photos: the files.
        options: how words are chosen.
        extras: the photos whose best caption is given evidence, self-attention maps and
            runners-up.

    Yields:
        `(path, captions)`, the captions best first; for a photo that cannot be read, the
        `InputError` that says why.
    """
    model = writer.model
    waiting: list[tuple[Path, Any, Geometry | None]] = []

    def flush() -> Iterator[tuple[Path, list[Caption] | InputError]]:
        readable = [(path, square, geometry) for path, square, geometry in waiting if geometry]
        described: list[list[Caption]] = []
        if readable:
            paths, squares, geometries = zip(*readable, strict=True)
            regions = writer.encode(np.stack(squares))
            more = [number for number, path in enumerate(paths) if path in extras]
            described = writer.captions(regions, geometries, paths, options, extras=more)
        remaining = iter(described)
        for path, square, geometry in waiting:
            yield path, square if geometry is None else next(remaining)
        waiting.clear()

    for item in load_squares(photos, model.image_size, model.resize):
        waiting.append(item)
        if len(waiting) == BATCH_PHOTOS:
            yield from flush()
    yield from flush()


Photo = str | Path | Image.Image


@overload
def describe(
    model: Captioner, photos: Photo, *, evidence: bool = False, **options: Any
) -> Caption: ...
@overload
def describe(
    model: Captioner, photos: Sequence[Photo], *, evidence: bool = False, **options: Any
) -> list[Caption]: ...
def describe(
    model: Captioner, photos: Photo | Sequence[Photo], *, evidence: bool = False, **options: Any
) -> Caption | list[Caption]:
    """Captions a photo, or each of several.

    Args:
        model: from `load`.
        photos: a file, a Pillow image, or a sequence of them.
        evidence: whether captions carry evidence, self-attention maps and runners-up too.
        **options: fields of `captioner.config.SearchConfig`: `beam=5`, `sample=True`, …

    Returns:
        The best `Caption`; a list, in order, for a sequence.

    Raises:
        InputError: a photo cannot be read, or an option is out of range.

    Example:
        >>> caption = captioner.describe(captioner.load(), "dog.jpg", beam=5)
    """
    if isinstance(photos, str | Path | Image.Image):
        return describe(model, [photos], evidence=evidence, **options)[0]
    search_options = SearchConfig(**options)
    writer = getattr(model, "writer", None)
    if writer is None:  # kept with the model: what it compiles serves the next call as well
        writer = model.writer = Writer(model)
    captions = []
    for first in range(0, len(photos), BATCH_PHOTOS):
        batch = [_seen(photo, model) for photo in photos[first : first + BATCH_PHOTOS]]
        kept, squares, geometries = zip(*batch, strict=True)
        regions = writer.encode(np.stack(squares))
        extras = range(len(batch)) if evidence else ()
        found = writer.captions(regions, geometries, kept, search_options, extras=extras)
        captions += [best for best, *_ in found]
    return captions


def _seen(photo: Photo, model: Captioner) -> tuple[Path | Image.Image, np.ndarray, Geometry]:
    """What a `Caption` keeps of a photo, the square that the encoder sees, and its geometry."""
    if not isinstance(photo, Image.Image):
        return Path(photo), *load_square(Path(photo), model.image_size, model.resize)
    image = to_upright_rgb(photo)
    geometry = Geometry.of(image, model.image_size, model.resize)
    return image, np.asarray(geometry.square(image)), geometry
