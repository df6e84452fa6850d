"""A model for other runtimes: a SavedModel for TensorFlow Serving, LiteRT for phones and scripts.

In both the whole way from photo to caption is one graph, beam search included: the same encoder,
step and search that `inference.Writer` uses, traced once more. Neither needs captioner or Keras.

Outputs, for `B` photos, `T = max_words` and a grid of `gh x gw` regions (a model without attention
has neither maps nor gates); what follows a caption's last word is 0:
    tokens `(B, T)` int32, ids of the words; probabilities `(B, T)`; score `(B,)`;
    attention `(B, T, gh, gw)`, each word's map summing to 1; gate `(B, T)`;
and of a SavedModel: words `(B, T)` strings, "" after the last; text `(B,)`, the caption.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from captioner import __version__, inference
from captioner.config import SearchConfig
from captioner.errors import InputError
from captioner.files import new_folder, replacing, write_text
from captioner.image_graph import decoded, squares
from captioner.images import PAD_COLOUR
from captioner.inference import Writer
from captioner.text import PAD, Vocabulary, joins_next, joins_previous

__all__ = ["export", "write_litert", "write_saved_model"]

LITERT_MODEL, LITERT_FACTS = "captioner.tflite", "captioner.json"


def export(
    model: Path | None, format: str, out: Path, options: SearchConfig, quantize: str = "none"
) -> None:
    """Writes a model for another runtime and prints what was written.

    Args:
        model: as for `inference.load`.
        format: `savedmodel` or `litert`.
        out: for `savedmodel` a new folder, which becomes the model; for `litert` the folder of
            `captioner.tflite` and `captioner.json`.
        options: how words are chosen: beam, length penalty and longest caption are built in.
        quantize: for `litert`: see `write_litert`.

    Raises:
        InputError: no model, an option out of range, or `out` cannot be written.
    """
    if format == "savedmodel" and quantize != "none":
        raise InputError(f"--quantize {quantize}: a SavedModel is float32; leave --quantize out")
    writer = Writer(inference.load(model))
    if format == "savedmodel":
        write_saved_model(writer, out, options)
        files = [file for file in out.rglob("*") if file.is_file()]
    else:
        write_litert(writer, out, options, quantize)
        files = [out / LITERT_MODEL, out / LITERT_FACTS]
    size = sum(file.stat().st_size for file in files)
    print(f"{format}, {size / 1e6:.1f} MB → {out}")


def write_saved_model(writer: Writer, out: Path, options: SearchConfig) -> None:
    """Writes a SavedModel, whole or not at all.

    Its signatures: `caption` (and `serving_default`) takes `image_bytes (B,)`, strings of JPEG or
    PNG files as `captioner.image_graph` reads them; `caption_pixels` takes `pixels (B, height,
    width, 3)`, uint8 RGB, upright, any size.

    Raises:
        InputError: `out` exists and is not empty, or cannot be written; an option out of range.
    """
    model = writer.model

    def described(seen: Any) -> dict[str, Any]:
        outputs = _caption(writer, seen, options, tf.float64)
        return {**outputs, **_in_words(outputs["tokens"], model.vocabulary)}

    def caption(image_bytes: Any) -> dict[str, Any]:
        size = model.image_size
        return described(
            tf.map_fn(
                lambda photo: squares(decoded(photo)[None], size, model.resize)[0],
                image_bytes,
                fn_output_signature=tf.TensorSpec((size, size, 3), tf.uint8),
            )
        )

    def caption_pixels(pixels: Any) -> dict[str, Any]:
        return described(squares(pixels, model.image_size, model.resize))

    by_bytes = _traced(caption, image_bytes=tf.TensorSpec((None,), tf.string))
    signatures = {
        "caption": by_bytes,
        "serving_default": by_bytes,
        "caption_pixels": _traced(
            caption_pixels, pixels=tf.TensorSpec((None, None, None, 3), tf.uint8)
        ),
    }
    with new_folder(out) as partial:
        tf.saved_model.save(_holding_weights(writer), partial, signatures)


def write_litert(writer: Writer, out: Path, options: SearchConfig, quantize: str) -> None:
    """Writes `captioner.tflite`, for one photo at a time, and beside it `captioner.json`.

    The model has one signature, `caption`: `photo (1, size, size, 3)`, the uint8 RGB square that
    the JSON file's `resize` makes of a photo, to the outputs above. All its operations are
    LiteRT's own. The JSON file holds the words by their ids and what a caller must know.

    Args:
        quantize: `none`: float32; `float16`: weights of half the size; `int8`: weights of a
            quarter, products computed in 8 bits with a range found anew for every input.

    Raises:
        InputError: the files cannot be written, an option out of range.
    """
    model = writer.model
    options = options.completed(model.decoding)
    # LiteRT ranks no float64.
    caption = _traced(
        lambda photo: _caption(writer, photo, options, tf.float32),
        photo=tf.TensorSpec((1, model.image_size, model.image_size, 3), tf.uint8),
    )
    converter = tf.lite.TFLiteConverter.from_concrete_functions([caption], _holding_weights(writer))
    converter._experimental_lower_tensor_list_ops = True  # without it the loop needs TensorFlow's
    if quantize != "none":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if quantize == "float16":
        converter.target_spec.supported_types = [tf.float16]
    content = converter.convert()
    facts = {
        "captioner": __version__,
        "quantize": quantize,
        "image_size": model.image_size,
        "resize": model.resize,
        "pad_colour": PAD_COLOUR,
        "normalisation": "none: uint8 RGB 0..255, the encoder's own is in the model",
        "grid": model.grid,
        "attention": model.has_attention,
        "defaults": {
            "beam": options.beam,
            "length_penalty": options.length_penalty,
            "no_repeat": options.no_repeat,
            "max_words": options.max_words,
        },
        "joined_to_the_word_before": [one for one in model.vocabulary.words if joins_previous(one)],
        "joined_to_the_word_after": [one for one in model.vocabulary.words if joins_next(one)],
        "words": model.vocabulary.words,
    }
    with replacing(out / LITERT_MODEL) as partial:
        partial.write_bytes(content)
    write_text(out / LITERT_FACTS, json.dumps(facts, ensure_ascii=False, indent=1) + "\n")


def _caption(writer: Writer, seen: Any, options: SearchConfig, sums: tf.DType) -> dict[str, Any]:
    """The outputs that both formats have, of squares `(B, size, size, 3)`."""
    model = writer.model
    complete = options.completed(model.decoding)
    found = writer.find(complete, model.encode(seen), tf.constant(options.seed), sums)
    length, words = found.lengths[:, 0], options.max_words
    is_word = tf.sequence_mask(length, words)  # (B, T)

    def of_best(values: Any) -> Any:  # (B, N, T, ...) to (B, T, ...)
        values = values[:, 0]
        ones = [1] * (len(values.shape) - 2)
        return tf.where(tf.reshape(is_word, (-1, words, *ones)), values, tf.zeros_like(values))

    probabilities = tf.exp(tf.cast(found.log_probabilities, tf.float32))
    outputs = {
        "tokens": of_best(found.tokens),  # 0 is PAD
        "probabilities": of_best(probabilities),
        "score": tf.cast(found.scores[:, 0], tf.float32),
    }
    if model.has_attention:
        maps = tf.reshape(of_best(found.attention), (-1, words, *model.grid))
        outputs.update(attention=maps, gate=of_best(found.gate))
    return outputs


def _in_words(tokens: Any, vocabulary: Vocabulary) -> dict[str, Any]:
    """Tokens `(B, T)` as strings, and each row as one line of text: `text.join` in a graph."""
    words = ["" if number == PAD else word for number, word in enumerate(vocabulary.words)]
    spaced = [word if joins_previous(word) else f" {word}" for word in words]
    each = tf.gather(tf.constant(words), tokens)
    joined = tf.gather(tf.constant([joins_next(word) for word in words]), tokens[:, :-1])
    joined = tf.pad(joined, [[0, 0], [1, 0]], constant_values=True)
    text = tf.strings.reduce_join(
        tf.where(joined, each, tf.gather(tf.constant(spaced), tokens)), axis=-1
    )
    return {"words": each, "text": tf.strings.strip(text)}


def _traced(function: Callable[..., dict[str, Any]], **inputs: tf.TensorSpec) -> Any:
    """A concrete function whose inputs go by their names."""
    return tf.function(function, autograph=False).get_concrete_function(
        **{name: tf.TensorSpec(spec.shape, spec.dtype, name) for name, spec in inputs.items()}
    )


def _holding_weights(writer: Writer) -> tf.Module:
    """What TensorFlow finds the weights by, and nothing of Keras."""
    module = tf.Module()
    module.weights = [weight.value for weight in writer.model.variables]
    return module
