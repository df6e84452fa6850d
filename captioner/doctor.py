"""What is installed here, and what is missing for what."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf
from PIL import Image

from captioner import __version__, inference, lettering
from captioner.config import ModelConfig
from captioner.encoders import ENCODERS, build_encoder
from captioner.errors import InputError
from captioner.precision import best_precision
from captioner.progress import working

__all__ = ["doctor"]

LIBRARIES = ("tensorflow", "keras", "numpy", "pillow", "pillow-heif")
# Packages that are not needed, and what needs them.
OPTIONAL = {
    "gradio": 'serve; pip install "gradio>=6.31"',
    "pyexiv2": 'caption --alt-text embed; pip install "pyexiv2>=2.15"',
    "jieba": 'train --segmenter jieba; pip install "jieba>=0.42.1"',
    "scikit-image": 'demo; pip install "scikit-image>=0.25"',
}
JAVA_SECONDS = 20

Row = tuple[str, str]
"""What a line is about, and what there is to say."""


def doctor() -> None:
    """Prints what is here and what is missing for what.

    A photo is captioned, and the encoder that training starts with is built.

    Raises:
        InputError: captioning or training does not work.
    """
    for what, found in (*_versions(), *_machine()):
        _print(what, found)
    broken = []
    for what, attempt in (("captioning", _caption), ("training", _build)):
        try:
            with working(f"Trying {what}"):
                found = attempt()
        except InputError as error:
            broken.append(what)
            found = f"does not work: {error}"
        _print(what, found)
    for what, found in _extras():
        _print(what, found)
    if broken:
        raise InputError(f"{' and '.join(broken)} will not work here: see above")


def _print(what: str, found: str) -> None:
    print(f"{what:18} {found}", flush=True)


def _versions() -> Iterator[Row]:
    yield "captioner", f"{__version__}  {Path(__file__).parent}"
    yield "python", f"{platform.python_version()}  {sys.executable}"
    for name in LIBRARIES:
        yield name, importlib.metadata.version(name)


def _machine() -> Iterator[Row]:
    yield "system", platform.platform()
    yield "processors", str(os.cpu_count())
    if hasattr(os, "sysconf"):  # not on Windows
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        yield "memory", f"{pages / 2**30:.1f} GiB"
    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    gpus = [str(one.get("device_name", "unnamed")) for one in details]
    yield "GPU", ", ".join(gpus) or "none; none is needed"
    yield "number type", f"{best_precision()} for training, float32 for captioning"


def _caption() -> str:
    model = inference.load()
    inference.describe(model, Image.new("RGB", (64, 48), "skyblue"), beam=1)
    models = {name: path.stat().st_size for name, path in inference.shipped_models().items()}
    return "works; " + ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in models.items())


def _build() -> str:
    name = ModelConfig().encoder
    build_encoder(name)
    return f"works; encoder {name}"


def _extras() -> Iterator[Row]:
    for name, spec in ENCODERS.items():
        package = getattr(spec, "package", None)
        if package:
            yield name, _installed(package.replace("_", "-"), "this encoder")
    yield "java", _java()
    for script, letters in (("Latin", "Ağéñ"), ("Chinese", "狗在草地上"), ("emoji", "🐶")):
        font, complete = lettering.font_of(letters)
        missing = f"missing: wanted for overlays of captions in {script}; install such a font"
        yield f"{script} font", font if complete else missing
    for name, purpose in OPTIONAL.items():
        yield name, _installed(name, purpose)


def _installed(package: str, purpose: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"missing: wanted for {purpose}"


def _java() -> str:
    if shutil.which("java") is None:
        return "missing: wanted for METEOR and Stanford's tokeniser in evaluate"
    try:
        said = subprocess.run(
            ["java", "-version"], capture_output=True, text=True, timeout=JAVA_SECONDS, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not start: {error}"
    return said.partition("\n")[0]
