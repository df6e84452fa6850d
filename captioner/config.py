"""The options of all commands, as frozen dataclasses: the code reads them, `--help` shows them."""

import dataclasses
import json
import shlex
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from captioner.errors import InputError

__all__ = [
    "PRESETS",
    "CompleteSearch",
    "DataConfig",
    "ModelConfig",
    "OutputConfig",
    "SearchConfig",
    "TrainConfig",
    "TrainingConfig",
    "VocabularyConfig",
    "preset",
]


@dataclass(frozen=True)
class DataConfig:
    """The data set."""

    data: Path | None = None
    """Data set: a folder or file; its format is worked out (see data/README.md)."""
    format: str | None = None
    """Name of the data set's format, when working it out goes wrong."""
    images: Path | None = None
    """Folder of the photos, when they are not beside the captions."""
    limit: int | None = None
    """Use at most this many photos of the split (to try things out)."""
    split_seed: int = 1
    """Draws the splits of a data set that comes without; the same for training and scoring."""


@dataclass(frozen=True)
class VocabularyConfig:
    """Which words are learned."""

    min_count: int = 5
    """A word seen less often in train becomes <unk>."""
    max_vocabulary: int = 10_000
    """Words kept at most, the most frequent."""
    max_words: int = 24
    """Longer captions are cut to this many words in training."""
    segmenter: Literal["none", "jieba"] = "none"
    """How Chinese is split into words. none: every character is one; jieba: by a dictionary (needs
    pip install jieba). Other languages are not affected."""


@dataclass(frozen=True)
class ModelConfig:
    """What is built."""

    encoder: str = "efficientnet-lite0"
    """Backbone that turns a photo into regions (`captioner encoders` lists them)."""
    weights: str = "default"
    """Backbone weights: default (ImageNet), none (random), or a file."""
    image_size: int | None = None
    """Side in pixels of the square the backbone sees; its native size if not given."""
    layer: str | None = None
    """Layer of the backbone that gives the regions; its last if not given. An earlier one has a
    finer grid, or tells more of how things look and less of what they are."""
    normalize: bool = False
    """Whether the channels of each region are brought to mean 0 and variance 1."""
    resize: Literal["stretch", "crop", "pad"] = "stretch"
    """How a photo becomes that square."""
    attention: Literal["soft", "hard", "none"] = "soft"
    """soft: a weighted mean of the regions for every word; hard: one region, sampled while
    training; none: the same mean for all words."""
    score: Literal["additive", "dot", "scaled-dot", "general", "cosine"] = "additive"
    """How a region is compared with the decoder's state."""
    word_query: bool = False
    """Whether attention hears the previous word; in the paper it knows only the words before it."""
    positions: bool = False
    """Whether a region knows where in the photo it is: to tell left from right."""
    self_attention: int = 0
    """Self-attention layers over the regions before decoding."""
    units: int = 512
    """LSTM units."""
    attention_units: int = 256
    """Hidden units of the score."""
    embedding_units: int = 512
    """Size of a word vector."""
    tied: bool = False
    """Whether words are written with the vectors they are read with: fewer weights to learn."""
    dropout: float = 0.5
    """Share of units dropped while training."""
    regularizer: float = 0.3
    """Lambda of the doubly stochastic regulariser (paper, eq. 14)."""
    label_smoothing: float = 0.0
    """Share of the target probability spread over all words."""
    expected_share: float = 0.5
    """Hard attention: share of photos that train with the expected context instead of a sample."""
    reward_weight: float = 0.3
    """Hard attention: lambda_r, weight of the REINFORCE term; 1 is the gradient's own."""
    entropy_weight: float = 0.02
    """Hard attention: lambda_e, weight of the entropy of the maps."""
    baseline_decay: float = 0.9
    """Hard attention: decay of the moving-average baseline, per batch."""
    grounding_weight: float = 0.0
    """Lambda_g, weight of the loss that teaches alpha to lie on what words name; needs no boxes."""


