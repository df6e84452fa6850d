"""Data sets of every layout, written small, and what is said of each thing that can be wrong."""

import csv
import itertools
import json
import os
from pathlib import Path

import pytest

from captioner import photo_index
from captioner.datasets import FORMATS, DataSet, Example, Problem, load
from captioner.errors import InputError


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    """Writes files by their path below a folder; photos may be empty, for nothing decodes them."""
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def photos(*names: str) -> dict[str, str | bytes]:
    return dict.fromkeys(names, b"")


def contents(data: DataSet) -> dict[str, tuple[tuple[str, ...], str | None]]:
    """Captions and split of every photo, by id."""
    return {example.id: (example.captions, example.split) for example in data.examples}


def said(data: DataSet) -> list[tuple[str, int | None, str]]:
    """Every problem as (file name, line, what)."""
    return [(problem.file.name, problem.line, problem.what) for problem in data.problems]


TOKENS = (
    "a.jpg#0\tA dog runs .\n"
    "a.jpg#1\tA dog runs .\n"  # worded alike, yet two captions
    "b.jpg#0\t A cat  sleeps . \n"
    "c.jpg#0\tA cow .\n"
    "d.jpg#0\tA bird .\n"
)
LISTS = {
    "Flickr_8k.trainImages.txt": "a.jpg\n",
    "Flickr_8k.devImages.txt": "b.jpg\n",
    "Flickr_8k.testImages.txt": "c.jpg\n",
}
FOUR = {"a.jpg": "train", "b.jpg": "dev", "c.jpg": "test", "d.jpg": None}


# --- Layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["Images", "Flicker8k_Dataset", "Flickr8k_Dataset/Flicker8k"])
@pytest.mark.parametrize("text_folder", ["", "Flickr8k_text/"])
def test_flickr8k_as_distributed(tmp_path: Path, folder: str, text_folder: str) -> None:
    texts = {"Flickr8k.token.txt": TOKENS, **LISTS}
    write(tmp_path, {text_folder + name: text for name, text in texts.items()})
    write(tmp_path, photos(*(f"{folder}/{name}" for name in FOUR)))

    data = load(tmp_path)

    assert data.format == "flickr8k"
    assert data.root == tmp_path
    assert contents(data) == {
        f"{folder}/a.jpg": (("A dog runs .", "A dog runs ."), "train"),
        f"{folder}/b.jpg": (("A cat  sleeps .",), "dev"),
        f"{folder}/c.jpg": (("A cow .",), "test"),
        f"{folder}/d.jpg": (("A bird .",), None),
    }
    assert data.examples[0].path == tmp_path / folder / "a.jpg"
    assert not data.problems
    assert not data.notes


@pytest.mark.parametrize("with_lists", [False, True])
def test_flickr8k_of_kaggle_takes_the_official_lists_where_they_lie_beside(
    tmp_path: Path, with_lists: bool
) -> None:
    table = 'image,caption\na.jpg,A dog .\nb.jpg,"A cat, black ."\nc.jpg,A "big" cow .\nd.jpg,Ox\n'
    write(tmp_path, {"captions.txt": table, **photos(*(f"Images/{name}" for name in FOUR))})
    if with_lists:
        write(tmp_path, LISTS)

    data = load(tmp_path)

    assert data.format == "flickr8k-kaggle"
    captions = {example.path.name: example.captions[0] for example in data.examples}
    assert captions == {
        "a.jpg": "A dog .",
        "b.jpg": "A cat, black .",
        "c.jpg": 'A "big" cow .',
        "d.jpg": "Ox",
    }
    if with_lists:
        assert {example.path.name: example.split for example in data.examples} == FOUR
    else:
        assert data.splits() == ("train", "dev", "test")
        assert data.notes == ("dev and test drawn by photo, as no splits were given (seed 0)",)


def test_flickr30k_tokens_with_lists_without_suffix(tmp_path: Path) -> None:
    write(tmp_path, {"results_20130124.token": TOKENS, "train.txt": "a\nc\n", "val.txt": "b\n"})
    write(tmp_path, photos(*(f"flickr30k-images/{name}" for name in FOUR)))

    data = load(tmp_path)

    assert data.format == "flickr30k"
    splits = {example.path.name: example.split for example in data.examples}
    assert splits == {"a.jpg": "train", "b.jpg": "dev", "c.jpg": "train", "d.jpg": None}


def test_flickr30k_of_kaggle_and_its_malformed_row(tmp_path: Path) -> None:
    table = (
        "image_name| comment_number| comment\n"
        'a.jpg| 0| "Stop" says a sign .\n'
        'a.jpg| 1| A loose " mark .\n'
        "b.jpg| 4   A dog runs across the grass .\n"
        "b.jpg| 0| A cat .\n"
    )
    write(tmp_path, {"flickr30k_images/results.csv": table})
    write(tmp_path, photos("flickr30k_images/flickr30k_images/a.jpg"))
    write(tmp_path, photos("flickr30k_images/flickr30k_images/b.jpg"))

    data = load(tmp_path)

    assert data.format == "flickr30k"
    assert [example.captions for example in data.examples] == [
        ('"Stop" says a sign .', 'A loose " mark .'),
        ("A cat .",),
    ]
    what = "malformed row: 2 fields where the header names 3; quote text that holds a separator"
    assert said(data) == [("results.csv", 4, what)]
    assert load(tmp_path / "flickr30k_images/results.csv").format == "flickr30k"


