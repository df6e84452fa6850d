"""Kinds of attention side by side: one budget, one seed, one table."""

import csv
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from captioner import scenes
from captioner.config import SearchConfig, TrainConfig
from captioner.errors import InputError
from captioner.evaluation import evaluate
from captioner.files import write_text
from captioner.grounding import ground
from captioner.training import train

__all__ = ["KINDS", "compare"]

log = logging.getLogger(__name__)

KINDS: dict[str, dict[str, Any]] = {
    "none": {"attention": "none", "self_attention": 0},
    "soft": {"attention": "soft", "self_attention": 0},
    "hard": {"attention": "hard", "self_attention": 0},
    "soft+self": {"attention": "soft", "self_attention": 1},
}
"""What is compared: a name, and the model options that make it."""
SCORES = ("bleu_1", "bleu_4", "meteor", "cider", "distinct_captions", "exactly_right")


def compare(
    config: TrainConfig,
    out: Path,
    kinds: Sequence[str],
    options: SearchConfig,
    boxes_data: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Trains each kind with the same options and scores it on test.

    A run that is there is resumed, or used when it is finished, so a comparison that was stopped
    goes on where it was, and kinds of an earlier call keep their rows.

    Args:
        config: all options but the kind of attention.
        out: folder of the runs, and of `compare.json` and `compare.md`.
        kinds: names in `KINDS`.
        options: how captions are generated.
        boxes_data: a data set with boxes to measure the maps on, all its photos; `None`: the test
            split of the data itself, if it is a data set of scenes, which have boxes.

    Returns:
        Per kind, those of earlier calls among them, its row of the table.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise InputError(f"--kinds {', '.join(unknown)}: choose among {', '.join(KINDS)}")
    data = config.data.data
    if data is None:
        raise InputError("--data PATH is needed: the data set to train on")
    drawn = data.is_dir() and (data / scenes.MARKER).is_file()
    rows = _earlier(out)
    for kind in kinds:
        log.info(f"\n{kind}")
        run = out / kind
        model = dataclasses.replace(config.model, **KINDS[kind])
        train(dataclasses.replace(config, model=model), run, resume=(run / "config.json").exists())
        scores = evaluate(config.data, "test", run, options)
        row = {name: scores[name] for name in SCORES if name in scores}
        if model.attention != "none" and (boxes_data or drawn):
            source = config.data if boxes_data is None else dataclasses.replace(
                config.data, data=boxes_data, format=None, images=None, limit=None
            )  # fmt: skip
            split = "test" if boxes_data is None else None
            try:
                maps = ground(source, split, run, options)["maps"]
            except InputError as error:  # it names nothing that has a box: a result, not an end
                log.warning(f"{kind}: {error}")
                maps = {}
            for name, measures in maps.items():
                for measure, cell in measures.items():
                    row[f"{name}_{measure}"] = cell["mean"]
        with (run / "history.csv").open(encoding="utf-8") as stream:
            row["minutes"] = sum(float(epoch["seconds"]) for epoch in csv.DictReader(stream)) / 60
        rows = {
            name: row if name == kind else rows[name] for name in KINDS if name in {*rows, kind}
        }
        write_text(out / "compare.json", json.dumps(rows, indent=2) + "\n")
        write_text(out / "compare.md", table(rows))
    print(table(rows))
    print(f"comparison → {out / 'compare.md'}")
    return rows


def _earlier(out: Path) -> dict[str, dict[str, Any]]:
    """The rows of kinds that an earlier call compared."""
    file = out / "compare.json"
    if not file.exists():
        return {}
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        return {kind: dict(row) for kind, row in rows.items() if kind in KINDS}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file}: not the rows of a comparison ({error}); move it away or choose another --out"
        ) from error


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The comparison as a Markdown table, x100 but for counts and minutes."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    plain = ("distinct_captions", "minutes")

    def cell(row: Mapping[str, Any], name: str) -> str:
        value = row.get(name)
        if value is None:
            return ""
        return f"{value:.0f}" if name in plain else f"{100 * value:.1f}"

    lines = [
        "| | " + " | ".join(name.replace("_", " ") for name in names) + " |",
        "| --- |" + " --- |" * len(names),
    ]
    for kind, row in rows.items():
        lines.append(f"| {kind} | " + " | ".join(cell(row, name) for name in names) + " |")
    return "\n".join(lines) + "\n"