@dataclass(frozen=True)
class TrainingConfig:
    """How it is trained."""

    start_from: Path | None = None
    """A trained model of the same sizes to start with, its weights, encoder and vocabulary: a
    .keras file, a run folder, or a shipped model by name, as "photo". To fine-tune it on other
    photos, whose words it learns beside its own, to train it by score, or to let hard attention
    learn."""
    fine_tune: bool = False
    """Whether the encoder is trained as well, on photos instead of kept regions. Slower, and of use
    only once the rest has learned: with --start-from."""
    encoder_learning_rate: float = 5e-5
    """With --fine-tune: the encoder's highest learning rate; it rises and falls like the other."""
    epochs: int = 14
    """Times that every train photo is seen, with all its captions."""
    soft_epochs: int = 0
    """Hard attention: epochs, the first ones, that train as soft attention does. Sampling teaches
    little before a model knows what there is to look at."""
    optimize_cider: int = 0
    """Epochs, after the others, that train by score: captions are sampled, and those whose CIDEr-D
    is above that of the photo's others become likelier (self-critical training)."""
    cider_samples: int = 5
    """With --optimize-cider: captions sampled per photo."""
    cider_likelihood: float = 0.0
    """With --optimize-cider: weight of the likelihood of people's captions beside the score. It
    keeps captions from becoming short and alike; 0 is the score alone."""
    cider_learning_rate: float = 5e-5
    """With --optimize-cider: the learning rate."""
    views: int = 1
    """Views of every train photo to learn from, one of them an epoch: 1 as it is, 2 also mirrored
    (not where a caption says left or right), 3 and more light crops, every other one mirrored."""
    average: float = 0.0
    """Decay of the moving average of the weights, which is what is scored and saved: 0.99 averages
    over about 100 batches. 0: no average."""
    batch_photos: int = 32
    """Photos per step, each with all its captions."""
    optimizer: Literal["adamw", "rmsprop"] = "adamw"
    """adamw, or rmsprop as the paper's authors had it; their --learning-rate was 1e-4."""
    learning_rate: float = 8e-4
    """Highest learning rate."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """cosine: it warms up for half an epoch and then falls along a cosine to a hundredth; constant:
    it stays, and early stopping ends training."""
    weight_decay: float = 1e-4
    """Share of the weights that decays, times the learning rate, at every step."""
    clip: float = 5.0
    """Largest norm of a step's gradient."""
    patience: int = 4
    """Epochs without a better dev score before training stops."""
    monitor: Literal["cider", "bleu_4", "none"] = "cider"
    """Score of freely generated dev captions by which the best epoch is chosen; none: the last one
    is kept, for dev photos too few, or too unlike what the model is for."""
    precision: Literal["auto", "float32", "mixed_bfloat16", "mixed_float16"] = "auto"
    """auto: bfloat16 where it is faster here, which is measured, else float32. mixed_float16, for
    GPUs that have no bfloat16, scales the loss."""
    strategy: Literal["auto", "mirrored", "multiworker"] = "auto"
    """Who shares the work: mirrored, all GPUs of this machine; multiworker, the machines listed in
    TF_CONFIG (docs/many-machines.md); auto, one of the two where there are several."""
    save_minutes: float = 5.0
    """Minutes between two checkpoints within an epoch."""
    dev_photos: int = 1000
    """Dev photos captioned after each epoch, at most."""
    seed: int = 1
    """Decides first weights, order and dropout."""


@dataclass(frozen=True)
class TrainConfig:
    """All that decides a run; `config.json` of the run folder."""

    data: DataConfig = field(default_factory=DataConfig)
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, default=str) + "\n"

    def described(self, *, complete: bool = False) -> list[str]:
        """Options as they are typed, a line per group; those that are not the default, or all."""
        lines = []
        for group in dataclasses.fields(self):
            values, plain = getattr(self, group.name), getattr(TrainConfig(), group.name)
            chosen = [
                _typed(name, value)
                for name, value in vars(values).items()
                if value is not None and (complete or value != getattr(plain, name))
            ]
            if chosen:
                lines.append(f"{group.name}: {' '.join(chosen)}")
        return lines

    @classmethod
    def from_json(cls, text: str, where: str = "config.json") -> "TrainConfig":
        """Reads what `to_json` wrote.

        Raises:
            InputError: not JSON, or options that this version does not know.
        """
        try:
            return typing.cast(TrainConfig, _read(cls, json.loads(text), where))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON: {error}") from error


