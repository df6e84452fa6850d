"""How fast this machine trains and captions, and what share of what it can do that is.

All figures of a run are from one machine at one time, so that their ratios can be compared where
seconds cannot. A figure is the median of some repeats; `spread` gives the least and the greatest.

What a training step must compute is counted (`step_flops`, pads not included) and divided by the
machine's measured matrix product: the share of the ceiling that is reached. Captions are as long as
Flickr8k's (`captions`) and go through the batches of training, so that captions/s say how long an
epoch takes.

Shapes: `B` photos, `C` captions per photo, `T` words, `L` regions, `D` region channels, `H` units,
`A` attention units, `E` embedding units, `V` vocabulary.
"""

import itertools
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from captioner import __version__, inference, scenes
from captioner.batches import Batches
from captioner.config import SearchConfig
from captioner.datasets import Example
from captioner.encoders import build_encoder, image_size_of
from captioner.features import BATCH_PHOTOS, Features, extract, load_squares
from captioner.files import write_text
from captioner.inference import Writer, describe_files
from captioner.memory import keep_freed_memory
from captioner.model import Captioner
from captioner.precision import best_precision, product_seconds
from captioner.rates import build_optimizer
from captioner.text import Vocabulary

__all__ = ["Sizes", "bench", "captions", "step_flops"]

log = logging.getLogger(__name__)

# The log of a Flickr8k caption's words, its end included: mean, spread between photos, and spread
# between the captions of a photo.
LENGTH_MEAN, LENGTH_BETWEEN, LENGTH_WITHIN = 2.417, 0.115, 0.299
MAX_WORDS = 24  # the default of training
COVERED = 0.95  # of an epoch's batches: of the rest there are few, each a compilation more
KINDS: Mapping[str, tuple[str, str]] = {
    "soft_additive": ("soft", "additive"),
    "soft_scaled_dot": ("soft", "scaled-dot"),
    "hard_additive": ("hard", "additive"),
    "soft_dot": ("soft", "dot"),
    "soft_general": ("soft", "general"),
    "soft_cosine": ("soft", "cosine"),
    "none": ("none", "additive"),
}
WHOLE_EPOCHS = 3  # of the first kinds; of the others the commonest batch tells enough
SIDE, DEPTH = 7, 1280  # of the regions of EfficientNet-Lite0 at 224 px
GREEDY, BEAM_3, BEAM_5 = (SearchConfig(beam=beam) for beam in (1, 3, 5))


@dataclass(frozen=True)
class Sizes:
    """How much is done.

    Attributes:
        repeats: of everything but what starts a process.
        processes: repeats of what starts one.
        matrix: rows of the square matrices that are multiplied.
        photos: captioned in bulk, and read from disk.
        single: photos described one by one.
        train: photos of an epoch of training, 5 captions each.
        batch: photos of a training step.
        units: H = A = E.
        vocabulary: V.
        kinds: names in `KINDS`.
        scenes: photos that the memory of training is measured on, and four times as many.
    """

    repeats: int = 3
    processes: int = 3
    matrix: int = 2048
    photos: int = 256
    single: int = 40
    train: int = 6000
    batch: int = 32
    units: int = 512
    vocabulary: int = 2542
    kinds: Sequence[str] = tuple(KINDS)
    scenes: int = 500

    @classmethod
    def quick(cls) -> "Sizes":
        """Just enough to see that everything runs; its figures mean nothing."""
        return cls(
            repeats=1,
            processes=1,
            matrix=128,
            photos=6,
            single=2,
            train=2,
            batch=2,
            units=16,
            vocabulary=50,
            kinds=("soft_additive", "soft_scaled_dot", "hard_additive", "none"),
            scenes=20,
        )


