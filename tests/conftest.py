"""Fixtures shared by the tests: where the real data is, and TensorFlow's silence."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets; tests that need it are skipped where it is absent.

    In CI (`CI` set) the data must be there, so its absence is a failure, not a skip.
    """
    root = Path(os.environ.get("CAPTIONER_DATA", PROJECT.parent / "shared" / "data"))
    if not (root / "flickr8k").is_dir():
        reason = f"no real data at {root}: set CAPTIONER_DATA to the folder that holds flickr8k/"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return root


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window, the system's; tests that need it are skipped where it is absent.

    In CI it must be there. One for each module: while it runs it has an event loop of its own,
    which the notebooks' tests would stumble over.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        reason = "no Chromium: apt-get install chromium, to test pages as people use them"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    quiet = ("background-networking", "component-update", "sync", "gpu")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", *(f"--disable-{part}" for part in quiet)],
        )
        yield opened
        opened.close()


@pytest.fixture(autouse=True)
def _own_messages():
    """What `captioner.messages.configure` sets up in a test ends with it."""
    loggers = [logging.getLogger(name) for name in ("captioner", "py.warnings")]
    before = [(one.handlers, one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


def _tiny_encoder():
    import keras

    inputs = keras.Input((24, 24, 3))
    features = keras.layers.Rescaling(1 / 255)(inputs)
    features = keras.layers.Conv2D(7, (12, 8), strides=(12, 8), activation="relu")(features)
    regions = keras.layers.Reshape((6, 7), name="regions")(features)
    return keras.Model(inputs, regions, name="tiny")


@pytest.fixture
def tiny_encoder():
    """An encoder small enough for unit tests: 24 px photos to 2 x 3 regions of 7 channels."""
    return _tiny_encoder()


@pytest.fixture(scope="module")
def module_tiny_encoder():
    """The same, one for all tests of a module: those must not change it."""
    return _tiny_encoder()


@pytest.fixture
def tiny_model(tiny_encoder):
    """A captioner with a different prime for every dimension: V=4+13, H=11, A=5, E=3."""
    import keras

    from captioner.model import Captioner

    keras.utils.set_random_seed(7)
    words = [f"word{number}" for number in range(13)]
    return Captioner(tiny_encoder, words, units=11, attention_units=5, embedding_units=3)
