"""`python -m captioner COMMAND`: parses, delegates, prints.

Exit status: 0 success, 2 bad usage or input (one line on stderr), 130 stopped, by Ctrl-C
or because nobody reads stdout any more.
"""

import contextlib
import inspect
import io
import itertools
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import captioner
from captioner.config import (
    DataConfig,
    ModelConfig,
    OutputConfig,
    SearchConfig,
    TrainConfig,
    TrainingConfig,
    VocabularyConfig,
    preset,
)
from captioner.errors import InputError
from captioner.messages import configure, load_tensorflow

# Heavy modules are imported by the command that needs them: `--help` should not wait for
# TensorFlow.

log = logging.getLogger("captioner")


@dataclass(frozen=True)
class MessageOptions:
    """What is said meanwhile, on stderr."""

    verbose: Annotated[bool, tyro.conf.arg(aliases=("-v",))] = False
    """Say more: what is skipped and why, what was done before, warnings."""
    quiet: bool = False
    """Say only what went wrong, and show no progress."""


@dataclass(frozen=True)
class TrainCommand:
    """Train a captioner on an image data set."""

    out: Path = Path("runs/run")
    """Run folder: settings, best model, checkpoint, history, samples."""
    resume: bool = False
    """Go on with the run in --out, with its options."""
    preset: str = "default"
    """Options to start from, which other options change: default, photo, flickr8k-soft,
    fine-tune, flickr8k-hard, by-score, paper-soft, paper-hard, small, scenes."""
    data: DataConfig = field(default_factory=DataConfig)
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    messages: MessageOptions = field(default_factory=MessageOptions)

    def run(self) -> None:
        from captioner.training import train

        config = TrainConfig(self.data, self.vocabulary, self.model, self.training)
        train(config, self.out, resume=self.resume)