class _Figures:
    """Figures by name: the median, and the spread of the repeats."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.spread: dict[str, tuple[float, float]] = {}

    def add(self, name: str, values: Sequence[float]) -> float:
        self.values[name] = value = statistics.median(values)
        self.spread[name] = (min(values), max(values))
        log.info(f"{name}: {value:,.4g}")
        return value

    def rate(self, name: str, number: float, seconds: Sequence[float]) -> float:
        return self.add(name, [number / one for one in seconds])


def bench(out: Path | None = None, *, quick: bool = False) -> dict[str, Any]:
    """Measures, prints a table, and writes the figures to `out`.

    Returns:
        What is written: every figure by its name, `spread` by the same names, and what was measured
        on.
    """
    sizes = Sizes.quick() if quick else Sizes()
    figures = _Figures()
    with tempfile.TemporaryDirectory() as folder:
        _machine(figures, sizes)
        photos = _photos(Path(folder) / "photos", sizes)
        _encoder(figures, sizes, photos)
        _training(figures, sizes)
        _captioning(figures, sizes, photos)
        _processes(figures, sizes, photos, Path(folder))
    report = {
        **figures.values,
        "spread": figures.spread,
        "precision": best_precision(),
        "processors": os.cpu_count(),
        "quick": quick,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "captioner": __version__,
    }
    print(table(report))
    if out:
        write_text(out, json.dumps(report, indent=2) + "\n")
        print(f"figures → {out}")
    return report


def table(report: Mapping[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{'':<44}{'median':>12}   least .. greatest"]
    for name, (least, greatest) in report["spread"].items():
        lines.append(f"{name:<44}{report[name]:>12,.4g}   {least:,.4g} .. {greatest:,.4g}")
    lines.append(
        f"{report['processors']} processors, {report['precision']}, "
        f"TensorFlow {report['tensorflow']}, Keras {report['keras']}"
        + ("; --quick: these figures mean nothing" if report["quick"] else "")
    )
    return "\n".join(lines)


# --- The machine ---------------------------------------------------------------------------------


def _machine(figures: _Figures, sizes: Sizes) -> None:
    """The ceiling: one large matrix product."""
    for dtype in (tf.float32, tf.bfloat16):
        seconds = product_seconds(dtype, sizes.matrix, sizes.repeats)
        figures.rate(f"machine.{dtype.name}_gflops", 2 * sizes.matrix**3 / 1e9, seconds)


# --- Encoder -------------------------------------------------------------------------------------


def _photos(folder: Path, sizes: Sizes) -> list[Path]:
    """JPEG files of a photo's size."""
    folder.mkdir()
    paths = []
    for number in range(sizes.photos):
        paths.append(folder / f"photo_{number:04d}.jpg")
        scenes.draw(1, number, 480).image.resize((500, 375)).save(paths[-1], quality=90)
    return paths


def _encoder(figures: _Figures, sizes: Sizes, photos: Sequence[Path]) -> None:
    encoder = build_encoder("efficientnet-lite0")
    encode = tf.function(lambda x: encoder(x, training=False), autograph=False)
    size = image_size_of(encoder)
    squares: list[Any] = [square for _, square, _ in load_squares(photos, size, "stretch")]
    repeated = np.arange(BATCH_PHOTOS) % len(squares)
    batch = tf.constant(np.stack(squares)[repeated])
    seconds = _timed(lambda: encode(batch).numpy(), sizes.repeats)
    figures.rate("encode.photos_per_s", BATCH_PHOTOS, seconds)

    def to_disk() -> None:
        with tempfile.TemporaryDirectory() as folder:
            extract(encoder, "efficientnet-lite0", "stretch", photos, Path(folder))

    figures.rate("extract.photos_per_s", len(photos), _timed(to_disk, sizes.repeats))


# --- Training ------------------------------------------------------------------------------------


def step_flops(
    photos: int, words: int, regions: int, depth: int, units: int, vocabulary: int,
    attention: str = "soft", score: str = "additive",
) -> float:  # fmt: skip
    """Floating-point operations of the matrix products of a training step, H = A = E = `units`.

    Two per multiplication, three times: forward, and back to inputs and to weights. The frozen
    encoder's regions need no gradient, hence two times for what is multiplied with them alone.

    Args:
        photos: `B`.
        words: all words of all captions, ends included.
        regions, depth, vocabulary: `L`, `D`, `V`.
        units: `H`.
        attention, score: as for `Captioner`.
    """
    context = depth * 4 * units
    lstm = (units + units) * 4 * units  # of the word and the hidden state
    head = (units + depth) * units + units * vocabulary
    look, photo = 0, 2 * depth * units  # the initial state
    if attention == "none":
        photo += context  # the same for every word
    else:
        lstm += context
        photo += regions * depth * units  # keys
        query = 0 if score == "general" else units * units
        look = query + regions * units + units + regions * depth  # scores, gate, weighted sum
    return 2.0 * (3 * words * (lstm + head + look) + 2 * photos * photo)


