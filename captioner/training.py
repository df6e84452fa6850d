"""Training: the run folder, the schedule, checkpoints, resuming.

A run folder holds `config.json`, `captioner.keras` (the best epoch, all that captioning needs),
`checkpoint/state.npz` (to go on from; `previous.npz` is the one before), `history.csv` and
`curves.png`, `tensorboard/` and, at the end, `samples.html`. Every file is renamed into place, so
whatever moment a run is stopped at, the folder can be used and the run resumed.
"""

import contextlib
import csv
import dataclasses
import io
import json
import logging
import math
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from captioner import __version__, datasets, metrics
from captioner.averaging import MovingAverage
from captioner.batches import Batches
from captioner.config import SearchConfig, TrainConfig
from captioner.curves import save_curves
from captioner.datasets import Example
from captioner.distribution import Team
from captioner.encoders import ENCODERS, build_encoder, image_size_of
from captioner.errors import InputError, refuse_newer
from captioner.features import Squares, extract, load_squares
from captioner.files import replacing, write_text
from captioner.images import Geometry, load_photo
from captioner.inference import RUN_MODEL, Writer, load
from captioner.model import Captioner, load_model, save_model
from captioner.precision import best_precision
from captioner.progress import Bar, bar, track, working
from captioner.rates import build_optimizer
from captioner.self_critical import SelfCritical
from captioner.text import Vocabulary
from captioner.viewer import save_page

__all__ = ["train"]

log = logging.getLogger(__name__)

GREEDY = SearchConfig(beam=1)
CHECKPOINT, PREVIOUS = Path("checkpoint", "state.npz"), Path("checkpoint", "previous.npz")
CHECKPOINT_FORMAT = 1  # as captioner.model.FORMAT, of checkpoints
DEV_BATCH = 100  # photos written at once while scoring dev
SAMPLE_PHOTOS = 16  # photos in samples.html


@dataclass(frozen=True)
class Progress:
    """Where a run stands; part of the checkpoint.

    Attributes:
        epoch: the epoch in progress, from 0.
        batch: batches of it that are done.
        losses: their mean losses.
        seconds: time spent on them.
        best: the best dev score so far.
        best_epoch: the epoch that had it; -1 before the first.
        likely_epochs: how many epochs were trained by likelihood, once training by score goes on
            from the best of them; -1 before.
        history: one row per finished epoch, as in `history.csv`.
    """

    epoch: int = 0
    batch: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    best: float = float("-inf")
    best_epoch: int = -1
    likely_epochs: int = -1
    history: tuple[dict[str, float], ...] = ()


def train(config: TrainConfig, out: Path, *, resume: bool = False) -> Path:
    """Trains a captioner into a run folder.

    Args:
        config: all options.
        out: the run folder.
        resume: go on with the run that is there.

    Returns:
        The run's best model, a `.keras` file.

    Raises:
        InputError: the data cannot be used, or `out` holds another run.
        KeyboardInterrupt: stopped by the user; the run folder is usable and can be resumed.
    """
    config = _resumed(config, out) if resume else config
    team = Team(config.training.strategy)
    if team.is_chief:
        _check_new(out, resume)
    with team.together():
        return _train(config, out, resume, team)


