"""A run's history as a picture: losses, dev scores and, for hard attention, the baseline."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from captioner.files import replacing

__all__ = ["save_curves"]


def save_curves(history: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draws one panel per kind of figure over the epochs.

    Args:
        history: a row per epoch, as in `history.csv`.
        path: the PNG file.
    """
    panels = [
        ("loss per word", {"loss": "all terms", "word_loss": "words alone"}, 1.0),
        ("dev, greedy (x100)", {"bleu_4": "BLEU-4", "cider": "CIDEr"}, 100.0),
    ]
    if any("reward" in row for row in history):
        panels.append(("reward (x100)", {"reward": "CIDEr-D of sampled captions"}, 100.0))
    if "baseline" in history[0]:
        panels.append(("baseline: usual log p of a word", {"baseline": "baseline"}, 1.0))
    # Figure itself, not pyplot: no global state, no window system.
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    epochs = [row["epoch"] for row in history]
    for axes, (title, curves, scale) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name, label in curves.items():
            values = [scale * row.get(name, float("nan")) for row in history]
            axes.plot(epochs, values, marker="o", label=label)
        axes.set_title(title)
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
