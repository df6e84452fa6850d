"""Small commands: `demo` and `encoders`."""

import importlib.util
from pathlib import Path

from captioner.config import OutputConfig, SearchConfig
from captioner.encoders import ENCODERS
from captioner.errors import InputError
from captioner.job import caption

__all__ = ["demo", "list_encoders"]

SAMPLE_PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")


def demo(out: Path) -> None:
    """Captions scikit-image's sample photos with the shipped model; writes overlays and a page.

    Raises:
        InputError: scikit-image is not installed.
    """
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        raise InputError(
            'the sample photos ship with scikit-image: pip install "scikit-image>=0.25", or '
            "caption your own: captioner caption PHOTO --overlay out/"
        )
    folder = Path(spec.origin).parent / "data"
    page = out / "index.html"
    photos = [folder / name for name in SAMPLE_PHOTOS]
    caption(photos, None, SearchConfig(), OutputConfig(overlay=out, html=page))
    print(f"\nall on one page: {page.resolve()}")


def list_encoders() -> None:
    """Prints the encoders, those that need no download first."""
    for name, spec in sorted(ENCODERS.items(), key=lambda item: item[1].needs_download):
        where = "downloads its weights" if spec.needs_download else "weights installed"
        print(f"{name:22} {spec.image_size:4} px  {where:22} {spec.description}")