def _typed(name: str, value: Any) -> str:
    """An option with its value as on the command line."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {shlex.quote(str(value))}"


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of the type of an option."""
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if typing.get_args(kind):  # X | None
        return any(_fits(value, one) for one in typing.get_args(kind))
    if isinstance(value, bool):  # which Python takes for an int
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _read(cls: type, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        found = str(values)[:40]
        raise InputError(f"{where}: expected an object for {cls.__name__}, found {found}")
    types = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(types))
    if unknown:
        names = ", ".join(name[:40] for name in unknown[:5])
        raise InputError(f"{where}: options that this version does not know: {names}")
    arguments = {}
    for name, value in values.items():
        kind = types[name]
        if dataclasses.is_dataclass(kind):
            value = _read(typing.cast(type, kind), value, where)
        elif kind == Path | None and isinstance(value, str):
            value = Path(value)
        elif not _fits(value, kind):
            expected = getattr(kind, "__name__", str(kind).replace("typing.", ""))
            raise InputError(f"{where}: {name} is {str(value)[:40]!r}, expected {expected}")
        arguments[name] = value
    return cls(**arguments)


@dataclass(frozen=True)
class SearchConfig:
    """How words are chosen."""

    beam: int | None = None
    """Captions kept in parallel while searching; 1 is greedy. If not given, what the model was
    tuned to (see `captioner tune`), else 5."""
    length_penalty: float | None = None
    """A caption's score is its log-probability / length ** this; 0 favours short captions. If not
    given, what the model was tuned to, else 0.7."""
    no_repeat: int | None = None
    """No sequence of this many words stands in a caption twice; 0 allows all. If not given, what
    the model was tuned to, else 0."""
    max_words: int = 20
    """Longest caption in words."""
    look: Literal["expected", "sampled", "argmax"] = "expected"
    """What a word's context is made of: the mean of the regions weighted by alpha, one region drawn
    from alpha, or alpha's heaviest region. Maps always show alpha."""
    n_best: int = 1
    """Captions per photo, best first (at most the beam, or the number of samples)."""
    sample: bool = False
    """Draw the words at random instead of searching."""
    temperature: float = 1.0
    """With --sample: below 1 plays safe, above 1 is bold."""
    top_k: int | None = None
    """With --sample: draw among this many words at most."""
    top_p: float | None = None
    """With --sample: draw among the fewest words that hold this share of the probability."""
    seed: int = 0
    """With --sample or --look sampled: decides what is drawn."""

    def completed(self, decoding: Mapping[str, Any]) -> "CompleteSearch":
        """With what was not given filled in: `decoding` is what the model was tuned to, by name."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return CompleteSearch(**{**decoding, **given})


@dataclass(frozen=True)
class CompleteSearch(SearchConfig):
    """How words are chosen, nothing left open."""

    beam: int = 5
    length_penalty: float = 0.7
    no_repeat: int = 0


@dataclass(frozen=True)
class OutputConfig:
    """What is written of every photo that is captioned, besides its caption on stdout."""

    overlay: Path | None = None
    """Folder for one picture per photo: a panel for every word, with where it looked."""
    show: Literal["alpha", "evidence"] = "alpha"
    """What overlays and animations show: alpha, what was weighed before the word was chosen, or
    evidence, the regions that spoke for the chosen word."""
    html: Path | None = None
    """File for one page to look at all photos: move to a word to see where the model looked."""
    beside: Path | None = None
    """With --html: a second model, whose captions stand beside the first one's."""
    animation: Path | None = None
    """Folder for one moving picture per photo: word by word, where it looked."""
    animation_format: Literal["gif", "webp"] = "gif"
    """Of animations: gif, which everything shows, or webp, a fifth of the size in all colours."""
    maps: Path | None = None
    """Folder for one .npz per photo: the maps as numbers (docs/captioning.md)."""
    jsonl: Path | None = None
    """File for one line of JSON per photo. It is added to, and a photo of a folder that stands in
    it already is not captioned again (docs/captioning.md)."""
    csv: Path | None = None
    """File for a table: photo, caption, score."""
    txt: Path | None = None
    """Folder for one .txt per photo, which may be the folder of the photos."""
    alt_text: Literal["xmp", "embed"] | None = None
    """Describe the photos for screen readers and photo managers: xmp writes photo.jpg.xmp beside
    photo.jpg, embed writes into the photo's own metadata (needs pyexiv2), pixels untouched."""
    language: str = "en"
    """With --alt-text: the language of the captions, as in "en" or "pt-BR"."""
    overwrite_descriptions: bool = False
    """With --alt-text: also where somebody has described the photo already."""


