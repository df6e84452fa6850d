"""Files that are there whole or not at all."""

from pathlib import Path

import pytest

from captioner.errors import InputError
from captioner.files import new_folder, replacing, write_text


def test_written_whole_with_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    write_text(path, "café")
    assert path.read_bytes() == b"caf\xc3\xa9"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        partial.write_text("half")
        assert path.read_text() == "old"
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "below.txt"
    with pytest.raises(InputError, match=r"below\.txt: cannot be written"):
        write_text(path, "x")
    with pytest.raises(InputError, match="cannot be written"):
        write_text(tmp_path, "x")  # a folder


def test_a_new_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with pytest.raises(KeyboardInterrupt), new_folder(path) as partial:
        (partial / "file").write_text("half")
        assert not path.exists()
        raise KeyboardInterrupt
    assert list(path.parent.iterdir()) == []
    for _ in range(2):  # one that is there already may be empty
        path.mkdir(exist_ok=True)
        with new_folder(path) as partial:
            (partial / "file").write_text("whole")
        assert list(path.parent.iterdir()) == [path]
        assert (path / "file").read_text() == "whole"
        (path / "file").unlink()


def test_a_folder_with_something_in_it_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("")
    for path in (tmp_path / "b", tmp_path / "b" / "mine"):
        with pytest.raises(InputError, match="is not empty; give a new"), new_folder(path):
            pass
    with pytest.raises(InputError, match="cannot be written"), new_folder(path / "below"):
        pass
    assert [*tmp_path.rglob("*")] == [tmp_path / "b", tmp_path / "b" / "mine"]
