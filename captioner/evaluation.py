"""Scoring a model on a data set: every photo once, freely generated, against all its references."""

import json
import sys
from pathlib import Path
from typing import Any

from captioner import __version__, datasets, inference, metrics, search
from captioner.config import DataConfig, SearchConfig
from captioner.errors import InputError
from captioner.files import write_text
from captioner.inference import Writer, describe_files
from captioner.progress import track

__all__ = ["evaluate"]


def evaluate(
    data: DataConfig,
    split: str,
    model: Path | None,
    options: SearchConfig,
    out: Path | None = None,
) -> dict[str, Any]:
    """Captions a split freely, each photo once, and scores it against all its references.

    Returns:
        The scores, as they are written to `out`.

    Raises:
        InputError: no data set, model or split, or nothing in it that can be read.
    """
    if data.data is None:
        raise InputError("--data PATH is needed: the data set to score on")
    data_set = datasets.load(
        data.data, format=data.format, images=data.images, seed=data.split_seed
    )
    examples = {one.path: one for one in data_set.split(split)[: data.limit]}
    writer = Writer(inference.load(model))
    candidates: dict[str, str] = {}
    results = describe_files(writer, list(examples), options)
    for path, captions in track(results, f"Captioning {split}", len(examples), "photos"):
        if isinstance(captions, InputError):
            print(f"captioner: {captions}", file=sys.stderr)
        else:
            candidates[examples[path].id] = captions[0].text
    if not candidates:
        raise InputError(f"{data.data}: none of the photos of {split} can be read")
    references = {one.id: one.captions for one in examples.values() if one.id in candidates}
    scores = metrics.caption_scores(candidates, references)
    report = {
        **scores,
        "split": split,
        "data": str(data.data),
        "model": str(model) if model else "shipped",
        "search": "sampling" if options.sample else f"beam {options.beam}",
        "length_rule": search.length_rule(options.length_penalty),
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
    return report