def coco(*images: tuple[int, str, list[str]]) -> str:
    annotations = [
        {"id": 100 * key + place, "image_id": key, "caption": caption}
        for key, _, captions in images
        for place, caption in enumerate(captions)
    ]
    entries = [{"id": key, "file_name": name} for key, name, _ in images]
    return json.dumps({"images": entries, "annotations": annotations})


@pytest.mark.parametrize("year", ["", "2014"])
def test_coco_with_files_per_split(tmp_path: Path, year: str) -> None:
    train = coco((2, "2.jpg", ["A dog.", "A dog."]), (3, "3.jpg", [" A cat.\n"]))
    val = coco((5, "5.jpg", ["A cow."]))
    write(
        tmp_path,
        {
            f"annotations/captions_train{year}.json": train,
            f"annotations/captions_val{year}.json": val,
            f"annotations/instances_val{year}.json": "{}",
            **photos(f"train{year}/2.jpg", f"train{year}/3.jpg", f"val{year}/5.jpg"),
        },
    )

    data = load(tmp_path)

    assert data.format == "coco"
    assert contents(data) == {
        f"train{year}/2.jpg": (("A dog.", "A dog."), "train"),
        f"train{year}/3.jpg": (("A cat.",), "train"),
        f"val{year}/5.jpg": (("A cow.",), "dev"),
    }
    only = load(tmp_path / f"annotations/captions_val{year}.json")
    assert contents(only) == {f"val{year}/5.jpg": (("A cow.",), "dev")}
    assert not only.notes


def test_coco_in_one_file_has_its_splits_drawn(tmp_path: Path) -> None:
    document = coco(*((key, f"{key}.jpg", ["A dog."]) for key in range(7)))
    write(tmp_path, {"captions.json": document, **photos(*(f"{key}.jpg" for key in range(7)))})
    data = load(tmp_path)
    assert [len(data.split(name)) for name in ("train", "dev", "test")] == [5, 1, 1]


def test_coco_problems(tmp_path: Path) -> None:
    document = {
        "images": [{"id": 2, "file_name": "2.jpg"}, {"id": 3}, {"id": 5, "file_name": "5.jpg"}],
        "annotations": [
            {"id": 1, "image_id": 2, "caption": "A dog."},
            {"id": 1, "image_id": 2, "caption": "A dog."},
            {"id": 7, "image_id": 11, "caption": "A cat."},
            {"id": 8, "image_id": 2, "bbox": [0, 0, 1, 1]},
            {"id": 9, "image_id": 2, "caption": "half a pair: \ud83d"},
        ],
    }
    write(tmp_path, {"captions.json": json.dumps(document), **photos("2.jpg", "5.jpg")})
    data = load(tmp_path)
    assert contents(data) == {"2.jpg": (("A dog.",), "train")}
    assert said(data) == [
        ("captions.json", None, "malformed entry: images[1] needs id, file_name"),
        ("captions.json", None, "duplicate row: of 2.jpg"),
        (
            "captions.json",
            None,
            "unknown photo: annotations[2].image_id 11 is not in images",
        ),
        ("captions.json", None, "malformed entry: annotations[3] needs image_id, caption"),
        (
            "captions.json",
            None,
            "not UTF-8: the caption 'half a pair: \\ud83d'",
        ),
        ("captions.json", None, "photo without captions: 5.jpg"),
    ]


@pytest.mark.parametrize("name", ["flickr8k", "flickr30k", "coco"])
def test_karpathy(tmp_path: Path, name: str) -> None:
    given = {"2.jpg": "train", "3.jpg": "val", "5.jpg": "test", "7.jpg": "restval"}
    images = [
        {"filename": photo, "split": split, "sentences": [{"raw": f"On {photo}."}, {"raw": "Two"}]}
        for photo, split in given.items()
    ]
    if name == "coco":
        images = [image | {"filepath": "val2014"} for image in images]
    broken = {"filename": "x.jpg", "sentences": [{"tokens": ["a"]}]}
    document = json.dumps({"images": [*images, broken], "dataset": name})
    folder = "val2014" if name == "coco" else "photos"
    write(tmp_path, {f"dataset_{name}.json": document})
    write(tmp_path, photos(*(f"{folder}/{photo}" for photo in given)))
    write(tmp_path, photos(*(f"another/{photo}" for photo in given)))  # ambiguous by bare name

    data = load(tmp_path)

    assert data.format == "karpathy"
    assert contents(data) == {
        f"{folder}/2.jpg": (("On 2.jpg.", "Two"), "train"),
        f"{folder}/3.jpg": (("On 3.jpg.", "Two"), "dev"),
        f"{folder}/5.jpg": (("On 5.jpg.", "Two"), "test"),
        f"{folder}/7.jpg": (("On 7.jpg.", "Two"), "train"),
    }
    what = "malformed entry: images[4] needs filename, sentences[].raw"
    assert said(data) == [(f"dataset_{name}.json", None, what)]


