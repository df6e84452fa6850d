"""How fast this machine trains and captions, and what share of what it can do that is.

All figures of a run are from one machine at one time, so that their ratios can be compared where
seconds cannot. A figure is the median of some repeats; `spread` gives the least and the greatest.

What a training step computes is counted (`step_flops`) and divided by the machine's measured matrix
product: the share of the ceiling that is reached. Caption lengths are those of Flickr8k's train
batches (`LENGTHS`), so that captions/s say how long an epoch takes.

Shapes: `B` photos, `C` captions per photo, `T` words, `L` regions, `D` region channels, `H` units,
`A` attention units, `E` embedding units, `V` vocabulary.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from captioner import __version__, inference, scenes
from captioner.config import SearchConfig
from captioner.encoders import build_encoder, image_size_of
from captioner.features import BATCH_PHOTOS, load_squares
from captioner.files import write_text
from captioner.inference import Writer, describe_files
from captioner.model import Captioner
from captioner.precision import best_precision, product_seconds
from captioner.progress import console

__all__ = ["LENGTHS", "Sizes", "bench", "step_flops"]

# Words that batches of 32 photos are padded to, and how many of Flickr8k's 188 are.
LENGTHS: Mapping[int, int] = {12: 25, 16: 88, 20: 54, 24: 18, 28: 3}
KINDS: Mapping[str, tuple[str, str]] = {
    "soft_additive": ("soft", "additive"),
    "soft_dot": ("soft", "dot"),
    "soft_scaled_dot": ("soft", "scaled-dot"),
    "soft_general": ("soft", "general"),
    "soft_cosine": ("soft", "cosine"),
    "hard_additive": ("hard", "additive"),
    "none": ("none", "additive"),
}
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
        lengths: words that the training steps have, and how often each.
        batch: photos of a training step, 5 captions each.
        units: H = A = E.
        vocabulary: V.
        kinds: names in `KINDS`.
        scenes: photos that the memory of training is measured on, and four times as many.
    """

    repeats: int = 5
    processes: int = 3
    matrix: int = 2048
    photos: int = 256
    single: int = 40
    lengths: Mapping[int, int] = field(default_factory=lambda: LENGTHS)
    batch: int = 32
    units: int = 512
    vocabulary: int = 2542
    kinds: Sequence[str] = tuple(KINDS)
    scenes: int = 1000

    @classmethod
    def quick(cls) -> "Sizes":
        """Just enough to see that everything runs; its figures mean nothing."""
        return cls(
            repeats=1,
            processes=1,
            matrix=128,
            photos=6,
            single=2,
            lengths={4: 1},
            batch=2,
            units=16,
            vocabulary=50,
            kinds=("soft_additive", "soft_scaled_dot", "hard_additive"),
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
        console.print(f"{name}: {value:,.4g}", soft_wrap=True)
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

    def from_files() -> None:
        waiting: list[Any] = []
        for _, square, _ in load_squares(photos, size, "stretch"):
            waiting.append(square)
            if len(waiting) == BATCH_PHOTOS:
                encode(tf.constant(np.stack(waiting))).numpy()
                waiting.clear()
        if waiting:
            encode(tf.constant(np.stack(waiting))).numpy()

    figures.rate("encode.from_jpeg_photos_per_s", len(photos), _timed(from_files, sizes.repeats))


# --- Training ------------------------------------------------------------------------------------


def step_flops(
    photos: int, captions: int, words: int, regions: int, depth: int, units: int, vocabulary: int,
    attention: str = "soft", score: str = "additive",
) -> float:  # fmt: skip
    """Floating-point operations of the matrix products of a training step, H = A = E = `units`.

    Two per multiplication, three times: forward, and back to inputs and to weights. The frozen
    encoder's regions need no gradient, hence two times for what is multiplied with them alone.
    """
    lstm = (units + depth + units) * 4 * units  # of the word, the context and the hidden state
    head = (units + depth) * units + units * vocabulary
    look, photo = 0, 2 * depth * units  # the initial state
    if attention != "none":
        photo += regions * depth * units  # keys
        query = 0 if score == "general" else units * units
        look = query + regions * units + units + regions * depth  # scores, gate, weighted sum
    rows = photos * captions * words
    return 2.0 * (3 * rows * (lstm + head + look) + 2 * photos * photo)


def _training(figures: _Figures, sizes: Sizes) -> None:
    for kind in sizes.kinds:
        attention, score = KINDS[kind]
        steps = _steps(sizes, tuple(sizes.lengths), attention, score)
        # An epoch has so many steps of every length.
        seconds = [
            sum(sizes.lengths[words] * one for words, one in zip(steps, repeat, strict=True))
            for repeat in zip(*steps.values(), strict=True)
        ]
        gflop = sum(
            times
            * step_flops(
                *(sizes.batch, 5, words, SIDE**2, DEPTH, sizes.units, sizes.vocabulary),
                *(attention, score),
            )
            / 1e9
            for words, times in sizes.lengths.items()
        )
        captions = 5 * sizes.batch * sum(sizes.lengths.values())
        figures.rate(f"train.{kind}.captions_per_s", captions, seconds)
        gflops = figures.rate(f"train.{kind}.gflops", gflop, seconds)
        for name in ("float32", "bfloat16"):
            ceiling = figures.values[f"machine.{name}_gflops"]
            figures.add(f"train.{kind}.share_of_{name}", [gflops / ceiling])
        if kind == "soft_additive":  # how it grows with the words of a caption
            for words, times in steps.items():
                figures.add(f"train.{kind}.ms_at_{words}_words", [1e3 * one for one in times])
    # And with the regions of a photo: four times as many.
    words = min(sizes.lengths)
    ((_, times),) = _steps(sizes, (words,), "soft", "additive", 2 * SIDE).items()
    name = f"train.soft_additive.ms_at_{words}_words_{2 * SIDE}x{2 * SIDE}_regions"
    figures.add(name, [1e3 * one for one in times])


def _steps(
    sizes: Sizes, lengths: Sequence[int], attention: str, score: str, side: int = SIDE
) -> dict[int, list[float]]:
    """Seconds of a training step by its number of words, per repeat."""
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
    optimizer = keras.optimizers.AdamW(1e-4, global_clipnorm=5.0)
    model.compile(optimizer=optimizer, jit_compile=False)
    model.make_train_function()
    random = np.random.default_rng(1)
    regions = tf.constant(random.random((sizes.batch, side * side, DEPTH)), tf.float16)
    seconds = {}
    for words in lengths:
        shape = (sizes.batch, 5, words + 1)
        tokens = tf.constant(random.integers(4, sizes.vocabulary, shape), tf.int32)
        batch = ({"regions": regions, "tokens": tokens[:, :, :-1]}, tokens[:, :, 1:])

        def step(batch: Any = batch) -> None:
            float(model.train_function(iter([batch]))["loss"])

        seconds[words] = _timed(step, sizes.repeats)
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
    commands = {"caption": [*captioner, "caption", str(photos[0].parent), "--beam", "3"]}
    for name, count in (("train", sizes.scenes), ("train_4x_photos", 4 * sizes.scenes)):
        data = folder / "scenes" / name
        scenes.write(data, count=count, seed=1, image_size=224)
        options = ["--epochs", "1", "--min-count", "1", "--dev-photos", "10"]
        out = str(folder / "runs" / name)
        commands[name] = [*captioner, "train", "--data", str(data), "--out", out, *options]
    for name, command in commands.items():
        _, peak = _run(command)
        if peak is not None:
            figures.add(f"memory.{name}_peak_mb", [peak])


def _run(command: Sequence[str]) -> tuple[float, float | None]:
    """Seconds that a process takes, and the most memory it held in MB, where that is told."""
    started = time.perf_counter()
    peak = None
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        if sys.platform == "win32":
            process.wait()
        else:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            # ru_maxrss is in bytes there, in kB elsewhere.
            peak = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
        seconds = time.perf_counter() - started
        if process.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace")
            raise RuntimeError(f"{' '.join(command)}: {said[-2000:]}")
    return seconds, peak


def _timed(action: Callable[[], object], repeats: int) -> list[float]:
    """Seconds that an action takes, per repeat, after once for warming up."""
    action()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return seconds
