"""The benchmark: what it counts, and that it runs. What it measures is asserted nowhere."""

import json
from pathlib import Path

import pytest

from captioner import precision
from captioner.__main__ import main
from captioner.bench import LENGTHS, step_flops, table

NAMES = [
    *("machine.float32_gflops", "machine.bfloat16_gflops"),
    *("encode.photos_per_s", "encode.from_jpeg_photos_per_s"),
    "train.soft_additive.captions_per_s",
    "train.soft_scaled_dot.captions_per_s",
    "train.hard_additive.captions_per_s",
    "train.soft_additive.share_of_float32",
    *("caption.greedy.photos_per_s", "caption.beam_3.photos_per_s"),
    *("caption.one_photo.median_ms", "caption.one_photo.p95_ms"),
    *("caption.cold_shell_s", "import_tensorflow_s", "help_s", "caption.load_model_s"),
    *("memory.train_peak_mb", "memory.train_4x_photos_peak_mb", "memory.caption_peak_mb"),
]


@pytest.mark.slow
def test_bench_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", "--out", str(tmp_path / "bench.json")]) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    for name in NAMES:
        least, greatest = report["spread"][name]
        assert 0 < least <= report[name] <= greatest, name
    assert report["quick"] is True
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)
    assert "these figures mean nothing" in printed


def test_operations_of_a_step() -> None:
    """B=2, C=3, T=5, L=7, D=11, H=A=E=13, V=17, counted by hand."""
    sizes = (2, 3, 5, 7, 11, 13, 17)
    lstm = (13 + 11 + 13) * 52  # 1924
    head = 13 * 13 + 11 * 13 + 13 * 17  # 533
    initial = 2 * 11 * 13  # 286
    assert step_flops(*sizes, attention="none") == 2 * (3 * 30 * (lstm + head) + 2 * 2 * initial)
    look = 13 * 13 + 7 * 13 + 13 + 7 * 11  # query, scores, gate, weighted sum
    keys = 7 * 11 * 13
    for score, less in (("additive", 0), ("scaled-dot", 0), ("general", 13 * 13)):
        expected = 2 * (3 * 30 * (lstm + head + look - less) + 2 * 2 * (initial + keys))
        assert step_flops(*sizes, score=score) == expected


def test_lengths_are_those_of_flickr8k(data_root: Path) -> None:
    from captioner import datasets
    from captioner.batches import Batches
    from captioner.config import DataConfig
    from captioner.text import Vocabulary

    class NoFeatures:
        def locate(self, photos: list[Path]) -> list[int]:
            return list(range(len(photos)))

    train = datasets.from_options(DataConfig(data=data_root / "flickr8k"), "x").split("train")
    words = Vocabulary.build((text for one in train for text in one.captions), min_count=5)
    batches = Batches(NoFeatures(), train, words, 32, 24, 1)  # type: ignore[arg-type]
    counts: dict[int, int] = {}
    for batch in batches._order:
        length = int(batches._lengths[batch].max())
        counts[length] = counts.get(length, 0) + 1
    assert dict(sorted(counts.items())) == LENGTHS


def test_table_says_when_figures_mean_nothing() -> None:
    report = {
        "machine.float32_gflops": 290.123, "spread": {"machine.float32_gflops": (280.0, 300.0)},
        "processors": 2, "precision": "float32", "tensorflow": "2.21", "keras": "3.15",
        "quick": True,
    }  # fmt: skip
    lines = table(report).splitlines()
    assert lines[1].split() == ["machine.float32_gflops", "290.1", "280", "..", "300"]
    assert lines[-1].endswith("these figures mean nothing")
    assert "nothing" not in table({**report, "quick": False})


@pytest.mark.parametrize(
    ("float32", "bfloat16", "expected"),
    [(10, 3, "mixed_bfloat16"), (10, 9, "float32"), (3, 10, "float32")],
)
def test_precision_is_the_one_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, float32: float, bfloat16: float, expected: str
) -> None:
    seconds = {"float32": float32, "bfloat16": bfloat16}
    monkeypatch.setattr(precision, "_seconds", lambda dtype: seconds[dtype.name])
    precision.best_precision.cache_clear()
    try:
        assert precision.best_precision() == expected
    finally:
        precision.best_precision.cache_clear()