TABLES = {
    "rows.csv": "Photo,Text,Split\na.jpg,One,train\na.jpg,Two,\nb.jpg,Three,VALID\nc.jpg,4,test\n",
    "columns.csv": (
        "split;file name;caption_1;caption 2\n"
        "train;a.jpg;One;Two\ndev;b.jpg;Three;\nTesting;c.jpg;;4\n"
    ),
    "tab.tsv": "set\timage\tsentence\ntrain\ta.jpg\tOne\ntrain\ta.jpg\tTwo\nval\tb.jpg\tThree\n"
    "test\tc.jpg\t4\n",
    "list.csv": 'raw,split,filename\n"[""One"", ""Two""]",train,a.jpg\n'
    '"[""Three""]",val,b.jpg\n"[""4""]",test,c.jpg\n',
    "lines.jsonl": '{"image": "a.jpg", "captions": ["One", "Two"], "split": "train"}\n\n'
    '{"image": "b.jpg", "caption": "Three", "split": "dev"}\n'
    '{"path": "c.jpg", "caption1": "4", "caption2": null, "subset": "test"}\n',
    "captions.txt": "image|caption|split\na.jpg|One|train\na.jpg|Two|train\nb.jpg|Three|dev\n"
    "c.jpg|4|test\n",
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_own_tables(tmp_path: Path, name: str, line_end: str, mark: str) -> None:
    write(tmp_path, {name: mark + TABLES[name].replace("\n", line_end)})
    write(tmp_path, photos("a.jpg", "b.jpg", "c.jpg"))

    data = load(tmp_path / name)

    assert data.format == {".txt": "csv"}.get(Path(name).suffix, Path(name).suffix[1:])
    assert contents(data) == {
        "a.jpg": (("One", "Two"), "train"),
        "b.jpg": (("Three",), "dev"),
        "c.jpg": (("4",), "test"),
    }
    assert not data.problems
    if not name.endswith(".txt"):
        assert load(tmp_path) == data


def test_tables_named_by_split(tmp_path: Path) -> None:
    table = "image,caption\n{}.jpg,A dog\n"
    names = ("train", "val", "test")
    write(tmp_path, {f"{name}.csv": table.format(name) for name in names})
    write(
        tmp_path, {"all.csv": table.format("all"), **photos("all.jpg")}
    )  # told no split: left out
    write(tmp_path, {"prices.csv": "item,price\n", **photos(*(f"{name}.jpg" for name in names))})
    data = load(tmp_path)
    assert {id: split for id, (_, split) in contents(data).items()} == {
        "train.jpg": "train",
        "val.jpg": "dev",
        "test.jpg": "test",
    }


def test_folder_of_photos_with_texts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "2.jpg": b"",
            "2.txt": "A dog.\r\n\r\n  A brown dog. \r\n",
            "deep/er/3.PNG": b"",
            "deep/er/3.txt": b"\xef\xbb\xbfA cat.",
            "5.jpg": b"",
            "7.txt": "no photo",
            "11.txt": "which?",
            "13.jpg": b"",
            "13.txt": " \n",
            ".hidden/17.jpg": b"",
            ".hidden/17.txt": "unseen",
            ".hidden/captions.json": "unseen",
            **photos("11.jpg", "11.png"),
        },
    )
    data = load(tmp_path)
    assert data.format == "folder"
    assert {id: captions for id, (captions, _) in contents(data).items()} == {
        "2.jpg": ("A dog.", "A brown dog."),
        "deep/er/3.PNG": ("A cat.",),
    }
    assert sorted(said(data)) == [
        ("11.txt", None, "ambiguous photo: 11.txt could describe 11.jpg or 11.png"),
        ("13.txt", 1, "empty caption: of 13.jpg"),
        ("5.jpg", None, "photo without captions: there is no 5.txt beside it"),
        ("7.txt", None, "photo missing: there is no photo of that name beside it"),
    ]


def test_folder_takes_splits_from_its_top_folders(tmp_path: Path) -> None:
    for folder in ("train", "val", "Test", "other"):
        write(tmp_path, {f"{folder}/sub/2.jpg": b"", f"{folder}/sub/2.txt": "A dog."})
    assert {id: split for id, (_, split) in contents(load(tmp_path)).items()} == {
        "Test/sub/2.jpg": "test",
        "other/sub/2.jpg": None,
        "train/sub/2.jpg": "train",
        "val/sub/2.jpg": "dev",
    }


def test_a_data_set_may_lie_in_a_hidden_folder_but_its_hidden_files_are_left_out(
    tmp_path: Path,
) -> None:
    table = "image,caption\na.jpg,A dog\n"
    write(tmp_path, {".data/own.csv": table, ".data/.own.csv": table, **photos(".data/a.jpg")})
    (tmp_path / ".data" / "folder.csv").mkdir()
    assert contents(load(tmp_path / ".data")) == {"a.jpg": (("A dog",), "train")}


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path, {"away/2.jpg": b"", "away/2.txt": "A dog."})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "away")
    (tmp_path / "away" / "loop").symlink_to(tmp_path / "data")
    write(tmp_path, {"away/3.txt": "A cat."})
    (tmp_path / "away" / "3.jpg").symlink_to(tmp_path / "gone.jpg")
    data = load(tmp_path / "data")
    assert list(contents(data)) == ["linked/2.jpg"]
    assert [problem.kind for problem in data.problems] == ["photo missing"]


