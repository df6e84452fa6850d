"""Tuning how a model writes: beam, length rule and repetitions, on photos it was not trained on."""

import itertools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from captioner import datasets, inference, metrics
from captioner.config import DataConfig, SearchConfig
from captioner.errors import InputError
from captioner.features import BATCH_PHOTOS, load_squares
from captioner.files import write_text
from captioner.inference import Writer
from captioner.model import save_decoding
from captioner.progress import track

__all__ = ["tune"]

log = logging.getLogger(__name__)

TUNED = ("beam", "length_penalty", "no_repeat")  # fields of `SearchConfig`


def tune(
    data: DataConfig,
    split: str,
    model: Path | None,
    beams: Sequence[int],
    length_penalties: Sequence[float],
    no_repeats: Sequence[int],
    monitor: Literal["cider", "bleu_4"] = "cider",
    out: Path | None = None,
) -> dict[str, Any]:
    """Tries all combinations on a split, and saves the best in the model's file.

    Args:
        data: the data set.
        split: what is captioned; never the one that scores are reported on.
        model: a `.keras` file or a run folder, whose file is changed; `None`: the shipped model.
        beams, length_penalties, no_repeats: values to try, as in `SearchConfig`.
        monitor: the score that decides.
        out: file for the table, JSON.

    Returns:
        The best values by their names in `SearchConfig`.

    Raises:
        InputError: no data set, model or split, or nothing in it that can be read.
    """
    if not (beams and length_penalties and no_repeats):
        raise InputError("--beams, --length-penalties and --no-repeats need a value each")
    data_set = datasets.from_options(data, "the data set to tune on")
    path = inference.model_file(model)
    writer = Writer(inference.load(path))
    network = writer.model
    examples = data_set.split(split)[: data.limit]
    by_path = {one.path: one for one in examples}
    ids: list[str] = []
    squares: list[np.ndarray] = []
    regions: list[np.ndarray] = []

    def encode() -> None:
        if squares:
            regions.append(np.asarray(writer.encode(np.stack(squares)), np.float16))
            squares.clear()

    loaded = load_squares(list(by_path), network.image_size, network.resize)
    for photo, square, _ in track(loaded, "Regions", len(by_path), "photos"):
        if isinstance(square, InputError):
            log.warning(square)
            continue
        ids.append(by_path[photo].id)
        squares.append(square)
        if len(squares) == BATCH_PHOTOS:
            encode()
    encode()
    if not ids:
        raise InputError(f"{data.data}: none of the photos of {split} can be read")
    captions = {one.id: one.captions for one in examples}
    references = {number: captions[number] for number in ids}

    rows = []
    combinations = list(itertools.product(beams, length_penalties, no_repeats))
    for beam, length_penalty, no_repeat in track(
        combinations, "Tuning", len(combinations), "searches"
    ):
        options = SearchConfig(beam=beam, length_penalty=length_penalty, no_repeat=no_repeat)
        texts = [
            " ".join(network.vocabulary.decode(best[0].tokens))
            for part in regions
            for best in writer.write(part, options)
        ]
        scores = metrics.fast_scores(dict(zip(ids, texts, strict=True)), references)
        rows.append({**{name: getattr(options, name) for name in TUNED}, **scores})
        print(
            f"beam {beam}, length penalty {length_penalty:g}, no repeat {no_repeat}: "
            f"BLEU-4 {100 * scores['bleu_4']:.1f}, CIDEr {100 * scores['cider']:.1f}",
            flush=True,
        )
    best = max(rows, key=lambda row: row[monitor])
    chosen = {name: best[name] for name in TUNED}
    save_decoding(path, chosen)
    print(f"best {monitor}: {', '.join(f'{k} {v:g}' for k, v in chosen.items())} → {path}")
    if out:
        write_text(
            out, json.dumps({"split": split, "best": chosen, "tried": rows}, indent=2) + "\n"
        )
        log.info(f"table → {out}")
    return chosen
