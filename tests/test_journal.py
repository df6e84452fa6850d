"""What a job has done is known again, whatever moment it was killed at."""

import json
import os
from pathlib import Path

import pytest

from captioner.errors import InputError
from captioner.journal import Journal, Made

DONE = {"photo": "typed", "caption": "a dog", "captions": [{"text": "a dog", "score": -1.5}]}
MADE = Made(3, 5, "abc", {"txt": "out/a.txt"})


def filled(path: Path, *names: str) -> Path:
    with Journal(path) as journal:
        for name in names:
            journal.add(path.parent / "photos" / name, DONE, MADE)
    return path


def test_what_was_done_is_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path / "new" / "done.jsonl", "a.jpg")
    # However the folder is called: from inside it, through a link, or once both were moved.
    moved = tmp_path / "moved"
    path.parent.rename(moved)
    (tmp_path / "link").symlink_to(moved)
    monkeypatch.chdir(moved)
    for folder in (Path(), moved, tmp_path / "link"):
        with Journal(folder / "done.jsonl") as journal:
            assert journal.made(folder / "photos" / "a.jpg") == MADE
            assert journal.made(folder / "photos" / "b.jpg") is None
            assert journal.located("out/a.txt").absolute().resolve() == moved / "out" / "a.txt"
    (record,) = map(json.loads, Path("done.jsonl").read_text().splitlines())
    assert record["photo"] == "photos/a.jpg"
    assert record["caption"] == "a dog"


def test_a_line_is_on_disk_as_soon_as_it_is_added(tmp_path: Path) -> None:
    path = tmp_path / "done.jsonl"
    with Journal(path) as journal:
        journal.add(tmp_path / "a.jpg", DONE, MADE)
        assert path.read_bytes().endswith(b"}\n")


def test_the_later_line_of_a_photo_counts_and_the_earlier_goes(tmp_path: Path) -> None:
    path = filled(tmp_path / "done.jsonl", "a.jpg", "b.jpg")
    with Journal(path) as journal:
        journal.add(tmp_path / "photos" / "a.jpg", {**DONE, "caption": "a cat"}, MADE)
        assert path.read_text().count("\n") == 3
        captions = {record["photo"]: record["caption"] for record in journal}
        assert captions == {"photos/a.jpg": "a cat", "photos/b.jpg": "a dog"}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["caption"] for record in records] == ["a dog", "a cat"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kept", [1, 7, 40, -2])
def test_a_line_cut_short_is_dropped(tmp_path: Path, kept: int) -> None:
    whole = filled(tmp_path / "done.jsonl", "a.jpg").read_bytes()
    path = filled(tmp_path / "done.jsonl", "b.jpg")
    path.write_bytes(whole + path.read_bytes()[len(whole) :][:kept])
    with Journal(path) as journal:
        assert journal.made(tmp_path / "photos" / "a.jpg") == MADE
        assert journal.made(tmp_path / "photos" / "b.jpg") is None
    assert path.read_bytes() == whole


def test_a_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = filled(tmp_path / "done.jsonl", "a.jpg")
    path.write_bytes(path.read_bytes()[:-1])
    filled(path, "b.jpg")
    assert [json.loads(line)["photo"] for line in path.read_text().splitlines()] == [
        *("photos/a.jpg", "photos/b.jpg"),
    ]


@pytest.mark.parametrize(
    "content",
    ['{"photo": "a.jpg", "caption": "mine"}', '{"photo": "a.jpg"}\n', "some notes", "[1, 2]\n"],
)
def test_files_of_others_are_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=r"mine\.jsonl, line 1: not what captioner writes here"):
        Journal(path)
    assert path.read_text() == content


def test_lines_of_earlier_versions_are_read_and_done_again(tmp_path: Path) -> None:
    path = tmp_path / "done.jsonl"
    path.write_text(json.dumps({**DONE, "photo": "a.jpg"}) + "\n")
    with Journal(path) as journal:
        assert journal.made(tmp_path / "a.jpg") is None
        assert [record["photo"] for record in journal] == ["a.jpg"]


def test_names_that_are_no_unicode(tmp_path: Path) -> None:
    photo = tmp_path / os.fsdecode(b"caf\xe9 \xe7\x8b\x97.jpg")
    with Journal(tmp_path / "done.jsonl") as journal:
        journal.add(photo, DONE, MADE)
    assert "狗" not in (tmp_path / "done.jsonl").read_text("ascii", "ignore")
    with Journal(tmp_path / "done.jsonl") as journal:
        assert journal.made(photo) == MADE


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        Journal(tmp_path)