# --- Which layout, and where the photos are ------------------------------------------------------


def test_layouts_are_looked_for_in_the_documented_order(tmp_path: Path) -> None:
    karpathy = {"images": [{"filename": "a.jpg", "split": "train", "sentences": [{"raw": "A"}]}]}
    files: dict[str, str | bytes] = {
        "Flickr8k.token.txt": "a.jpg#0\tA\n",
        "dataset_coco.json": json.dumps(karpathy),
        "results_20130124.token": "a.jpg#0\tA\n",
        "captions.txt": "image,caption\na.jpg,A\n",
        "captions.json": coco((2, "a.jpg", ["A"])),
        "own.csv": "image,caption\na.jpg,A\n",
        "own.tsv": "image\tcaption\na.jpg\tA\n",
        "own.jsonl": '{"image": "a.jpg", "caption": "A"}\n',
        "a.txt": "A\n",
    }
    assert len(files) == len(FORMATS)
    write(tmp_path, {**files, **photos("a.jpg")})
    for name, file in zip(FORMATS, files, strict=True):
        assert load(tmp_path, format=name).format == name  # forced, though others come before
        assert load(tmp_path).format == name  # the first of those that are left
        if name != "folder":
            assert load(tmp_path / file).format == name
        (tmp_path / file).unlink()


def test_captions_and_photos_in_different_places(tmp_path: Path) -> None:
    write(tmp_path, {"texts/own.csv": "image,caption\nx/a.jpg,A\n", **photos("pictures/x/a.jpg")})
    by_file = load(tmp_path / "texts/own.csv", images=tmp_path / "pictures")
    by_folder = load(tmp_path / "texts", images=tmp_path / "pictures")
    assert by_file.examples == by_folder.examples
    assert by_file.examples == (Example("x/a.jpg", tmp_path / "pictures/x/a.jpg", ("A",), "train"),)


@pytest.mark.parametrize(
    ("written", "there"),
    [
        ("x/a.jpg", "x/a.jpg"),
        ("./x/../x/a.jpg", "x/a.jpg"),
        ("x\\a.jpg", "x/a.jpg"),
        ("/home/someone/x/a.jpg", "y/a.jpg"),
        ("C:\\photos\\a.jpg", "y/a.jpg"),
        ("A.JPG", "y/a.jpg"),
        ("a", "y/a.jpg"),
    ],
)
def test_how_a_photo_is_found(tmp_path: Path, written: str, there: str) -> None:
    write(tmp_path, {"own.csv": f"image,caption\n{written},A\n", **photos(there)})
    assert [example.id for example in load(tmp_path).examples] == [there]


def test_a_path_comes_before_other_photos_of_that_name(tmp_path: Path) -> None:
    write(tmp_path, {"own.csv": "image,caption\na.jpg,A\nA.jpg,B\nsmall\\b.jpg,C\n"})
    write(tmp_path, photos("Images/a.jpg", "Images/A.jpg", "small/a.jpg", "small/b.jpg", "x/b.jpg"))
    found = [example.id for example in load(tmp_path).examples]
    assert found == ["Images/a.jpg", "Images/A.jpg", "small/b.jpg"]


def test_a_photo_named_in_two_ways_appears_once(tmp_path: Path) -> None:
    write(tmp_path, {"own.csv": "image,caption\na.jpg,A\n./a.jpg,B\n", **photos("a.jpg")})
    assert [example.captions for example in load(tmp_path).examples] == [("A", "B")]


def test_captions_never_go_to_another_photo_of_the_same_name(tmp_path: Path) -> None:
    rows = ["cats/1.jpg,A cat", "dogs/1.jpg,A dog", "old/2.jpg,A", "new/2.jpg,B", "3.jpg,C"]
    rows += ["Five.jpg,D", "fivE.jpg,E"]
    write(tmp_path, {"own.csv": "image,caption\n" + "\n".join(rows)})
    write(tmp_path, photos("dogs/1.jpg", "here/2.jpg", "x/3.jpg", "y/3.jpg", "here/five.jpg"))
    data = load(tmp_path)
    assert [example.captions for example in data.examples] == [("A dog",), ("D",)]
    could_be = f"{tmp_path / 'x/3.jpg'} or {tmp_path / 'y/3.jpg'}"
    assert said(data) == [
        ("own.csv", 2, "photo missing: cats/1.jpg"),
        ("own.csv", 4, "photo missing: old/2.jpg"),
        ("own.csv", 5, "photo missing: new/2.jpg"),
        ("own.csv", 6, f"ambiguous photo: 3.jpg could be {could_be}"),
        ("own.csv", 8, "photo missing: fivE.jpg"),
    ]