@dataclass(frozen=True)
class CaptionCommand:
    """Caption photos and folders of photos; save captions, pictures, maps, pages and alt text."""

    photos: tyro.conf.Positional[tuple[Path, ...]]
    """Photos, or folders of photos (searched recursively)."""
    model: Path | None = None
    """A .keras file, a run folder or the name of a shipped model; "photo" if not given."""
    outputs: OutputConfig = field(default_factory=OutputConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    messages: MessageOptions = field(default_factory=MessageOptions)

    def run(self) -> None:
        from captioner.job import caption

        caption(self.photos, self.model, self.search, self.outputs)


@dataclass(frozen=True)
class EvaluateCommand:
    """Score a model's captions against a data set's: BLEU, METEOR, ROUGE-L, CIDEr."""

    data: DataConfig = field(default_factory=DataConfig)
    split: str = "test"
    """Split that is captioned."""
    model: Path | None = None
    """A .keras file, a run folder or the name of a shipped model; "photo" if not given."""
    out: Path | None = None
    """File for the scores; scores.json in the run folder, when --model is one."""
    html: Path | None = None
    """File for one page to look at 48 of the photos, spread over the split: captions, the best
    first, maps, and what people wrote."""
    search: SearchConfig = field(default_factory=SearchConfig)
    messages: MessageOptions = field(default_factory=MessageOptions)

    def run(self) -> None:
        from captioner.evaluation import evaluate

        evaluate(self.data, self.split, self.model, self.search, self.out, self.html)


@dataclass(frozen=True)
class TuneCommand:
    """Find the beam, length rule and repetition rule a model writes best with; save them in it."""

    data: DataConfig = field(default_factory=DataConfig)
    split: str = "dev"
    """Split that is captioned: not the one that is reported."""
    model: Path | None = None
    """A .keras file or a run folder, whose file is changed."""
    beams: tuple[int, ...] = (3, 5)
    """Values of --beam to try."""
    length_penalties: tuple[float, ...] = (0.5, 0.7, 0.9, 1.1)
    """Values of --length-penalty to try."""
    no_repeats: tuple[int, ...] = (0, 2)
    """Values of --no-repeat to try."""
    monitor: Literal["cider", "bleu_4"] = "cider"
    """Score that decides."""
    out: Path | None = None
    """File for the table, JSON."""
    messages: MessageOptions = field(default_factory=MessageOptions)

    def run(self) -> None:
        from captioner.tuning import tune

        tune(
            self.data,
            self.split,
            self.model,
            self.beams,
            self.length_penalties,
            self.no_repeats,
            self.monitor,
            self.out,
        )


@dataclass(frozen=True)
class GroundCommand:
    """Measure whether maps lie on the things that the words name (needs boxes)."""

    data: DataConfig = field(default_factory=DataConfig)
    split: str | None = None
    """Split that is measured; all photos if not given (also those it was trained on)."""
    model: Path | None = None
    """A .keras file, a run folder or the name of a shipped model; "photo" if not given."""
    boxes: Path | None = None
    """COCO instances JSON, where it is not beside the captions."""
    reference: bool = False
    """Read the data set's captions (teacher forcing) instead of generating them."""
    out: Path | None = None
    """File for the result; ground.json in the run folder, when --model is one."""
    search: SearchConfig = field(default_factory=SearchConfig)
    messages: MessageOptions = field(default_factory=MessageOptions)

    def run(self) -> None:
        from captioner.grounding import ground

        ground(
            self.data,
            self.split,
            self.model,
            self.search,
            self.out,
            reference=self.reference,
            boxes=self.boxes,
        )


@dataclass(frozen=True)
class CompareCommand:
    """Train kinds of attention with one budget and seed, and compare them in one table."""

    out: Path = Path("runs/compare")
    """Folder of the runs and the table."""
    kinds: tuple[str, ...] = ("none", "soft", "hard", "soft+self")
    """What is compared."""
    boxes_data: Path | None = None
    """A data set with boxes to measure the maps on; scenes have their own."""
    preset: str = "default"
    """As for train."""
    data: DataConfig = field(default_factory=DataConfig)
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    beam: int = 5
    """Beam of the generated captions."""
    messages: MessageOptions = field(default_factory=MessageOptions)

    def run(self) -> None:
        from captioner.compare import compare

        config = TrainConfig(self.data, self.vocabulary, self.model, self.training)
        compare(config, self.out, self.kinds, SearchConfig(beam=self.beam), self.boxes_data)


@dataclass(frozen=True)
class DemoCommand:
    """Caption sample photos with the shipped model and write their overlays."""

    out: Path = Path("out/demo")
    """Folder for the overlays."""
    messages: MessageOptions = field(default_factory=MessageOptions)

    def run(self) -> None:
        from captioner.commands import demo

        demo(self.out)


@dataclass(frozen=True)
class ScenesCommand:
    """Draw a data set of simple scenes, with exact captions and boxes."""

    out: Path = Path("data/scenes")
    """Folder for the data set: new, empty, or of scenes, which are replaced."""
    count: int = 3000
    """Scenes, all splits together."""
    seed: int = 1
    """Decides what is drawn."""
    image_size: int = 224
    """Side of the pictures in pixels."""
    messages: MessageOptions = field(default_factory=MessageOptions)

    def run(self) -> None:
        from captioner.scenes import write

        counts = write(self.out, self.count, self.seed, self.image_size)
        print(", ".join(f"{split} {count:,}" for split, count in counts.items()))
        print(f"scenes → {self.out}")


@dataclass(frozen=True)
class ServeCommand:
    """Caption photos on a web page of this computer, with an HTTP API (needs the extra app)."""

    model: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """A .keras file, a run folder or the name of a shipped model, "photo" if not given; give it
    again for another to choose from."""
    port: int = 7860
    """Where the page is: http://127.0.0.1:PORT."""
    messages: MessageOptions = field(default_factory=MessageOptions)

    def run(self) -> None:
        from captioner.serve import serve

        serve(self.model, self.port)


@dataclass(frozen=True)
class ExportCommand:
    """Write a model for TensorFlow Serving or LiteRT: photo to caption and maps in one graph."""

    out: Path
    """savedmodel: a new folder, which becomes the model. litert: folder for captioner.tflite and
    captioner.json."""
    format: Literal["savedmodel", "litert"]
    """savedmodel takes files or pixels, any number at a time; litert one photo's square."""
    model: Path | None = None
    """A .keras file, a run folder or the name of a shipped model; "photo" if not given."""
    quantize: Literal["none", "float16", "int8"] = "none"
    """Of litert: weights as they are, of half the size, or of a quarter (then products are
    computed in 8 bits)."""
    beam: int | None = None
    """As for caption; built in."""
    length_penalty: float | None = None
    """As for caption; built in."""
    no_repeat: int | None = None
    """As for caption; built in."""
    max_words: int = SearchConfig.max_words
    """As for caption; built in."""
    messages: MessageOptions = field(default_factory=MessageOptions)

    def run(self) -> None:
        from captioner.export import export

        options = SearchConfig(
            beam=self.beam,
            length_penalty=self.length_penalty,
            no_repeat=self.no_repeat,
            max_words=self.max_words,
        )
        export(self.model, self.format, self.out, options, self.quantize)


@dataclass(frozen=True)
class BenchCommand:
    """Measure how fast this machine trains and captions (some minutes)."""

    out: Path | None = None
    """File for the figures, JSON."""
    quick: bool = False
    """Only see that everything runs; the figures then mean nothing."""
    messages: MessageOptions = field(default_factory=MessageOptions)

    def run(self) -> None:
        from captioner.bench import bench

        bench(self.out, quick=self.quick)


@dataclass(frozen=True)
class EncodersCommand:
    """List the encoders."""

    messages: MessageOptions = field(default_factory=MessageOptions)

    def run(self) -> None:
        from captioner.commands import list_encoders

        list_encoders()


@dataclass(frozen=True)
class DoctorCommand:
    """Show what is installed here, and what is missing for what."""

    messages: MessageOptions = field(default_factory=MessageOptions)

    def run(self) -> None:
        from captioner.doctor import doctor

        doctor()


COMMANDS: dict[str, type] = {
    "train": TrainCommand,
    "caption": CaptionCommand,
    "evaluate": EvaluateCommand,
    "tune": TuneCommand,
    "ground": GroundCommand,
    "compare": CompareCommand,
    "demo": DemoCommand,
    "encoders": EncodersCommand,
    "scenes": ScenesCommand,
    "serve": ServeCommand,
    "export": ExportCommand,
    "bench": BenchCommand,
    "doctor": DoctorCommand,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(captioner.__version__)
        return 0
    configure()
    try:
        command = _parse(*arguments)
        configure(verbose=command.messages.verbose, quiet=command.messages.quiet)
        load_tensorflow()
        command.run()
    except InputError as error:
        log.error(error)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whatever read stdout has had enough: `captioner caption … | head`
        with Path(os.devnull).open("wb") as nowhere:  # what is still in the buffer goes there
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 130
    except OSError as error:  # what no command foresaw: a name too long, a file that may not be
        if error.filename is None:
            raise
        log.error(InputError(f"{error.filename}: {error.strerror}"))
        return 2
    return 0


def _overview() -> str:
    lines = ["usage: captioner COMMAND [options]     (captioner COMMAND --help shows them)", ""]
    lines += [f"  {name:10} {inspect.getdoc(command)}" for name, command in COMMANDS.items()]
    return "\n".join(lines)


def _parse(name: str, *options: str) -> Any:
    """The command with its options; exits with 2 on bad usage, with 0 after `--help`."""
    if name not in COMMANDS:
        raise InputError(f"no command {name!r}: choose one of {', '.join(COMMANDS)}")
    default = None
    if name in ("train", "compare"):
        # What the preset says are the defaults that the other options then change.
        chosen_name = _option("--preset", options, "default")
        chosen = preset(chosen_name)
        default = COMMANDS[name](
            preset=chosen_name,
            data=chosen.data,
            vocabulary=chosen.vocabulary,
            model=chosen.model,
            training=chosen.training,
        )
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                COMMANDS[name],
                prog=f"captioner {name}",
                args=options,
                default=default,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise InputError(
            f"{_one_line(complaint.getvalue())} (see captioner {name} --help)"
        ) from stop


def _one_line(complaint: str) -> str:
    """What tyro says first, on one line, without the box it draws (of "─" or, in ASCII, "-")."""
    _title, *lines = [line.strip("╭╮╰╯│─ ") for line in complaint.strip().splitlines()]
    said = itertools.dropwhile(lambda line: not line.strip("-"), lines)
    return " ".join(itertools.takewhile(lambda line: line.strip("-"), said))


def _option(name: str, options: Sequence[str], default: str) -> str:
    """An option's value, before the options are parsed."""
    for option, following in itertools.pairwise([*options, default]):
        if option == name:
            return following
        if option.startswith(f"{name}="):
            return option.partition("=")[2]
    return default


if __name__ == "__main__":
    sys.exit(main())
