"""Files with labels: what is found in folders and tables, the same for every kind of file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradgraph.data.labelled_files import FileKind, is_folder_of, labelled_folder, labelled_table
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.specs import TargetSpec
from gradgraph.errors import DataError

KIND = FileKind("note", (".txt", ".text"))
TARGET = TargetSpec("target", "int64", ("n",), classes=2, ignore_index=-100)


def test_files_are_sorted_within_classes_and_links_to_nothing_are_kept(tmp_path: Path) -> None:
    """Reading such a link names it, where leaving it out would only make the data smaller."""
    for name in ("b/2.txt", "b/1.TEXT", "a/deep/3.txt", "a/other.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a" / "4.txt").symlink_to(tmp_path / "nothing")
    assert is_folder_of(tmp_path, KIND) and not is_folder_of(tmp_path / "none", KIND)
    found = labelled_folder(tmp_path, KIND)
    assert [file.relative_to(tmp_path).as_posix() for file in found.files] == [
        "a/4.txt", "a/deep/3.txt", "b/1.TEXT", "b/2.txt",
    ]  # fmt: skip
    assert found.alone[0] is not None and found.alone[0].tolist() == [0, 0, 1, 1] and found.alone[1] == ["a", "b"]
    (tmp_path / "c").mkdir()
    with pytest.raises(DataError, match=r"the folders 'c' of .* contain no notes \(\.txt, \.text\)"):
        labelled_folder(tmp_path, KIND)


def test_of_several_usual_columns_the_first_by_name_is_the_label() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"file": ["1.txt", "2.txt"], "label": ["x", "y"], "Class": ["p", "q"], "rest": [0.5, None]}
    )
    found = labelled_table(frame, None, None, "notes", KIND)
    assert found.files == [Path("notes/1.txt"), Path("notes/2.txt")]
    assert found.names_for(TARGET, DataNames()).columns == {"target": ("Class",)}
    assert found.names_for(TARGET, DataNames({"target": ["label"]})).classes == {"target": ("x", "y")}
    chosen = labelled_table(frame, "file", "rest", None, KIND)
    with pytest.raises(DataError, match="the column 'rest' of the table lacks 1 of 2 labels"):
        chosen.names_for(TARGET, DataNames())