def test_every_folder_is_listed_once_whatever_the_number_of_captions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number}.jpg" for number in range(101)]
    lines = [f"{name}#{number}\tA\n" for name in names for number in range(5)]
    write(tmp_path, {"Flickr8k.token.txt": "".join(lines)})
    write(tmp_path, photos(*(f"Images/{name}" for name in names)))
    listed: list[str] = []
    asked: list[str] = []
    list_folder, stat = photo_index.list_folder, os.stat

    def counted_list_folder(folder: str) -> tuple[list[str], list[str]]:
        listed.append(folder)
        return list_folder(folder)

    def counted_stat(path: str, **options: bool) -> os.stat_result:
        asked.append(path)
        return stat(path, **options)

    monkeypatch.setattr(photo_index, "list_folder", counted_list_folder)
    monkeypatch.setattr(os, "stat", counted_stat)
    assert len(load(tmp_path).examples) == 101
    assert sorted(listed) == [str(tmp_path), str(tmp_path / "Images")]
    assert len(asked) < 20


# --- What is wrong with single lines -------------------------------------------------------------


def test_problems_of_token_lines(tmp_path: Path) -> None:
    lines = [
        b"a.jpg#0\tA dog",
        b"a.jpg#0\tA dog",
        b"a.jpg A dog",
        b"a.jpg#1\t ",
        b"a.jpg#2\tcaf\xe9",
        b"gone.jpg#0\tA cat",
        b"notes.md#0\tA text",
        b"caf\xe9.jpg#0\tA cup",
        b"",
        "b.jpg#0\tline\u2028separator".encode(),
    ]
    write(tmp_path, {"Flickr8k.token.txt": b"\n".join(lines), "notes.md": "", **LISTS})
    write(tmp_path, photos("a.jpg", "b.jpg"))
    write(tmp_path, {"Flickr_8k.trainImages.txt": "a.jpg\ngone.jpg\n\nnever.jpg\n"})
    write(tmp_path, {"Flickr_8k.testImages.txt": "a.jpg\n"})

    data = load(tmp_path)

    assert contents(data) == {
        "a.jpg": (("A dog",), "test"),
        "b.jpg": (("line\u2028separator",), "dev"),
    }
    assert said(data) == [
        ("Flickr8k.token.txt", 2, "duplicate row: of a.jpg"),
        ("Flickr8k.token.txt", 3, "malformed row: 'a.jpg A dog' is not NAME#NUMBER<TAB>CAPTION"),
        ("Flickr8k.token.txt", 4, "empty caption: of a.jpg"),
        ("Flickr8k.token.txt", 5, "not UTF-8: the caption 'caf\\udce9'"),
        ("Flickr8k.token.txt", 6, "photo missing: gone.jpg"),
        ("Flickr8k.token.txt", 7, "not a photo: notes.md is of no type that is read"),
        ("Flickr8k.token.txt", 8, "not UTF-8: the name caf\\udce9.jpg"),
        (
            "Flickr_8k.trainImages.txt",
            1,
            "split conflict: a.jpg is already in test, not also in train",
        ),
        (
            "Flickr_8k.trainImages.txt",
            4,
            "unknown photo: never.jpg is in this split but has no caption",
        ),
    ]
    assert all(problem.what.isprintable() for problem in data.problems)


def test_problems_of_table_rows(tmp_path: Path) -> None:
    table = (
        "image,caption,split\n"
        'a.jpg,"two\nlines",train\n'
        "a.jpg,A, dog,train\n"
        "a.jpg\n"
        ",A dog,train\n"
        'a.jpg,"quoted" wrongly,train\n'
        "a.jpg,,train\n"
        "a.jpg,A dog,holdout\n"
        "a.jpg,A cat,test\n"
        'b.jpg,"never closed,dev\n'
        "b.jpg,A cow,dev\n"
    )
    write(tmp_path, {"own.csv": table, **photos("a.jpg", "b.jpg")})

    data = load(tmp_path)

    assert contents(data) == {
        "a.jpg": (("two\nlines", "A cat"), "train"),
        "b.jpg": (("A cow",), "dev"),
    }
    fields = "fields where the header names 3; quote text that holds a separator"
    quotes = "malformed row: a quoted field is not closed, or text follows its end"
    assert said(data) == [
        ("own.csv", 4, f"malformed row: 4 {fields}"),
        ("own.csv", 5, f"malformed row: 1 {fields}"),
        ("own.csv", 6, "malformed row: the photo is '', not a name"),
        ("own.csv", 7, quotes),
        ("own.csv", 8, "empty caption: of a.jpg"),
        ("own.csv", 9, "unknown split: 'holdout'; use train, dev or test"),
        ("own.csv", 10, "split conflict: a.jpg is already in train, not also in test"),
        ("own.csv", 11, quotes),
    ]


