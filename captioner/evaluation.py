"""Scoring a model on a data set: every photo once, freely generated, against all its references."""

import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from captioner import __version__, datasets, inference, metrics, scenes, search
from captioner.caption import Caption
from captioner.config import DataConfig, SearchConfig
from captioner.datasets import Example
from captioner.errors import InputError
from captioner.files import write_text
from captioner.inference import Writer, describe_files
from captioner.progress import track, working
from captioner.viewer import save_page

__all__ = ["caption_split", "evaluate"]

PAGE_PHOTOS = 48  # on the page of `html`: some 4 MB, which every browser opens at once

log = logging.getLogger(__name__)


def caption_split(
    examples: Sequence[Example],
    writer: Writer,
    options: SearchConfig,
    shown: Collection[Path] = (),
) -> tuple[dict[str, str], dict[str, Caption]]:
    """The best caption of every photo, by the example's id; unreadable photos are named.

    Returns:
        The texts of all, and, of the photos that are to be shown, the captions with all that
        `describe_files` gives on request.
    """
    by_path = {one.path: one for one in examples}
    results = describe_files(writer, list(by_path), options, extras=shown)
    candidates: dict[str, str] = {}
    whole: dict[str, Caption] = {}
    for path, captions in track(results, "Captioning", len(by_path), "photos"):
        if isinstance(captions, InputError):
            log.warning(captions)
            continue
        candidates[by_path[path].id] = captions[0].text
        if path in shown:
            whole[by_path[path].id] = captions[0]
    return candidates, whole


def evaluate(
    data: DataConfig,
    split: str,
    model: Path | None,
    options: SearchConfig,
    out: Path | None = None,
    page: Path | None = None,
) -> dict[str, Any]:
    """Captions a split freely, each photo once, and scores it against all its references.

    Args:
        data: the data set.
        split: the part of it that is captioned.
        model: a `.keras` file or a run folder; `None` for the shipped model `photo`.
        options: how words are chosen.
        out: file for the scores.
        page: file for a page that shows `PAGE_PHOTOS` of the photos, spread over the split, with
            their CIDEr, the best first: the good and the bad ones as they come.

    Returns:
        The scores, as they are written to `out`; of drawn scenes also `exactly_right`, the share
        whose caption is one of their true wordings.

    Raises:
        InputError: no data set, model or split, or nothing in it that can be read.
    """
    data_set = datasets.from_options(data, "the data set to score on")
    examples = data_set.split(split)[: data.limit]
    writer = Writer(inference.load(model))
    options = options.completed(writer.model.decoding)
    count = min(PAGE_PHOTOS, len(examples)) if page else 0
    shown = {examples[i * len(examples) // count].path for i in range(count)}
    candidates, whole = caption_split(examples, writer, options, shown)
    if not candidates:
        raise InputError(f"{data.data}: none of the photos of {split} can be read")
    references = {one.id: one.captions for one in examples if one.id in candidates}
    with working("Scoring"):
        scores = metrics.caption_scores(candidates, references)
    if (data_set.root / scenes.MARKER).is_file():
        wordings = scenes.read_wordings(data_set.root, examples[0].split or split)
        right = [
            scenes.is_right(candidates[one.id], wordings[one.path.name])
            for one in examples
            if one.id in candidates
        ]
        scores["exactly_right"] = share = sum(right) / len(right)
        print(f"{100 * share:.1f}% of the scenes described exactly right")
    report = {
        **scores,
        "split": split,
        "data": str(data.data),
        "model": str(model or inference.PHOTO),
        "search": "sampling" if options.sample else f"beam {options.beam}",
        "length_rule": search.length_rule(options.length_penalty),
        "no_repeat": options.no_repeat,
        "look": options.look,
        "max_words": options.max_words,
        "unreadable_photos": len(examples) - len(candidates),
        "captioner": __version__,
    }
    if out is None and model is not None and model.is_dir():
        out = model / "scores.json"
    print(metrics.table(scores))
    print(f"{report['search']}; {report['length_rule']}")
    if out:
        write_text(out, json.dumps(report, indent=2) + "\n")
        print(f"scores → {out}")
    if page:
        name = str(model or inference.PHOTO)
        each = metrics.cider_of_each(candidates, references)
        order = sorted(whole, key=lambda photo: -each[photo])
        save_page(
            {name: [whole[photo] for photo in order]},
            page,
            title=f"{name}: {split} of {data.data}, best first",
            notes=[[f"CIDEr {100 * each[one]:.0f}", *references[one]] for one in order],
        )
        log.info(f"page → {page}")
    return report
