"""A YAML file: its values, the lines they are in, and a sentence for whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.deploy.file.yaml_file import YamlFile, dotted, read_yaml
from kvtier.errors import ConfigError


def read(tmp_path: Path, text: str | bytes) -> YamlFile:
    path = tmp_path / "deploy.yml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_yaml(path)


def refusal(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    return str(caught.value).removeprefix(f"{tmp_path}/")


def test_every_key_and_value_has_its_line(tmp_path: Path) -> None:
    file = read(tmp_path, "a:\n  - b: 1\n    c:\n      2\n  - {d: 3,\n     e: 4}\nf:\n")

    assert file.value == {"a": [{"b": 1, "c": 2}, {"d": 3, "e": 4}], "f": None}
    assert file.line_of(("a", 0, "b")) == 2
    assert (file.line_of_key(("a", 0, "c")), file.line_of(("a", 0, "c"))) == (3, 4)
    assert file.line_of(("a", 1, "e")) == 6
    assert file.line_of(("f",)) == 7
    assert file.at(("a", 1, "d")) == 3


def test_what_is_not_given_has_the_line_of_what_it_would_be_in(tmp_path: Path) -> None:
    file = read(tmp_path, "a:\n  b:\n    c: 1\n")

    assert not file.has(("a", "b", "x"))
    assert file.line_of(("a", "b", "x", 0)) == 3
    assert file.line_of(("x",)) == 1


def test_scalars_are_what_yaml_makes_of_them_but_dates_stay_text(tmp_path: Path) -> None:
    file = read(tmp_path, "a: yes\nb: 1.5\nc: 2024-01-02\nd: 'yes'\ne: ~\nf: 0x10\n")

    assert file.value == {"a": True, "b": 1.5, "c": "2024-01-02", "d": "yes", "e": None, "f": 16}


def test_anchors_and_merge_keys_work_and_keep_the_lines_of_their_source(tmp_path: Path) -> None:
    file = read(
        tmp_path,
        "one: &one\n  a: 1\n  b: 2\ntwo: &two {b: 3, c: 4}\nx:\n  <<: [*one, *two]\n  a: 9\ny: *one\nz: {<<: *two}\n",
    )

    assert file.value["x"] == {"a": 9, "b": 2, "c": 4}
    assert file.value["y"] == {"a": 1, "b": 2}
    assert file.value["z"] == {"b": 3, "c": 4}
    assert file.line_of(("x", "a")) == 7
    assert file.line_of(("x", "b")) == 3
    assert file.line_of_key(("x", "c")) == 4


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbfa: 1\n").value == {"a": 1}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "deploy.yml:1: the file is empty"),
        ("\n  \n", "deploy.yml:1: the file is empty"),
        ("# only a comment\n", "deploy.yml:1: the file must hold a mapping, with lines such as `models:`"),
        ("\n- a\n", "deploy.yml:2: the file must hold a mapping, with lines such as `models:`"),
        ("---\n~\n", "deploy.yml:2: the file must hold a mapping, with lines such as `models:`"),
        ("a: 1\nb: c: d\n", "deploy.yml:2: not valid YAML: mapping values are not allowed here"),
        ("a:\n\tb: 1\n", "deploy.yml:2: not valid YAML: a tab cannot indent, use spaces"),
        ("a: 1\nb: *nobody\n", "deploy.yml:2: not valid YAML: found undefined alias 'nobody'"),
        ("a: 1\nb: 2\na: 3\n", "deploy.yml:3: a is given twice, first in line 1"),
        ("x:\n  - {b: 2,\n     b: 3}\n", "deploy.yml:3: b is given twice, first in line 2"),
        ("a: 1\n5: 2\n", "deploy.yml:2: a key must be text; for 5 write '5'"),
        ("a: 1\non: 2\n", "deploy.yml:2: a key must be text; for on write 'on'"),
        ("a: 1\n? [b]\n: 2\n", "deploy.yml:2: a key must be text, not a list or a mapping"),
        ("a: &a\n  b: *a\n", "deploy.yml:1: an alias contains itself"),
        ("a: &a [1, *a]\n", "deploy.yml:1: an alias contains itself"),
        ("a: &a\n  <<: *a\n", "deploy.yml:1: an alias contains itself"),
        ("a:\n  <<: 3\n", "deploy.yml:2: << takes a mapping, or a list of them"),
        ("a: 1\nb: !!set {c}\n", "deploy.yml:2: the tag !!set is not allowed here"),
        ("a: !!binary aGk=\n", "deploy.yml:1: the tag !!binary is not allowed here"),
        ("a: !!int many\n", "deploy.yml:1: 'many' does not match its tag"),
        ("a: 1\n---\nb: 2\n", "deploy.yml:2: not valid YAML: but found another document"),
        ("a: 1\nb: \x07\n", "deploy.yml:2: the character '\\x07' is not allowed in YAML"),
        (b"a: 1\nb: \xff\n", "deploy.yml:2: the file is not text in UTF-8"),
        ("a: " + "[" * 5000, "deploy.yml:1: the file is nested too deeply"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence_with_its_line(
    tmp_path: Path, text: str | bytes, sentence: str
) -> None:
    assert refusal(tmp_path, text).startswith(sentence)


def test_a_tag_that_makes_an_object_is_refused(tmp_path: Path) -> None:
    sentence = refusal(tmp_path, "a: 1\nb: !!python/name:os.system\n")

    assert sentence.startswith("deploy.yml:2: not valid YAML: could not determine a constructor")
    assert "\n" not in sentence


def test_aliases_of_aliases_are_bounded(tmp_path: Path) -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 9))

    assert "more than 20000 values" in refusal(tmp_path, f"l0: &l0 [1]\n{levels}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yml cannot be read: No such file or directory"):
        read_yaml(tmp_path / "nowhere.yml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_yaml(tmp_path)


def test_a_file_of_weights_is_not_read_through(tmp_path: Path) -> None:
    assert refusal(tmp_path, b"\0" * (2 << 20)) == "deploy.yml is larger than 1MiB: is it a deployment file?"


def test_places_are_named_as_people_do() -> None:
    assert dotted(("models", 0, "default_options", "stop", 1)) == "models[0].default_options.stop[1]"
    assert dotted(()) == ""