def test_problems_of_json_lines(tmp_path: Path) -> None:
    records = [
        '{"image": "a.jpg", "caption": "A dog"}',
        '{"image": "a.jpg", ',
        "[1, 2]",
        '{"image": "a.jpg", "price": 3}',
        '{"image": 5, "caption": "A cat"}',
        '{"image": "a.jpg", "caption": 7}',
        "9" * 5000,  # more digits than Python turns into a number
    ]
    write(tmp_path, {"own.jsonl": "\n".join(records), **photos("a.jpg")})
    data = load(tmp_path)
    assert contents(data) == {"a.jpg": (("A dog",), "train")}
    assert said(data)[:-1] == [
        (
            "own.jsonl",
            2,
            """malformed row: '{"image": "a.jpg", ' is not one JSON object on one line""",
        ),
        ("own.jsonl", 3, "malformed row: '[1, 2]' is not one JSON object on one line"),
        (
            "own.jsonl",
            4,
            "malformed row: no photo and caption among the fields image, price",
        ),
        ("own.jsonl", 5, "malformed row: the photo is '5', not a name"),
        ("own.jsonl", 6, "malformed row: the caption is '7', not text"),
    ]
    assert said(data)[-1][1] == 7


def test_huge_fields_are_read(tmp_path: Path) -> None:
    words = "dog " * 50_000  # 200,000 characters; the csv module's own limit is 131,072
    write(tmp_path, {"own.csv": f'image,caption\na.jpg,"{words}"\n', **photos("a.jpg")})
    limit = csv.field_size_limit()
    assert load(tmp_path).examples[0].captions == (words.strip(),)
    assert csv.field_size_limit() == limit  # others' setting, left as it was


def test_the_same_words_twice_are_a_duplicate_only_without_a_number(tmp_path: Path) -> None:
    write(tmp_path, {"own.csv": "image,caption\na.jpg,A\na.jpg,A\n", **photos("a.jpg")})
    assert said(load(tmp_path)) == [("own.csv", 3, "duplicate row: of a.jpg")]
    table = "image,caption_number,caption\na.jpg,0,A\na.jpg,1,A\n"
    write(tmp_path, {"own.csv": table})
    assert load(tmp_path).examples[0].captions == ("A", "A")


def test_a_caption_may_begin_like_a_json_list(tmp_path: Path) -> None:
    write(tmp_path, {"own.tsv": 'image\tcaption\na.jpg\t"[""Stop""] says a sign"\n'})
    write(tmp_path, photos("a.jpg"))
    assert load(tmp_path).examples[0].captions == ('["Stop"] says a sign',)


# --- Splits --------------------------------------------------------------------------------------


def numbered(root: Path, count: int, *, backwards: bool = False, splits: str = "") -> Path:
    """A table of `count` photos with two captions each; `splits` is a template of their split."""
    order = range(count - 1, -1, -1) if backwards else range(count)
    rows = [f"{i}.jpg,{text},{splits}\n" for i in order for text in ("A dog", "A cat")]
    write(root, {"own.csv": "image,caption,split\n" + "".join(rows)})
    return write(root, photos(*(f"{i}.jpg" for i in range(count))))


def ids(data: DataSet, split: str) -> set[str]:
    return {example.id for example in data.split(split)}


def test_drawn_splits_are_disjoint_complete_and_of_the_asked_size(tmp_path: Path) -> None:
    numbered(tmp_path, 53)
    data = load(tmp_path)
    parts = [ids(data, name) for name in ("train", "dev", "test")]
    assert [len(part) for part in parts] == [43, 5, 5]
    assert set.union(*parts) == {f"{i}.jpg" for i in range(53)}
    assert not any(a & b for a, b in itertools.combinations(parts, 2))
    assert all(len(example.captions) == 2 for example in data.examples)
    sized = load(tmp_path, dev=7, test=0.2)
    assert [len(sized.split(name)) for name in ("train", "dev", "test")] == [35, 7, 11]
    assert load(tmp_path, dev=0, test=0.0).splits() == ("train",)
    assert load(tmp_path, dev=2.0).split("dev") == load(tmp_path, dev=2).split("dev")


def test_the_draw_depends_on_the_seed_not_on_the_order_or_the_folder(tmp_path: Path) -> None:
    data = load(numbered(tmp_path / "a", 53))
    again = load(numbered(tmp_path / "b", 53, backwards=True))
    other = load(tmp_path / "a", seed=1)
    for name in ("train", "dev", "test"):
        assert ids(data, name) == ids(again, name)
        assert ids(data, name) != ids(other, name)


def test_the_draw_is_the_same_in_every_version(tmp_path: Path) -> None:
    # Sorted by SHA-256 of "0/NAME": photos that were trained on must not come back as test.
    data = load(numbered(tmp_path, 11))
    assert (ids(data, "dev"), ids(data, "test")) == ({"2.jpg"}, {"6.jpg"})


def test_the_draw_is_the_same_when_the_folder_of_photos_is_given(tmp_path: Path) -> None:
    rows = "".join(f"{i}.jpg,A\n" for i in range(53))
    write(tmp_path, {"own.csv": "image,caption\n" + rows})
    write(tmp_path, photos(*(f"Images/{i}.jpg" for i in range(53))))
    found, given = load(tmp_path), load(tmp_path, images=tmp_path / "Images")
    assert {f"Images/{id}" for id in ids(given, "test")} == ids(found, "test")