def _train(config: TrainConfig, out: Path, resume: bool, team: Team) -> Path:
    fit = config.training
    if fit.precision == "mixed_float16" and team.replicas > 1:
        raise InputError(
            f"--precision mixed_float16 is for one device, not for {team.replicas}: they would "
            "skip different steps; give another"
        )
    if fit.batch_photos % team.replicas:
        raise InputError(
            f"--batch-photos {fit.batch_photos}: {team.replicas} devices share a batch; give a "
            f"multiple of {team.replicas}"
        )
    if fit.fine_tune and fit.optimize_cider:
        raise InputError(
            "--fine-tune and --optimize-cider exclude each other; do one, then the other with "
            "--start-from, --epochs 0 and --optimize-cider"
        )
    if not fit.epochs and not (fit.start_from and fit.optimize_cider):
        raise InputError("--epochs 0 is for --start-from with --optimize-cider; give some epochs")
    if config.model.attention == "hard" and 0 < fit.epochs <= fit.soft_epochs:
        raise InputError(
            f"--soft-epochs {fit.soft_epochs} leaves none of the {fit.epochs} epochs to hard "
            "attention; give fewer, or more --epochs"
        )
    keras.utils.set_random_seed(config.training.seed)
    data = datasets.from_options(config.data, "the data set to train on")
    train_examples = data.split("train")[: config.data.limit]
    dev_examples = data.split("dev")[: config.training.dev_photos]
    start = None
    if config.training.start_from:
        # Resuming must need nothing but the run folder: its own model has the same words.
        own = resume and (out / RUN_MODEL).is_file()
        with team.strategy.scope():
            start = load(out if own else config.training.start_from)
        # Its encoder is gone on with, whatever the options say: they shall say so, too. A file of a
        # stranger may say anything, and a folder is named after it.
        name = start.about.get("encoder")
        if isinstance(name, str) and name in ENCODERS:
            model = dataclasses.replace(config.model, encoder=name)
            config = dataclasses.replace(config, model=model)
    for line in config.described(complete=log.isEnabledFor(logging.DEBUG)):
        log.info(line)
    log.info(data.summary())
    vocabulary = _vocabulary(config, start, train_examples)
    if len(vocabulary) == 4:
        raise InputError(
            f"{data.root}: no word stands in train {config.vocabulary.min_count} times or more; "
            "lower --min-count"
        )
    whose = "from train"
    if start:
        new = len(vocabulary) - len(start.vocabulary)
        whose = f"those of {fit.start_from}" + (f" and {new:,} more from train" if new else "")
    log.info(f"vocabulary: {len(vocabulary):,} words, {whose}")
    backbone = config.model
    if start is None:
        with team.strategy.scope():
            encoder = build_encoder(
                backbone.encoder,
                backbone.image_size,
                backbone.weights,
                layer=backbone.layer,
                normalize=backbone.normalize,
            )
    else:
        encoder = start.encoder  # it may have been fine-tuned
        if start.resize != backbone.resize:
            raise InputError(
                f"--start-from {config.training.start_from} was trained with --resize "
                f"{start.resize}: give the same"
            )
    # From here on it is a run: no option is refused any more, and what is done can be resumed.
    if team.is_chief:
        write_text(out / "config.json", config.to_json())
    stores, unreadable = _stores(
        config,
        encoder,
        [example.path for example in train_examples],
        [example.path for example in dev_examples],
        out.parent / "features",
    )
    for reason in list(unreadable.values())[:5]:
        log.warning(f"skipped: {reason}")
    if unreadable:
        log.warning(f"skipped {len(unreadable)} photos that cannot be read")
    train_examples = tuple(one for one in train_examples if one.path not in unreadable)
    dev_examples = tuple(one for one in dev_examples if one.path not in unreadable)
    if not train_examples or not dev_examples:
        raise InputError(f"{data.root}: none of the photos of train or of dev can be read")

    with team.strategy.scope():
        run = _Run(config, out, team, encoder, vocabulary, stores, train_examples, dev_examples)
    if start is not None:
        run.start_from(start)
    if resume:
        run.restore()
    try:
        run.train()
    except KeyboardInterrupt:
        if team.is_chief:
            run.stop_early()
        raise
    if team.is_chief:
        run.write_samples()
    return out / RUN_MODEL


def _vocabulary(
    config: TrainConfig, start: Captioner | None, train_examples: Sequence[Example]
) -> Vocabulary:
    """The words of train, after those of the model that is started from."""
    options = config.vocabulary
    if start and not config.training.epochs:  # by score, what was never learned is never written
        return start.vocabulary
    words = Vocabulary.build(
        (caption for example in train_examples for caption in example.captions),
        min_count=options.min_count,
        max_words=options.max_vocabulary,
        segmenter=start.vocabulary.segmenter if start else options.segmenter,
    )
    return start.vocabulary.extended(words, options.max_vocabulary) if start else words


