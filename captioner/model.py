"""The whole captioner as one Keras model: encoder, decoder, vocabulary and settings in one file."""

import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from keras import ops

from captioner.attention import Positions, SelfAttention
from captioner.decoder import Decoder, DecoderState, Memory
from captioner.distribution import mean_of_replicas, share_of_replica
from captioner.encoders import grid_of, image_size_of
from captioner.errors import InputError, refuse_newer
from captioner.files import replacing
from captioner.localizer import Localizer, teaching_loss
from captioner.reinforce import BASELINE_POSITIONS, rewards, surrogate, updated_baseline
from captioner.text import END, NEVER_WRITTEN, PAD, Vocabulary

__all__ = ["FORMAT", "Captioner", "load_model", "save_decoding", "save_model"]

# Of `.keras` files; to be raised when programs of today would misread those of tomorrow. Files of
# every format so far are in tests/data and must load forever.
FORMAT = 1


@keras.saving.register_keras_serializable("captioner")
class Captioner(keras.Model):
    """Photos to captions: an encoder, a decoder, and what is needed to use them on a new photo.

    Args:
        encoder: a model from `captioner.encoders.build_encoder`; it stays frozen unless
            `train_encoder` is called.
        words: the vocabulary without special tokens, in the order of their ids.
        resize: how photos become the encoder's square: `stretch`, `crop` or `pad`.
        segmenter: how captions are split into words: see `captioner.text.tokenize`.
        units, attention_units, embedding_units, attention, score, word_query, dropout,
            tied, expected_share: as for `captioner.decoder.Decoder`.
        positions: whether regions know where they are: see `captioner.attention.Positions`.
        self_attention: number of self-attention layers over the regions before decoding.
        regularizer: lambda of the doubly stochastic regulariser (eq. 14), on the paper's scale.
        label_smoothing: share of the target probability spread over the vocabulary.
        grounding_weight: lambda_g, weight of the loss that teaches alpha where words are: see
            `captioner.localizer`. Above 0 the model has a localiser, which only training uses.
        reward_weight, entropy_weight, baseline_decay: lambda_r, lambda_e and the baseline's decay
            of hard attention: see `captioner.reinforce`.
        decoding: how it writes best, where that was tuned: fields of `SearchConfig` by name.
        about: facts about the model's making, for people: data set, scores, version.
        format_version: of the file it comes from.

    Call arguments: a dict with
        regions: `(B, L, D)`, or instead photos: `(B, size, size, 3)` RGB 0..255;
        tokens: `(B, C, T)` int: `<start>`, then the words; pads may follow.

    Returns:
        The dict of `Decoder.call`; while training, with the logits of words alone.

    `fit` wants `x = {"regions": …, "tokens": tokens[:, :, :-1]}` and `y = tokens[:, :, 1:]`.
    """

    def __init__(
        self,
        encoder: keras.Model,
        words: list[str],
        resize: str = "stretch",
        segmenter: str = "none",
        units: int = 512,
        attention_units: int = 512,
        embedding_units: int = 512,
        attention: str = "soft",
        score: str = "additive",
        word_query: bool = False,
        tied: bool = False,
        dropout: float = 0.5,
        positions: bool = False,
        self_attention: int = 0,
        regularizer: float = 1.0,
        label_smoothing: float = 0.0,
        expected_share: float = 0.5,
        reward_weight: float = 1.0,
        entropy_weight: float = 0.02,
        baseline_decay: float = 0.9,
        grounding_weight: float = 0.0,
        decoding: dict[str, Any] | None = None,
        about: dict[str, Any] | None = None,
        format_version: int = FORMAT,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if format_version > FORMAT:
            raise ValueError(f"format {format_version} is newer than {FORMAT}, which this is for")
        encoder.trainable = False
        self.encoder = encoder
        self.vocabulary = Vocabulary(words, segmenter)
        self.resize = resize
        self.regularizer = regularizer
        self.label_smoothing = label_smoothing
        self.reward_weight = reward_weight
        self.entropy_weight = entropy_weight
        self.baseline_decay = baseline_decay
        self.grounding_weight = grounding_weight
        self.decoding = dict(decoding or {})
        self.about = dict(about or {})
        self.positions: Any = None
        if positions:
            self.positions = Positions(grid_of(encoder), dtype=self.dtype_policy, name="positions")
        self.region_layers = [
            SelfAttention(dtype=self.dtype_policy, name=f"self_attention_{number}")
            for number in range(self_attention)
        ]
        self.decoder = Decoder(
            len(self.vocabulary),
            units,
            attention_units,
            embedding_units,
            attention,
            score,
            dropout,
            expected_share,
            word_query,
            tied,
            dtype=self.dtype_policy,
            name="decoder",
        )
        self.localizer: Any = None
        if grounding_weight and attention != "none":
            self.localizer = Localizer(
                len(self.vocabulary), dtype=self.dtype_policy, name="localizer"
            )
            self.teaching_metric = keras.metrics.Mean(name="teaching_loss")
        self.word_loss = keras.metrics.Mean(name="word_loss")
        self.build()

    @property
    def grid(self) -> tuple[int, int]:
        """`(gh, gw)`: rows and columns of the regions."""
        return grid_of(self.encoder)

    @property
    def image_size(self) -> int:
        """Side in pixels of the square that the encoder takes."""
        return image_size_of(self.encoder)

    @property
    def has_attention(self) -> bool:
        return self.decoder.attention is not None

    def build(self, input_shape: Any = None) -> None:
        """Makes the decoder's weights; the encoder alone decides their shapes."""
        if self.decoder.built:
            return
        for layer in self.learned:
            layer.build(self.encoder.output_shape)
        if self.localizer is not None:
            self.localizer.build(self.encoder.output_shape)
        if self.decoder.attention_kind == "hard":
            # A cautious start: what a word costs before anything is learned.
            first = keras.initializers.Constant(-np.log(len(self.vocabulary)))
            self.baseline = self.add_weight(
                shape=(BASELINE_POSITIONS,),
                initializer=first,
                trainable=False,
                aggregation="only_first_replica",  # it is the same in all
                name="baseline",
            )
            # A variable, so that training can change it without compiling anew.
            share = keras.initializers.Constant(self.decoder.expected_share)
            self.expected_share = self.add_weight(
                shape=(),
                initializer=share,
                trainable=False,
                autocast=False,
                name="expected_share",
            )
        self.built = True

    @property
    def learned(self) -> list[keras.layers.Layer]:
        """The layers that captioning needs and training changes: all but the encoder."""
        positions = [] if self.positions is None else [self.positions]
        return [*positions, *self.region_layers, self.decoder]

    def encode(self, photos: Any) -> Any:
        """Regions `(B, L, D)` of photos `(B, size, size, 3)`, RGB 0..255."""
        # training=False always: frozen BatchNorm must use its own statistics, never the batch's.
        return self.encoder(photos, training=False)

    def relate(self, regions: Any, training: bool = False) -> tuple[Any, list[Any]]:
        """Regions `(B, L, D)` as they are decoded, and the maps `(B, heads, L, L)` of
        self-attention, per layer."""
        if self.positions is not None:
            regions = self.positions(regions)
        maps = []
        for layer in self.region_layers:
            regions, scores = layer(regions, training=training, return_scores=True)
            maps.append(scores)
        return regions, maps

    def begin(self, regions: Any, captions: int = 1) -> tuple[Memory, DecoderState]:
        """What search starts from: `Decoder.begin` over related regions."""
        related, _ = self.relate(regions)
        return self.decoder.begin(related, captions)

    def call(self, inputs: dict[str, Any], training: bool = False) -> dict[str, Any]:
        regions, _ = self.relate(ops.cast(self._regions(inputs), self.compute_dtype), training)
        share = self.expected_share if self.decoder.attention_kind == "hard" else None
        tokens, words = inputs["tokens"], None
        if training:  # nothing is learned from what follows an end
            words = ops.logical_and(ops.not_equal(tokens, PAD), ops.not_equal(tokens, END))
        return self.decoder(regions, tokens, training=training, words=words, expected_share=share)

    def train_as_soft(self, soft: bool) -> None:
        """Of hard attention: whether all photos train with the expected context for now."""
        if self.decoder.attention_kind == "hard":
            self.expected_share.assign(1.0 if soft else self.decoder.expected_share)

    def train_encoder(self) -> None:
        """Lets `fit` change the encoder, too, on photos; its normalisation keeps its statistics."""
        self.encoder.trainable = True
        for layer in self.encoder.layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.trainable = False

    def stop_dropout(self) -> None:
        """Lets `fit` learn without dropout from here on."""
        for layer in self._flatten_layers():
            if isinstance(layer, keras.layers.Dropout):
                layer.rate = 0.0
        self.make_train_function(force=True)  # the old one was compiled with it

    def _regions(self, inputs: dict[str, Any]) -> Any:
        return inputs["regions"] if "regions" in inputs else self.encode(inputs["photos"])

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Negative log-likelihood plus the doubly stochastic regulariser (eq. 14), per word.

        Both are summed over captions and divided by the number of words, so that `regularizer`
        weighs them as in the paper, where both are summed over a caption.

        With `sample_weight (B, C)`, captions are not equally likely to be learned: the loss is
        their weighted negative log-likelihood, whose gradient is that of the mean reward if
        captions were sampled and weights are their advantages. The regulariser is left out: its
        gradient, the same at every step, would drown that of rewards, which differ by a tenth or
        two.
        """
        real = ops.cast(ops.not_equal(y, PAD), "float32")  # (B, C, T)
        words = mean_of_replicas(ops.sum(real))  # a replica may have none
        number_of_words = ops.where(words > 0, words, 1.0)
        logits = ops.cast(ops.reshape(y_pred["logits"], (-1, len(self.vocabulary))), "float32")
        if sample_weight is not None:
            # As likely as they were when drawn: among the words that may be written. Nothing would
            # hold down the others, never drawn: in a hundred batches they took nearly all of it.
            banned = ops.any(ops.one_hot(NEVER_WRITTEN, logits.shape[-1], dtype="bool"), axis=0)
            logits = ops.where(banned, -1e9, logits)
        place = y_pred.get("place")
        targets, counted = ops.reshape(y, (-1,)), ops.reshape(real, (-1,))
        if place is not None:  # not quite all of them count: that after a caption's cut does not
            targets, counted = ops.take(targets, place), ops.take(counted, place)
        losses = ops.sparse_categorical_crossentropy(targets, logits, from_logits=True) * counted
        weighted = losses
        if sample_weight is not None:
            each = ops.reshape(sample_weight[..., None] * real, (-1,))
            weighted = losses * (each if place is None else ops.take(each, place))
        loss = ops.sum(weighted) / number_of_words
        likely = ops.sum(losses) / number_of_words
        self.word_loss.update_state(likely, sample_weight=number_of_words)
        by_likelihood = training and sample_weight is None
        if self.label_smoothing and by_likelihood:
            uniform = ops.logsumexp(logits, axis=-1) - ops.mean(logits, axis=-1)
            share = self.label_smoothing
            loss = (1 - share) * loss + share * ops.sum(uniform * counted) / number_of_words
        if by_likelihood and "drawn" in y_pred:
            if place is not None:
                losses = ops.scatter(place[:, None], losses, (ops.size(real),))
            log_likelihood = -ops.reshape(losses, ops.shape(real))
            loss = loss + self._hard_loss(log_likelihood, real, y_pred) / number_of_words
        if self.has_attention and self.regularizer and sample_weight is None:
            # Words after the end look nowhere: only real words count (REFERENCE.md, section 2).
            looked = ops.sum(y_pred["attention"] * real[..., None], axis=2)  # (B, C, L)
            is_caption = ops.max(real, axis=-1)  # 0 for the rows that fill up a batch
            penalty = ops.sum(ops.square(1.0 - looked), axis=-1) * is_caption
            loss = loss + self.regularizer * ops.sum(penalty) / number_of_words
        if training and self.localizer is not None:
            # On the encoder's regions: self-attention would mix what lies where.
            located = self.localizer(self._regions(x), y)
            taught = teaching_loss(located.maps, located.gain, y_pred["attention"], real)
            # It learns from people's captions alone: of sampled ones it only says where words are.
            learned = located.loss if by_likelihood else 0.0 * located.loss
            loss = loss + (self.grounding_weight * taught + learned) / number_of_words
            self.teaching_metric.update_state(taught / number_of_words, number_of_words)
        return share_of_replica(loss)

    def _hard_loss(self, log_likelihood: Any, real: Any, outputs: dict[str, Any]) -> Any:
        """The part of hard attention's gradient that backpropagation does not see."""
        log_likelihood, drawn = ops.stop_gradient(log_likelihood), outputs["drawn"]
        reward = rewards(log_likelihood, real, self.baseline)  # with b as it was before
        self.baseline.assign(
            updated_baseline(
                self.baseline, log_likelihood, real, drawn, self.baseline_decay, mean_of_replicas
            )
        )
        return surrogate(
            reward,
            outputs["log_chosen"],
            outputs["attention"],
            real,
            drawn,
            self.reward_weight,
            self.entropy_weight,
        )

    def make_train_function(self, force: bool = False) -> None:
        """As Keras', but compiled once for every shape of batch.

        Keras compiles one function for all shapes; then the number of words is unknown while
        compiling and the decoder's loop cannot be unrolled, the fastest way to run it.
        """
        if getattr(self, "train_function", None) is not None and not force:
            return
        strategy = self.distribute_strategy

        @tf.autograph.experimental.do_not_convert
        def run(batch: Any) -> Any:
            logs = strategy.run(self.train_step, args=(batch,))
            return {
                name: strategy.reduce(tf.distribute.ReduceOp.MEAN, value, axis=None)
                for name, value in logs.items()
            }

        step = (
            run if self.run_eagerly else tf.function(run, reduce_retracing=False, autograph=False)
        )
        self.train_function = lambda batches: step(next(batches))

    def get_config(self) -> dict[str, Any]:
        decoder = self.decoder
        return {
            "name": self.name,
            "dtype": keras.saving.serialize_keras_object(self.dtype_policy),
            "encoder": keras.saving.serialize_keras_object(self.encoder),
            "words": list(self.vocabulary.words[4:]),
            "resize": self.resize,
            "segmenter": self.vocabulary.segmenter,
            "units": decoder.units,
            "attention_units": decoder.attention_units,
            "embedding_units": decoder.embedding_units,
            "attention": decoder.attention_kind,
            "score": decoder.score,
            "word_query": decoder.word_query,
            "tied": decoder.tied,
            "dropout": decoder.dropout,
            "positions": self.positions is not None,
            "self_attention": len(self.region_layers),
            "expected_share": decoder.expected_share,
            "reward_weight": self.reward_weight,
            "entropy_weight": self.entropy_weight,
            "baseline_decay": self.baseline_decay,
            "grounding_weight": self.grounding_weight,
            "regularizer": self.regularizer,
            "label_smoothing": self.label_smoothing,
            "decoding": self.decoding,
            "about": self.about,
            "format_version": FORMAT,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "Captioner":
        config = dict(config)
        for name in ("encoder", "dtype"):
            config[name] = keras.saving.deserialize_keras_object(config[name], custom_objects)
        return cls(**config)

    def in_float32(self) -> "Captioner":
        """A float32 model with this one's weights: what is evaluated, saved and shipped.

        Training may run in mixed precision; captions must not depend on it. The encoder is float32
        in both and is shared. It has no localiser.
        """
        config = self.get_config()
        config.update(dtype="float32", encoder=self.encoder, grounding_weight=0.0)
        twin = Captioner(**config)
        twin.take_weights(self)
        return twin

    def take_weights(self, other: "Captioner") -> None:
        """Copies what was learned from `other`, a model of the same shape.

        The vocabulary may have grown at its end. Of a new word all weights are the mean of those of
        the known words: a stranger is then no likelier than an average word, whatever the state
        (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
        """
        new = len(self.vocabulary) - len(other.vocabulary)
        axes = {id(weight): axis for weight, axis in self.decoder.by_word} if new > 0 else {}
        for mine, theirs in zip(self.learned, other.learned, strict=True):
            for weight, value in zip(mine.weights, theirs.weights, strict=True):
                axis = axes.get(id(weight))
                if axis is not None:
                    known = ops.convert_to_numpy(value)
                    mean = known.mean(axis=axis, keepdims=True)
                    value = np.concatenate([known, np.repeat(mean, new, axis)], axis)
                weight.assign(value)


def save_model(model: Captioner, path: Path, *, half: bool = False) -> None:
    """Writes the model as one `.keras` file, whole or not at all.

    Args:
        model: what to save.
        path: the file; it is replaced in one step, so a reader never sees half of it.
        half: store the weights as float16, half the size; they are float32 again once loaded.
    """
    with replacing(path) as partial, tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / "model.keras"
        model.save(whole)
        (_with_half_weights(whole) if half else whole).replace(partial)


def _with_half_weights(path: Path) -> Path:
    """A copy of a `.keras` file beside it, whose float32 weights are float16."""
    small, weights = path.with_name("half.keras"), path.with_name("weights.h5")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(small, "w") as target:
        for name in source.namelist():
            if not name.endswith(".weights.h5"):
                target.writestr(name, source.read(name), zipfile.ZIP_DEFLATED)
                continue
            with (
                source.open(name) as stream,
                h5py.File(stream, "r") as full,
                h5py.File(weights, "w") as half,
            ):
                full.visititems(lambda key, item, half=half: _copy_half(half, key, item))
            target.write(weights, name)  # stored: float16 weights hardly shrink, and load slower
    return small


def _copy_half(target: h5py.File, key: str, item: h5py.Group | h5py.Dataset) -> None:
    if isinstance(item, h5py.Group):
        copy = target.require_group(key)
    else:
        values = item[()]
        is_float = values.dtype == np.float32
        copy = target.create_dataset(key, data=values.astype(np.float16) if is_float else values)
    for name, value in item.attrs.items():
        copy.attrs[name] = value


def save_decoding(path: Path, decoding: dict[str, Any]) -> None:
    """Writes into a `.keras` file how its model writes best; nothing else of it changes."""
    with (
        replacing(path) as partial,
        zipfile.ZipFile(path) as source,
        zipfile.ZipFile(partial, "w") as target,
    ):
        for member in source.infolist():
            content = source.read(member)
            if member.filename == "config.json":
                config = json.loads(content)
                config["config"]["decoding"] = decoding
                content = json.dumps(config).encode()
            target.writestr(member.filename, content, member.compress_type)


def load_model(path: Path) -> Captioner:
    """Reads a `.keras` file written by `save_model`, in Keras' safe mode.

    Nothing else is needed: no data set, no run folder, no weights package.

    Raises:
        InputError: no such file, not a `.keras` file, not one of this program's, or one of a newer
            version of it.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such model file; train.py writes one, or leave --model out")
    try:
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json"))
        if config.get("registered_name") != "captioner>Captioner":
            raise InputError(
                f"{path}: a Keras model, but no Captioner: use one that train.py wrote"
            )
        refuse_newer(path, config["config"].get("format_version", 1), FORMAT)
        return keras.saving.load_model(path, compile=False, safe_mode=True)
    except InputError:
        raise
    except Exception as error:  # what a damaged or hostile file makes Keras raise may be anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{path}: damaged, or not a .keras model of this version: {reason}"
        ) from error