def captions(photos: int, vocabulary: int) -> list[Example]:
    """Photos with 5 captions each, as long as Flickr8k's, of words drawn evenly."""
    random = np.random.default_rng(1)
    length = LENGTH_MEAN + LENGTH_BETWEEN * random.standard_normal((photos, 1))
    length = length + LENGTH_WITHIN * random.standard_normal((photos, 5))
    words = np.clip(np.rint(np.exp(length)).astype(int) - 1, 1, None)  # without the end
    return [
        Example(
            str(number),
            Path(f"{number}.jpg"),
            tuple(
                " ".join(f"word{word}" for word in random.integers(0, vocabulary - 4, count))
                for count in counts
            ),
            "train",
        )
        for number, counts in enumerate(words)
    ]


class _Random(Features):
    """Regions of any photo, drawn."""

    def __init__(self, side: int) -> None:
        self._shape = (side * side, DEPTH)

    def locate(self, photos: Sequence[Path]) -> list[tuple[int, int]]:
        return [(0, 0) for _ in photos]

    def read(self, places: Sequence[tuple[int, int]]) -> np.ndarray:
        random = np.random.default_rng(1)
        return random.random((len(places), *self._shape), np.float32).astype(np.float16)


def _typical_batches(sizes: Sizes, side: int = SIDE) -> dict[int, tuple[int, Any]]:
    """By the steps of the loop, `T`: how many batches of an epoch have them, and the one of them
    with a middling number of words; the commonest first."""
    vocabulary = Vocabulary([f"word{number}" for number in range(sizes.vocabulary - 4)])
    examples = captions(sizes.train, sizes.vocabulary)
    batches = Batches([_Random(side)], examples, vocabulary, sizes.batch, MAX_WORDS, 1)
    groups: dict[int, list[tuple[int, int]]] = {}
    for number in range(len(batches)):
        tokens = batches.tokens(number)
        groups.setdefault(tokens.shape[2] - 1, []).append((int(np.count_nonzero(tokens)), number))
    typical: dict[int, tuple[int, Any]] = {}
    covered = 0
    for words, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        if covered >= COVERED * len(batches):
            break
        covered += len(members)
        _, number = sorted(members)[len(members) // 2]
        typical[words] = len(members), batches[number]
    return typical


def _training(figures: _Figures, sizes: Sizes) -> None:
    keep_freed_memory()  # as training does
    typical = _typical_batches(sizes)
    commonest = next(iter(typical))
    for place, kind in enumerate(sizes.kinds):
        lengths = list(typical) if place < WHOLE_EPOCHS else [commonest]
        steps = _steps(sizes, [typical[words][1] for words in lengths], *KINDS[kind])
        for words, times in zip(lengths, steps, strict=True):
            if place == 0 or words == commonest:  # how it grows with the words of a caption
                figures.add(f"train.{kind}.ms_at_{words}_words", [1e3 * one for one in times])
        if place < WHOLE_EPOCHS:
            _epoch(figures, sizes, kind, [typical[words] for words in lengths], steps)
    # And with the regions of a photo: four times as many.
    wide = _typical_batches(sizes, 2 * SIDE)
    (times,) = _steps(sizes, [wide[commonest][1]], "soft", "additive", 2 * SIDE)
    name = f"train.soft_additive.ms_at_{commonest}_words_{2 * SIDE}x{2 * SIDE}_regions"
    figures.add(name, [1e3 * one for one in times])


def _epoch(
    figures: _Figures,
    sizes: Sizes,
    kind: str,
    batches: Sequence[tuple[int, Any]],
    steps: Sequence[Sequence[float]],
) -> None:
    """What the steps of all lengths, each as often as an epoch has it, come to."""
    often = [count for count, _ in batches]
    seconds = [
        sum(count * one for count, one in zip(often, repeat, strict=True))
        for repeat in zip(*steps, strict=True)
    ]
    figures.rate(f"train.{kind}.captions_per_s", 5 * sizes.batch * sum(often), seconds)
    sizes_of = (SIDE**2, DEPTH, sizes.units, sizes.vocabulary)
    flops = sum(
        count * step_flops(sizes.batch, int(np.count_nonzero(y)), *sizes_of, *KINDS[kind])
        for count, (_, y) in batches
    )
    gflops = figures.rate(f"train.{kind}.gflops", flops / 1e9, seconds)
    for name in ("float32", "bfloat16"):
        ceiling = figures.values[f"machine.{name}_gflops"]
        figures.add(f"train.{kind}.share_of_{name}", [gflops / ceiling])


def _steps(
    sizes: Sizes, batches: Sequence[Any], attention: str, score: str, side: int = SIDE
) -> list[list[float]]:
    """Seconds of a training step of every batch, per repeat."""
    model = Captioner(
        build_encoder("efficientnet-lite0", 32 * side, weights="none"),
        [f"word{number}" for number in range(sizes.vocabulary - 4)],
        units=sizes.units,
        attention_units=sizes.units,
        embedding_units=sizes.units,
        attention=attention,
        score=score,
        dtype=best_precision(),
    )
    optimizer = build_optimizer("adamw", 1e-4, weight_decay=1e-4, clip=5.0)
    model.compile(optimizer=optimizer, jit_compile=False)
    model.make_train_function()
    seconds = []
    for batch in batches:
        tensors = tf.nest.map_structure(tf.constant, batch)

        def step(tensors: Any = tensors) -> None:
            float(model.train_function(iter([tensors]))["loss"])

        seconds.append(_timed(step, sizes.repeats))
    return seconds


# --- Captioning ----------------------------------------------------------------------------------


def _captioning(figures: _Figures, sizes: Sizes, photos: Sequence[Path]) -> None:
    """From JPEG files to text with the shipped model, encoder included."""
    load = _timed(lambda: inference.load(None), sizes.repeats)
    figures.add("caption.load_model_s", load)
    writer = Writer(inference.load(None))
    for name, options in (("greedy", GREEDY), ("beam_3", BEAM_3), ("beam_5", BEAM_5)):

        def bulk(options: SearchConfig = options) -> None:
            for _ in describe_files(writer, photos, options):
                pass

        seconds = _timed(bulk, sizes.repeats)
        figures.rate(f"caption.{name}.photos_per_s", len(photos), seconds)
    turns = itertools.cycle(photos)
    seconds = _timed(lambda: list(describe_files(writer, [next(turns)], BEAM_5)), sizes.single)
    figures.add("caption.one_photo.median_ms", [1e3 * one for one in seconds])
    figures.add("caption.one_photo.p95_ms", [1e3 * float(np.percentile(seconds, 95))])


# --- What starts a process -----------------------------------------------------------------------


def _processes(figures: _Figures, sizes: Sizes, photos: Sequence[Path], folder: Path) -> None:
    python, captioner = [sys.executable], [sys.executable, "-m", "captioner"]
    commands = {
        "import_tensorflow_s": [*python, "-c", "import tensorflow"],
        "help_s": [*captioner, "--help"],
        "caption.cold_shell_s": [*captioner, "caption", str(photos[0])],
    }
    for name, command in commands.items():
        runs = [_run(command) for _ in range(sizes.processes)]
        figures.add(name, [seconds for seconds, _ in runs])
    few, many = photos[0].parent, folder / "many"
    for number in range(4):
        shutil.copytree(few, many / str(number))
    commands = {
        name: [*captioner, "caption", str(place), "--beam", "3"]
        for name, place in (("caption", few), ("caption_4x_photos", many))
    }
    for name, count in (("train", sizes.scenes), ("train_4x_photos", 4 * sizes.scenes)):
        data = folder / "scenes" / name
        scenes.write(data, count=count, seed=1, image_size=224)
        options = ["--epochs", "1", "--min-count", "1", "--dev-photos", "10"]
        out = str(folder / "runs" / name)
        commands[name] = [*captioner, "train", "--data", str(data), "--out", out, *options]
    if sys.platform != "win32":  # which does not tell
        for name, command in commands.items():
            figures.add(f"memory.{name}_peak_mb", [_peak(command)])


def _run(command: Sequence[str]) -> tuple[float, str]:
    """Seconds that a process takes, and what it writes to stdout."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return seconds, done.stdout


def _peak(command: Sequence[str]) -> float:
    """The most memory in MB that a process holds.

    Linux counts for a process what its parent holds while starting it, too, and this one may hold
    more than what is measured: so a small one starts it.
    """
    script = (
        "import resource, subprocess, sys; "
        "subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    _, told = _run([sys.executable, "-c", script, *command])
    # In bytes there, in kB elsewhere.
    return int(told) / (2**20 if sys.platform == "darwin" else 2**10)


def _timed(action: Callable[[], object], repeats: int) -> list[float]:
    """Seconds that an action takes, per repeat, after once for warming up."""
    action()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return seconds