def _stores(
    config: TrainConfig,
    encoder: keras.Model,
    train_photos: Sequence[Path],
    dev_photos: Sequence[Path],
    root: Path,
) -> tuple[Sequence[Any], dict[Path, str]]:
    """What is trained on, a store per view of the photos, the dev photos in the first; and the
    photos that cannot be read, with the reasons."""
    fit, name, resize = config.training, config.model.encoder, config.model.resize
    photos = [*train_photos, *dev_photos]
    if fit.fine_tune:
        size = image_size_of(encoder)
        squares = [Squares(size, resize, view) for view in range(fit.views)]
        read = track(load_squares(photos, size, resize), "Reading", len(photos), "photos")
        return squares, {path: str(one) for path, one, _ in read if isinstance(one, InputError)}
    features, unreadable = extract(encoder, name, resize, photos, root)
    stores = [features]
    for view in range(1, fit.views):
        kept = [photo for photo in train_photos if photo not in unreadable]
        stores.append(extract(encoder, name, resize, kept, root, view)[0])
    return stores, unreadable


class _Run:
    """One training run: model, optimizer and where it stands."""

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        team: Team,
        encoder: keras.Model,
        vocabulary: Vocabulary,
        stores: Sequence[Any],
        train_examples: Sequence[Example],
        dev_examples: Sequence[Example],
    ) -> None:
        self.config, self.out, self.team = config, out, team
        self.dev_store, self.dev_examples = stores[0], dev_examples
        self.progress = Progress()
        options, fit = config.model, config.training
        self.batches = Batches(
            stores,
            train_examples,
            vocabulary,
            fit.batch_photos,
            config.vocabulary.max_words,
            fit.seed,
            (team.worker, team.workers),
        )
        precision = fit.precision
        if precision == "auto":  # all have to choose the same
            faster = team.chiefs(best_precision() == "mixed_bfloat16")
            precision = "mixed_bfloat16" if faster else "float32"
        self.model = Captioner(
            encoder,
            list(vocabulary.words[4:]),
            resize=options.resize,
            segmenter=vocabulary.segmenter,
            units=options.units,
            attention_units=options.attention_units,
            embedding_units=options.embedding_units,
            attention=options.attention,
            score=options.score,
            word_query=options.word_query,
            tied=options.tied,
            dropout=options.dropout,
            positions=options.positions,
            self_attention=options.self_attention,
            regularizer=options.regularizer,
            label_smoothing=options.label_smoothing,
            expected_share=options.expected_share,
            reward_weight=options.reward_weight,
            entropy_weight=options.entropy_weight,
            baseline_decay=options.baseline_decay,
            grounding_weight=options.grounding_weight,
            about={
                "encoder": options.encoder,
                "data": str(config.data.data and config.data.data.name),
                "train_photos": len(train_examples),
                "captioner": __version__,
            },
            dtype=precision,
        )
        schedule: Any = fit.learning_rate
        if fit.schedule == "cosine":
            warmup = max(self.batches.per_epoch // 2, 1)
            schedule = keras.optimizers.schedules.CosineDecay(
                0.0,
                decay_steps=max(self.batches.per_epoch * fit.epochs - warmup, 1),
                alpha=0.01,
                warmup_target=fit.learning_rate,
                warmup_steps=warmup,
            )
        self.by_score = keras.Variable(False, dtype="bool", trainable=False, name="by_score")
        # What is scored and saved: float32, and compiled once for all epochs.
        self.twin = self.model.in_float32()
        self.writer = Writer(self.twin)
        optimizer = build_optimizer(
            fit.optimizer,
            _Schedule(schedule, fit.cider_learning_rate, self.by_score),
            fit.weight_decay,
            fit.clip,
        )
        if fit.fine_tune:
            self.model.train_encoder()
            optimizer.slow_down(
                self.model.encoder.trainable_variables,
                fit.encoder_learning_rate / fit.learning_rate,
            )
        self.model.compile(optimizer=optimizer, jit_compile=False)
        # With float16, Keras has put one that scales the loss around it.
        self.model.optimizer.build(self.model.trainable_variables)
        self.average = None
        if fit.average:
            self.average = MovingAverage(self.model.trainable_variables, fit.average)
        if team.is_chief:
            self.log = tf.summary.create_file_writer(str(out / "tensorboard"))

    def start_from(self, other: Captioner) -> None:
        """Takes the weights of a trained model of the same sizes."""
        try:
            self.model.take_weights(other)
        except ValueError as error:
            raise InputError(
                f"--start-from {self.config.training.start_from}: its layers have other shapes; "
                "give --units, --self-attention, --score and so on as it was trained with"
            ) from error
        if self.average:
            self.average.restart()

    def train(self) -> None:
        fit = self.config.training
        count = sum(keras.ops.size(one) for one in self.model.trainable_variables)
        log.info(
            f"training {count:,} parameters on "
            f"{self.batches.number_of_captions():,} captions, {self.model.dtype_policy.name}"
        )
        while self.progress.likely_epochs < 0 and self.progress.epoch < fit.epochs:
            if self._out_of_patience():
                log.info(f"no better dev score for {fit.patience} epochs: stopped")
                break
            self._epoch(fit.epochs, self._learn_likely)
        if fit.optimize_cider:
            self._train_by_score()
        best = self.progress
        why = "" if fit.monitor == "none" else f", dev {fit.monitor} {100 * best.best:.1f} (greedy)"
        log.info(f"best: epoch {best.best_epoch + 1}{why} → {self.out / RUN_MODEL}")

    def _train_by_score(self) -> None:
        """Goes on from the best epoch so far, by the CIDEr-D of sampled captions."""
        fit, progress = self.config.training, self.progress
        if progress.likely_epochs < 0:
            if progress.best_epoch >= 0:  # with --start-from and --epochs 0 there is none
                self.model.take_weights(load_model(self.out / RUN_MODEL))
            if self.average:
                self.average.restart()
            self.progress = dataclasses.replace(progress, likely_epochs=progress.epoch)
            if self.team.is_chief:
                self.save()
        self.by_score.assign(True)
        # What is learned from must be as likely to the learner as it was when it was drawn, without
        # dropout: else what dropout made unlikely is made ever more so, and the loss falls forever.
        self.model.stop_dropout()
        max_words = self.config.vocabulary.max_words
        sampled = SelfCritical(
            self.batches,
            self.writer,
            fit.cider_samples,
            max_words,
            fit.seed + self.team.worker,
            lambda length: int(self.team.all(length).max()),
            fit.cider_likelihood,
        )

        def learn(watcher: "_Watcher") -> None:
            rewards = []
            for index in range(len(self.batches)):
                self.twin.take_weights(self.model)
                number = int(self.model.optimizer.iterations.numpy())
                x, y, advantage, reward = sampled.batch(index, number)
                rewards.append(self.team.all(reward).mean())
                watcher.batch_done({**self._step((x, y, advantage)), "reward": np.mean(rewards)})

        end = self.progress.likely_epochs + fit.optimize_cider
        while self.progress.epoch < end:
            self._epoch(end, learn)

    def _epoch(self, epochs: int, learn: Callable[["_Watcher"], None]) -> None:
        """What is left of an epoch, and its score."""
        epoch = self.progress.epoch
        self.batches.start_epoch(epoch, self.progress.batch)
        # By score, too, hard attention trains with the expected context: it writes with it.
        soft = epoch < self.config.training.soft_epochs or self.progress.likely_epochs >= 0
        self.model.train_as_soft(soft)
        if len(self.batches):  # 0 when the run stopped between its last batch and scoring dev
            self.model.reset_metrics()
            with bar(f"Epoch {epoch + 1}/{epochs}", self.batches.per_epoch, "batches") as running:
                learn(_Watcher(self, running))
        self._finish_epoch()

    def _learn_likely(self, watcher: "_Watcher") -> None:
        for batch in self.batches.dataset():
            watcher.batch_done(self._step(batch))

    def _step(self, batch: Any) -> dict[str, float]:
        """Learns from a batch; the mean losses of the epoch's batches so far."""
        self.model.make_train_function()
        logs = self.model.train_function(iter([self.team.place(batch)]))
        return {name: float(value) for name, value in logs.items()}

    @property
    def _is_hard(self) -> bool:
        return self.model.decoder.attention_kind == "hard"

    def _out_of_patience(self) -> bool:
        if self._is_hard and self.progress.epoch <= self.config.training.soft_epochs:
            return False
        waited = self.progress.epoch - 1 - self.progress.best_epoch
        return self.progress.best_epoch >= 0 and waited >= self.config.training.patience

    def _finish_epoch(self) -> None:
        """Scores dev, keeps the model if it is the best, writes history and checkpoint."""
        progress, fit = self.progress, self.config.training
        started = time.monotonic()
        with self._published():
            scores = self.score_dev()
        # The same to the last bit in all, who must agree which epoch is the best.
        scores = {name: self.team.chiefs(value) for name, value in scores.items()}
        trained = progress.seconds
        row = {
            "epoch": progress.epoch + 1,
            **progress.losses,
            **scores,
            **self._baseline(),
            "learning_rate": float(self.model.optimizer.learning_rate),
            "captions_per_second": self.batches.number_of_captions() / trained,
            "seconds": trained + time.monotonic() - started,
        }
        # Of no score, every epoch is better than those before.
        value = scores.get(fit.monitor, float(progress.epoch))
        # A model that was trained as if soft is not the hard one that was asked for.
        was_soft = self._is_hard and 0 < progress.epoch == fit.soft_epochs
        best = float("-inf") if was_soft else progress.best
        better = value > best
        self.progress = Progress(
            epoch=progress.epoch + 1,
            batch=0,
            best=value if better else best,
            best_epoch=progress.epoch if better else progress.best_epoch,
            likely_epochs=progress.likely_epochs,
            history=(*progress.history, row),
        )
        if self.team.is_chief:
            if better:
                self._save_model()
            self.save()
            self._report(row)
        self.team.all(0)  # the others may need what was written
        log.info(
            f"Epoch {row['epoch']}: loss {row['loss']:.3f}, "
            f"dev BLEU-4 {100 * scores['bleu_4']:.1f}, "
            f"CIDEr {100 * scores['cider']:.1f} (greedy), "
            f"{'best so far, ' if better else ''}{row['seconds']:.0f} s"
        )

    def _report(self, row: dict[str, float]) -> None:
        """Writes what is to be looked at: table, curves, TensorBoard."""
        _write_history(self.out / "history.csv", self.progress.history)
        save_curves(self.progress.history, self.out / "curves.png")
        with self.log.as_default():
            for name, number in row.items():
                tf.summary.scalar(name, number, step=int(row["epoch"]))
        self.log.flush()

    def _baseline(self) -> dict[str, float]:
        """Of hard attention: the baseline, the mean of its first ten positions."""
        if not self._is_hard:
            return {}
        return {"baseline": float(self.model.baseline.numpy()[:10].mean())}

    @contextlib.contextmanager
    def _published(self) -> Iterator[None]:
        """Inside, the twin has the weights that are scored and saved; it shares the encoder."""
        with self.average.applied() if self.average else contextlib.nullcontext():
            self.twin.take_weights(self.model)
            yield

    def _regions(self, writer: Writer, places: Sequence[Any]) -> Any:
        """Regions of dev photos, from the disk or, if the encoder changes, made now."""
        rows = self.dev_store.read(places)
        return writer.encode(rows) if self.config.training.fine_tune else rows

    def score_dev(self) -> dict[str, float]:
        """BLEU-4 and CIDEr of freely generated dev captions: each photo once, all references."""
        candidates = {}
        places = self.dev_store.locate([example.path for example in self.dev_examples])
        for first in track(
            range(0, len(places), DEV_BATCH), "Scoring dev", -(-len(places) // DEV_BATCH), "batches"
        ):
            regions = self._regions(self.writer, places[first : first + DEV_BATCH])
            for example, best in zip(
                self.dev_examples[first:], self.writer.write(regions, GREEDY), strict=False
            ):
                words = self.twin.vocabulary.decode(best[0].tokens)
                candidates[example.id] = " ".join(words)
        references = {example.id: example.captions for example in self.dev_examples}
        return metrics.fast_scores(candidates, references)

    def _save_model(self) -> None:
        self.twin.about = {
            **self.twin.about,
            "epoch": self.progress.epoch,
            "dev": {
                name: value
                for name, value in (self.progress.history or ({},))[-1].items()
                if name in ("bleu_4", "cider")
            },
        }
        with self._published():
            save_model(self.twin, self.out / RUN_MODEL)

    def save(self) -> None:
        """Writes the checkpoint: weights, optimizer, random state, and where the run stands."""
        arrays = {f"variable_{i}": v.numpy() for i, v in enumerate(self._variables())}
        arrays["progress"] = np.array(json.dumps(dataclasses.asdict(self.progress)))
        arrays["format"] = np.array(CHECKPOINT_FORMAT)
        path = self.out / CHECKPOINT
        with replacing(path) as partial:
            with partial.open("wb") as stream:
                np.savez(stream, **arrays)
            if path.exists():
                path.replace(self.out / PREVIOUS)

    def restore(self) -> None:
        """Goes back to the checkpoint, or to the one before if it is damaged; a run stopped before
        its first one starts anew."""
        self._read_checkpoint()
        stands = self.progress.epoch + self.progress.batch / (1 + self.batches.per_epoch)
        if np.ptp(self.team.all(stands)):
            raise InputError(
                f"{self.out}: the machines found different checkpoints; the run folder must be on "
                "a disk that all of them share"
            )

    def _read_checkpoint(self) -> None:
        paths = [self.out / name for name in (CHECKPOINT, PREVIOUS)]
        found = [path for path in paths if path.is_file()]
        if not found:
            log.info(f"{paths[0]}: no checkpoint yet, starting from the beginning")
            return
        for path in found:
            try:
                # Whole before anything is changed; each array has a checksum, of the zip format.
                with path.open("rb") as stream, np.load(stream) as arrays:
                    values = {name: arrays[name] for name in arrays.files}
                found_format = int(values.pop("format", 1))
                progress = json.loads(str(values.pop("progress")))
                progress["history"] = tuple(progress["history"])
                self.progress = Progress(**progress)
                break
            except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
                reason = " ".join(str(error).split())[:200]
                log.warning(f"{path}: damaged ({reason}), trying the one before")
        else:
            raise InputError(
                f"{found[0]}: damaged, as is every other checkpoint of this run; start a new one, "
                f"with --start-from {self.out} if its {RUN_MODEL} can be used"
            )
        refuse_newer(path, found_format, CHECKPOINT_FORMAT)
        variables = self._variables()
        if [one.shape for one in variables] != [one.shape for one in values.values()]:
            raise InputError(f"{path}: a checkpoint of another model; start a new run")
        for variable, value in zip(variables, values.values(), strict=True):
            variable.assign(value)
        log.info(f"resuming at epoch {self.progress.epoch + 1}, batch {self.progress.batch + 1}")

    def _variables(self) -> list[Any]:
        """All that training changes: weights, dropout's random state, optimizer."""
        model = self.model
        layers = [variable for layer in model.learned for variable in layer.variables]
        if self.config.training.fine_tune:
            layers += model.encoder.trainable_variables
        baseline = [model.baseline] if self._is_hard else []
        localizer = [] if model.localizer is None else model.localizer.variables
        average = self.average.variables if self.average else []
        return [*layers, *baseline, *localizer, *average, *model.optimizer.variables]

    def stop_early(self) -> None:
        """What is kept when the user stops the run."""
        self.save()
        if self.progress.best_epoch < 0:
            self._save_model()
        log.info(f"stopped. {self.out / RUN_MODEL} can be used; --resume goes on from here")

    def write_samples(self) -> None:
        """Captions dev photos with the best model, with maps, for people to look at."""
        writer = Writer(load_model(self.out / RUN_MODEL))
        model = writer.model
        count = min(SAMPLE_PHOTOS, len(self.dev_examples))
        # Spread over dev rather than its first photos, which in sorted data sets resemble.
        chosen = [self.dev_examples[i * len(self.dev_examples) // count] for i in range(count)]
        regions = self._regions(writer, self.dev_store.locate([one.path for one in chosen]))
        geometries = [
            Geometry.of(load_photo(one.path), model.image_size, model.resize) for one in chosen
        ]
        photos = [one.path for one in chosen]
        with working("Captioning samples"):
            captions = writer.captions(
                regions, geometries, photos, SearchConfig(), extras=range(len(photos))
            )
            save_page(
                {self.out.name: [best for best, *_ in captions]},
                self.out / "samples.html",
                title=f"{self.out.name}: dev photos",
                notes=[example.captions for example in chosen],
            )
        log.info(f"samples → {self.out / 'samples.html'}")


class _Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """A rate or schedule while training by likelihood, a constant rate while training by score."""

    def __init__(self, likely: Any, by_score: float, is_by_score: keras.Variable) -> None:
        self._likely, self._by_score, self._is_by_score = likely, by_score, is_by_score

    def __call__(self, step: Any) -> Any:
        likely = self._likely(step) if callable(self._likely) else self._likely
        return keras.ops.where(self._is_by_score, self._by_score, likely)

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError("part of a run: never saved with a model")


class _Watcher:
    """Shows progress within an epoch, keeps count of it, and writes a checkpoint now and then."""

    def __init__(self, run: _Run, running: Bar) -> None:
        self._run, self._bar = run, running
        self._before = run.progress
        self._captions_per_batch = run.batches.number_of_captions() / run.batches.per_epoch
        self._started = self._saved = time.monotonic()
        self._batches = 0
        self._bar.skip(self._before.batch)

    def batch_done(self, logs: dict[str, float]) -> None:
        """Takes note of a batch.

        Args:
            logs: the mean losses of the batches so far.
        """
        self._batches += 1
        if self._run.average:
            self._run.average.update()
        run, before, now = self._run, self._before, time.monotonic()
        done = before.batch + self._batches
        # The means lack the first part of an epoch that was resumed.
        losses = {
            name: (before.batch * before.losses.get(name, 0.0) + self._batches * mean) / done
            for name, mean in logs.items()
        }
        if not math.isfinite(losses["loss"]):
            # Nothing of it is kept: the checkpoint is from before.
            raise InputError(
                f"the loss is {losses['loss']} in epoch {before.epoch + 1}, batch {done}: stopped. "
                f"{run.out} holds what was good; --start-from it, with a lower --learning-rate"
            )
        seconds = now - self._started
        run.progress = dataclasses.replace(
            before, batch=done, losses=losses, seconds=before.seconds + seconds
        )
        rate = self._batches * self._captions_per_batch / seconds
        self._bar.advance(1, f"{rate:.0f} captions/s  loss {losses['loss']:.3f}")
        if run.team.is_chief and now - self._saved > 60 * run.config.training.save_minutes:
            run.save()
            self._saved = now


def _resumed(config: TrainConfig, out: Path) -> TrainConfig:
    """The options of the run in `out`."""
    path = out / "config.json"
    if not path.is_file():
        raise InputError(f"{out}: no run to resume here (no config.json); leave --resume out")
    saved = TrainConfig.from_json(path.read_text(encoding="utf-8"), str(path))
    if config != saved:
        log.info(f"resuming with the options of {path}")
    return saved


def _check_new(out: Path, resume: bool) -> None:
    if not resume and (out / "config.json").exists():
        raise InputError(f"{out}: holds a run already; add --resume, or choose another --out")


def _write_history(path: Path, history: Sequence[dict[str, float]]) -> None:
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in history for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in history:
        writer.writerow(
            {name: value if name == "epoch" else f"{value:.6g}" for name, value in row.items()}
        )
    write_text(path, text.getvalue())