def test_three_photos_are_enough_and_two_are_not(tmp_path: Path) -> None:
    three, two = load(numbered(tmp_path / "3", 3)), load(numbered(tmp_path / "2", 2))
    assert [len(three.split(name)) for name in ("train", "dev", "test")] == [1, 1, 1]
    assert [len(two.split("train"))] == [2]
    assert two.notes == ("too few photos (2) to draw dev and test: all of them are in train",)


def test_dev_is_drawn_from_train_where_only_dev_is_missing(tmp_path: Path) -> None:
    numbered(tmp_path, 23, splits="train")
    with (tmp_path / "own.csv").open("a") as table:
        table.write("t.jpg,A bird,test\nn.jpg,A cow,\n")
    write(tmp_path, photos("t.jpg", "n.jpg"))
    data = load(tmp_path)
    assert [len(data.split(name)) for name in ("train", "dev", "test")] == [21, 2, 1]
    assert ids(data, "test") == {"t.jpg"}
    assert contents(data)["n.jpg"][1] is None
    assert data.notes == ("dev drawn from train, as no dev was given (seed 0)",)


def test_a_test_set_alone_stays_one(tmp_path: Path) -> None:
    data = load(numbered(tmp_path, 7, splits="test"))
    assert data.splits() == ("test",)
    assert len(data.split("test")) == 7


def test_split_takes_usual_names_and_says_what_there_is(tmp_path: Path) -> None:
    data = load(numbered(tmp_path, 23, splits="val"))
    assert data.split("validation") == data.split("dev") == data.examples
    with pytest.raises(InputError) as error:
        data.split("train")
    assert str(error.value) == f"{tmp_path} has no split 'train'; it has dev (23)"


@pytest.mark.parametrize("share", [-1, -0.1, 1.0, 1.5, float("nan"), float("inf")])
def test_a_wrong_share_is_refused_even_where_it_is_not_needed(tmp_path: Path, share: float) -> None:
    numbered(tmp_path, 7, splits="dev")
    with pytest.raises(InputError, match=r"^test is .*: give a share of the photos below 1, or"):
        load(tmp_path, test=share)


def test_shares_that_leave_nothing_to_train_on(tmp_path: Path) -> None:
    numbered(tmp_path, 7)
    with pytest.raises(InputError) as error:
        load(tmp_path, dev=4, test=0.5)
    assert str(error.value) == (
        "4 photos in dev and 4 photos in test leave none of the 7 to train on; draw fewer"
    )


# --- Data sets that cannot be used ---------------------------------------------------------------


def refusal(*arguments: object, **options: object) -> str:
    with pytest.raises(InputError) as error:
        load(*arguments, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_paths_and_options_that_are_wrong(tmp_path: Path) -> None:
    csv = write(tmp_path, {"own.csv": "image,caption\na.jpg,A\n", **photos("a.jpg")}) / "own.csv"
    gone = tmp_path / "gone"
    assert refusal(gone) == f"data set: {gone} does not exist"
    assert refusal(csv, images=gone) == f"--images: {gone} does not exist"
    assert refusal(csv, images=csv) == (
        f"--images: {csv} is a file; give the folder that holds the photos"
    )
    assert refusal(tmp_path, format="voc") == (
        "unknown format 'voc': choose one of flickr8k, karpathy, flickr30k, flickr8k-kaggle, coco, "
        "csv, tsv, jsonl, folder"
    )
    assert refusal(csv, format="folder") == (
        "the format folder reads photos with a .txt beside each: give it one folder, not "
        + str(csv)
    )
    assert refusal(tmp_path / "a.jpg") == (
        f"{tmp_path / 'a.jpg'} is no captions file that can be recognised; force --format "
        "flickr8k, karpathy, flickr30k, flickr8k-kaggle, coco, csv, tsv, jsonl"
    )


def test_a_folder_without_a_data_set(tmp_path: Path) -> None:
    write(tmp_path, photos("a.jpg"))
    assert refusal(tmp_path).startswith(
        f"no data set found in {tmp_path}: it holds none of Flickr8k.token.txt (flickr8k); dataset_"
    )
    assert refusal(tmp_path, format="flickr8k") == (
        f"no data set found in {tmp_path}: it holds none of Flickr8k.token.txt (flickr8k); "
        "give the captions file itself with --data and the folder of photos with --images"
    )


def test_no_photo_is_there(tmp_path: Path) -> None:
    write(tmp_path, {"Flickr8k.token.txt": TOKENS})
    file = tmp_path / "Flickr8k.token.txt"
    assert refusal(tmp_path) == (
        f"no photo of the 4 named in {file} exists under {tmp_path}; "
        "give their folder with --images"
    )


def test_nothing_is_usable(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    write(tmp_path, {"own.csv": "image,caption\na.jpg,\na.jpg, \nb.jpg,B\n", **photos("a.jpg")})
    assert refusal(tmp_path) == (
        f"nothing in {file} is usable: empty caption 2, photo missing 1; "
        f"the first: {file}:2: empty caption: of a.jpg"
    )
    write(tmp_path, {"own.csv": "image,caption\n"})
    assert refusal(tmp_path) == f"{file} holds no captions"


def test_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "broken.json": '{"images": [],\n "annotations": [}\n',
            "deep.json": "[" * 100_000,
            "list.json": '[{"image": "a.jpg", "caption": "A"}]',
            "half.json": '{"images": []}',
            "own.csv": "name,price\na.jpg,3\n",
            "empty.csv": "",
            "wide.tsv": "image\tcaption\n".encode("utf-16"),
        },
    )
    assert refusal(tmp_path / "broken.json") == (
        f"{tmp_path / 'broken.json'}:2: not JSON (Expecting value, column 18); "
        "fetch the file again or mend that line"
    )
    deep = refusal(tmp_path / "deep.json")
    assert deep.startswith(f"{tmp_path / 'deep.json'} is no captions file: its JSON cannot be read")
    assert refusal(tmp_path / "list.json") == (
        f"{tmp_path / 'list.json'} is no captions file: it has no list 'images'; "
        "write a list of records as .jsonl, one a line"
    )
    assert refusal(tmp_path / "half.json") == (
        f"{tmp_path / 'half.json'} is no captions file: it has no list 'annotations'"
    )
    assert refusal(tmp_path / "own.csv") == (
        f"{tmp_path / 'own.csv'}:1: the header 'name,price' names no column of photos and one of "
        "captions; call them image and caption"
    )
    assert refusal(tmp_path / "empty.csv").startswith(
        f"{tmp_path / 'empty.csv'}:1: the header '' names no column"
    )
    assert refusal(tmp_path / "wide.tsv") == f"{tmp_path / 'wide.tsv'} is UTF-16; save it as UTF-8"


