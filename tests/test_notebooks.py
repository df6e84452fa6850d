"""The notebooks: what is stored of them can be published, and they run from top to bottom."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

PROJECT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((PROJECT / "notebooks").glob("*.ipynb"))
LARGEST = 600_000  # bytes: pictures included, so that the web shows a notebook at once

# Run after a notebook's last cell: what its text says of its figures.
CLAIMS = {
    "01_attention": """
import numpy as np
# The estimates' mean is the exact gradient within a few standard errors, at every position.
for estimate in (plain, reduced):
    error = estimate.std(axis=0) / np.sqrt(len(estimate))
    assert (np.abs(estimate.mean(axis=0) - exact) < 4.5 * error).all()
assert (plain[:, 0].std(axis=0) > 2 * reduced[:, 0].std(axis=0)).all()
assert twin_accuracy["self-attention"] > 0.95 and twin_accuracy["one card at a time"] < 0.3
assert share_right["attention"].min() > 0.9
assert share_right["fixed context"][-1] < 0.3
""",
    "02_train_and_caption": """
import csv
import numpy as np
with (run / "history.csv").open() as stream:
    history = [{name: float(row[name]) for name in row} for row in csv.DictReader(stream)]
assert history[-1]["word_loss"] < history[0]["word_loss"] / 2
assert history[-1]["cider"] > history[0]["cider"]
np.testing.assert_allclose(first.attention.sum(axis=(1, 2)), 1, rtol=1e-4)
assert scores["exactly_right"] > 0.1
assert len(wrong) == round((1 - scores["exactly_right"]) * len(tests))
""",
    "03_look_inside": """
np.testing.assert_allclose(caption.attention.sum(axis=(1, 2)), 1, rtol=1e-4)
np.testing.assert_allclose(caption.evidence.sum(axis=(1, 2)), 1, rtol=1e-4)
scores = [np.mean([one.score for one in group]) for group in (several, strange)]
assert abs(scores[0] - scores[1]) < 0.5
assert looks["hard"].mean() < looks["soft"].mean() < 81
for report in reports.values():
    kinds = {name: cells["correctness"]["mean"] for name, cells in report["maps"].items()}
    assert kinds["evidence"] > kinds["alpha"] > 1.1 * kinds["uniform"], kinds
""",
}


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def noise(notebook: nbformat.NotebookNode) -> list[str]:
    """Warnings, log lines and errors among the outputs."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [str(one) for one in outputs if one.get("name") == "stderr" or "ename" in one]


def test_every_notebook_has_its_claims_checked() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(CLAIMS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_can_be_published(path: Path) -> None:
    notebook = read(path)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert noise(notebook) == []
    assert path.stat().st_size < LARGEST
    texts = re.sub(r'"image/\w+": "[^"]*"', "", path.read_text(encoding="utf-8"))
    assert re.findall(r"/(?:home|root|work|tmp|usr|Users)/\S*|[A-Z]:\\\\", texts) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_layers_are_the_package_s(path: Path) -> None:
    for cell in code_cells(read(path)):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ClassDef):
                assert not any("Layer" in ast.unparse(base) for base in node.bases), node.name


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path: Path) -> None:
    notebook = read(path)
    claims = nbformat.v4.new_code_cell(CLAIMS[path.stem])
    notebook.cells.append(claims)
    # Run from the project's folder, which makes the package importable even if not installed.
    client = NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(PROJECT)}})
    client.execute()
    assert noise(notebook) == []
    assert claims.execution_count == len(code_cells(notebook))