# VGG19's conv5_4 at 14x14 (section 4.3), RMSProp at a constant rate, early stopping on BLEU, lambda
# 1, dropout, 10,000 words, 64 captions a step: here 13 photos with their 5 each, padded to the
# longest of them, where the paper had single captions of one length.
PAPER = TrainConfig(
    vocabulary=VocabularyConfig(min_count=1),
    model=ModelConfig(encoder="vgg19", units=1000, attention_units=512, regularizer=1.0),
    training=TrainingConfig(
        epochs=50,
        patience=10,
        monitor="bleu_4",
        batch_photos=13,
        optimizer="rmsprop",
        learning_rate=1e-4,
        schedule="constant",
        weight_decay=0.0,
    ),
)

PRESETS: dict[str, TrainConfig] = {
    # Measured: see docs/quality.md.
    "default": TrainConfig(),
    # One after the other they made the shipped models, with --start-from: photo and fine-tune the
    # first; flickr8k-soft and fine-tune that of this name, and from there flickr8k-hard. See their
    # cards.
    "photo": TrainConfig(),
    "flickr8k-soft": TrainConfig(
        model=ModelConfig(encoder="efficientnet-lite2"), training=TrainingConfig(epochs=8)
    ),
    "fine-tune": TrainConfig(
        training=TrainingConfig(
            fine_tune=True,
            epochs=5,
            learning_rate=4e-4,
            encoder_learning_rate=2e-4,
            views=4,
            average=0.99,
        )
    ),
    "flickr8k-hard": TrainConfig(
        model=ModelConfig(attention="hard"),
        training=TrainingConfig(epochs=3, learning_rate=2e-4, average=0.99),
    ),
    "by-score": TrainConfig(
        training=TrainingConfig(
            epochs=0,
            optimize_cider=10,
            cider_learning_rate=2e-4,
            cider_likelihood=0.02,
            views=2,
            average=0.99,
        )
    ),
    # The choices of Xu et al. 2015, and where the paper is silent those of its authors' program.
    "paper-soft": PAPER,
    "paper-hard": dataclasses.replace(
        PAPER,
        model=dataclasses.replace(
            PAPER.model, attention="hard", regularizer=0.0, reward_weight=1.0, entropy_weight=0.002
        ),
    ),
    # Own small data set: rare words are kept, more passes.
    "small": TrainConfig(
        vocabulary=VocabularyConfig(min_count=2),
        model=ModelConfig(units=256, attention_units=256, embedding_units=256),
        training=TrainingConfig(epochs=30, patience=8),
    ),
    # Drawn scenes: few words, all frequent; small things, hence large images; relations, which need
    # positions; colours, which the backbone's last layer hardly tells from each other and the one
    # before it does; two things, so that a shape must be looked for by the colour just written.
    "scenes": TrainConfig(
        vocabulary=VocabularyConfig(min_count=1),
        model=ModelConfig(
            image_size=320,
            layer="block15_project",
            normalize=True,
            word_query=True,
            units=256,
            attention_units=256,
            embedding_units=128,
            dropout=0.1,
            positions=True,
            regularizer=0.0,
            grounding_weight=0.2,
        ),
        training=TrainingConfig(
            epochs=8,
            soft_epochs=4,
            batch_photos=16,
            learning_rate=2e-3,
            patience=8,
            dev_photos=150,
        ),
    ),
}


def preset(name: str) -> TrainConfig:
    """A preset by name; `InputError` lists them."""
    if name not in PRESETS:
        raise InputError(f"--preset {name}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