def test_files_and_folders_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    csv = write(tmp_path, {"own.csv": "image,caption\na.jpg,A\n", **photos("a.jpg")}) / "own.csv"
    monkeypatch.setattr(photo_index, "list_folder", refuse)
    assert refusal(csv).startswith("no photo of the 1 named in ")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert refusal(csv) == f"{csv} cannot be read: Permission denied"


def test_several_files_for_one_split(tmp_path: Path) -> None:
    for year in ("2014", "2017"):  # the same photos under two names: dev would leak into train
        write(tmp_path, {f"annotations/captions_train{year}.json": coco((2, "2.jpg", ["A"]))})
    assert refusal(tmp_path) == (
        f"{tmp_path} holds several files for the split train: "
        "annotations/captions_train2014.json, annotations/captions_train2017.json; give one of them"
    )


# --- What people read ----------------------------------------------------------------------------


def test_summary(tmp_path: Path) -> None:
    write(tmp_path, {"Flickr8k.token.txt": TOKENS + "e.jpg#0\tA\n" * 3 + "bad\n", **LISTS})
    write(tmp_path, photos(*(f"Images/{name}" for name in FOUR)))
    assert load(tmp_path).summary(shown=2) == (
        f"{tmp_path} (flickr8k): 4 photos, 5 captions\n"
        "photos per split: train 1, dev 1, test 1, in no split 1 (not used)\n"
        "skipped: photo missing 3, malformed row 1\n"
        "  Flickr8k.token.txt:6: photo missing: e.jpg\n"
        "  Flickr8k.token.txt:7: photo missing: e.jpg\n"
        "  and 2 more"
    )


def test_problem_kind() -> None:
    assert Problem(Path("own.csv"), 3, "photo missing: a.jpg").kind == "photo missing"


def test_file_names_that_are_not_utf_8_get_a_printable_id(tmp_path: Path) -> None:
    write(tmp_path, {"caf\udce9.txt": "A cup", "caf\udce9.jpg": b""})
    (example,) = load(tmp_path).examples
    assert example.id == "caf\\udce9.jpg"
    assert example.path.exists()


# --- Real data sets ------------------------------------------------------------------------------


def test_flickr8k_itself(data_root: Path) -> None:
    data = load(data_root / "flickr8k")
    assert data.format == "flickr8k"
    assert [len(data.split(name)) for name in ("train", "dev", "test")] == [6000, 1000, 1000]
    assert sum(example.split is None for example in data.examples) == 91
    assert all(len(example.captions) == 5 for example in data.examples)
    assert said(data) == [
        ("Flickr8k.token.txt", line, f"photo missing: 2258277193_586949ec62.jpg{suffix}")
        for line, suffix in zip(range(6731, 6736), (".1", "", "", "", ""), strict=True)
    ]


def test_coco_extra(data_root: Path) -> None:
    data = load(data_root / "coco_extra")
    assert data.format == "coco"
    assert data.splits() == ("train", "dev")  # no test is drawn from what is given
    assert [len(data.split(name)) for name in data.splits()] == [2297, 536]
    assert all(len(example.captions) >= 5 for example in data.examples)
    assert not data.problems


def test_coco_boxes(data_root: Path) -> None:
    data = load(data_root / "coco_boxes")
    assert data.format == "coco"
    assert len(data.examples) == 258
    assert sum(len(example.captions) for example in data.examples) == 1290
    assert not data.problems
