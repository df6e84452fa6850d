"""Captioning photos from the command line: `caption`, `demo` and `encoders`."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from captioner import animation, inference, overlay, sidecar, viewer
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
    page: Path | None = None,
    beside: Path | None = None,
    animations: Path | None = None,
    animation_format: str = "gif",
) -> list[Caption]:
    """Captions photos, prints the captions and writes what was asked for.

    A photo that cannot be read is named on stderr and the others are captioned all the same.

    Returns:
        The best caption of every photo that could be read.

    Raises:
        InputError: no photos, no model, or (after all else is done) photos that cannot be read.
    """
    if beside and (not page or _name(beside) == _name(model)):
        raise InputError("--beside takes a second model, for the page of --html FILE: name both")
    found = find_photos(photos)
    writer = Writer(inference.load(model))
    if (overlays or maps or animations) and not writer.model.has_attention:
        raise InputError(f"{model}: {NO_MAPS}; leave --overlay, --animation and --maps out")
    second = Writer(inference.load(beside)) if beside else None
    relatives = [relative for _, relative in found]
    overlay_paths = sidecar.output_paths(relatives, overlays, ".png") if overlays else None
    suffix = f".{animation_format}"
    animation_paths = sidecar.output_paths(relatives, animations, suffix) if animations else None
    map_paths = sidecar.output_paths(relatives, maps, ".npz") if maps else None

    described: list[list[Caption]] = []
    failed = 0
    paths = [path for path, _ in found]
    extras = set(paths) if maps or page or show == "evidence" else set()
    results: Any = describe_files(writer, paths, options, extras=extras)
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
        if animation_paths:
            animation.save(captions[0], animation_paths[number], show=show)
        if map_paths:
            sidecar.save_maps(captions[0], map_paths[number])
    if json_lines:
        sidecar.save_json_lines(described, json_lines)
    best = [captions[0] for captions in described]
    if page and best:
        by_model = {_name(model): best}
        if second and beside:
            by_model[_name(beside)] = _again(second, best, options)
        viewer.save_page(by_model, page, title=f"captioner: {' and '.join(by_model)}")
    written = {
        "overlays": overlays,
        "animations": animations,
        "maps": maps,
        "captions": json_lines,
        "page": page,
    }
    for what, where in written.items():
        if where and described:
            print(f"{what} → {where}", file=sys.stderr)
    if failed:
        raise InputError(f"{failed} of {len(found)} photos could not be captioned (named above)")
    return best


def _name(model: Path | None) -> str:
    """What a page calls a model."""
    return "shipped" if model is None else str(model)


def _again(writer: Writer, captions: Sequence[Caption], options: SearchConfig) -> list[Caption]:
    """Another model's captions of the same photos."""
    photos = [one.photo for one in captions if one.photo]
    found = []
    for _, result in describe_files(writer, photos, options, extras=set(photos)):
        if isinstance(result, InputError):
            raise result
        found.append(result[0])
    return found


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
    caption(photos, None, SearchConfig(), overlays=out, page=page)
    print(f"\nall on one page: {page.resolve()}")


def list_encoders() -> None:
    """Prints the encoders, those that need no download first."""
    for name, spec in sorted(ENCODERS.items(), key=lambda item: item[1].needs_download):
        where = "downloads its weights" if spec.needs_download else "weights installed"
        print(f"{name:22} {spec.image_size:4} px  {where:22} {spec.description}")
