"""Captioning photos from the command line: `caption`, `demo` and `encoders`."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from captioner import inference, overlay, sidecar
from captioner.caption import Caption
from captioner.config import SearchConfig
from captioner.encoders import ENCODERS
from captioner.errors import InputError
from captioner.images import find_photos
from captioner.inference import Writer, describe_files
from captioner.progress import track

__all__ = ["caption", "demo", "list_encoders"]

NO_MAPS = "this model has no attention: there are no maps to write"


def caption(
    photos: Sequence[Path],
    model: Path | None,
    options: SearchConfig,
    overlays: Path | None = None,
    maps: Path | None = None,
    json_lines: Path | None = None,
    show: str = "alpha",
) -> list[Caption]:
    """Captions photos, prints the captions and writes what was asked for.

    A photo that cannot be read is named on stderr and the others are captioned all the same.

    Returns:
        The best caption of every photo that could be read.

    Raises:
        InputError: no photos, no model, or (after all else is done) photos that cannot be read.
    """
    found = find_photos(photos)
    writer = Writer(inference.load(model))
    if (overlays or maps) and not writer.model.has_attention:
        raise InputError(f"{model}: {NO_MAPS}; leave --overlay and --maps out")
    relatives = [relative for _, relative in found]
    overlay_paths = sidecar.output_paths(relatives, overlays, ".png") if overlays else None
    map_paths = sidecar.output_paths(relatives, maps, ".npz") if maps else None

    described: list[list[Caption]] = []
    failed = 0
    extras = bool(maps) or show == "evidence"
    results: Any = describe_files(writer, [path for path, _ in found], options, extras=extras)
    if len(found) > inference.BATCH_PHOTOS:
        results = track(results, "Captioning", len(found), "photos")
    for number, (path, captions) in enumerate(results):
        if isinstance(captions, InputError):
            failed += 1
            print(f"captioner: {captions}", file=sys.stderr)
            continue
        described.append(captions)
        for one in captions:
            prefix = f"{path}: " if len(found) > 1 else ""
            score = f"  ({one.score:.3f})" if len(captions) > 1 else ""
            print(f"{prefix}{one.text}{score}", flush=True)
        if overlay_paths:
            overlay.save(captions[0], overlay_paths[number], show=show)
        if map_paths:
            sidecar.save_maps(captions[0], map_paths[number])
    if json_lines:
        sidecar.save_json_lines(described, json_lines)
    for what, folder in (("overlays", overlays), ("maps", maps), ("captions", json_lines)):
        if folder and described:
            print(f"{what} → {folder}", file=sys.stderr)
    if failed:
        raise InputError(f"{failed} of {len(found)} photos could not be captioned (named above)")
    return [captions[0] for captions in described]


SAMPLE_PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")


def demo(out: Path) -> None:
    """Captions scikit-image's sample photos with the shipped model and writes their overlays.

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
    captions = caption(
        [folder / name for name in SAMPLE_PHOTOS], None, SearchConfig(), overlays=out
    )
    page = out / "index.html"
    overlay.save_page(captions, page, title="captioner: sample photos")
    print(f"\nall on one page: {page.resolve()}")


def list_encoders() -> None:
    """Prints the encoders, those that need no download first."""
    for name, spec in sorted(ENCODERS.items(), key=lambda item: item[1].needs_download):
        where = "downloads its weights" if spec.needs_download else "weights installed"
        print(f"{name:22} {spec.image_size:4} px  {where:22} {spec.description}")
