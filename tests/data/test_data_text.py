import gzip
import hashlib
import lzma
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afterdrop.data import TextSet, Vocabulary, build_text_set, decode_text, encode_text, load
from afterdrop.data.data_files import Expected, read_content
from afterdrop.data.named import ENWIK8, NAMED_TEXTS, NamedText, load_named_text
from afterdrop.data.vocabulary import LAMB_UNKNOWN
from afterdrop.errors import DataError, FileError

WORD = st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1, max_size=5)
WORDS = WORD.filter(lambda word: word != "<eos>" and not any(c.isspace() for c in word))
LINES = st.lists(st.lists(WORDS, max_size=6), min_size=1, max_size=6)
CHARACTERS = st.text(st.characters(codec="utf-8", exclude_characters="\r\ufeff"), min_size=1)


def words_of(lines: list[list[str]]) -> list[str]:
    return [token for line in lines for token in [*line, "<eos>"]]


@given(LINES)
def test_words_come_back_and_are_counted(lines: list[list[str]]):
    tokens = words_of(lines)
    vocabulary = Vocabulary.build(Counter(tokens), "<eos>")
    assert vocabulary.decode(vocabulary.encode(tokens)) == tokens
    assert dict(zip(vocabulary.tokens, vocabulary.counts)) == Counter(tokens)
    assert list(vocabulary.tokens) == sorted(vocabulary.tokens)


@given(LINES.filter(lambda lines: any(lines)))
def test_word_files_come_back_up_to_spaces(lines: list[list[str]]):
    text = "".join(" ".join(line) + " \n" for line in lines)
    vocabulary = Vocabulary.build(Counter(words_of(lines)), "<eos>")
    ids = encode_text(text.encode(), vocabulary, "word")
    assert len(ids) == len(words_of(lines))
    assert decode_text(ids, vocabulary, "word") == text.replace(" \n", "\n")


@given(CHARACTERS)
def test_characters_come_back(text: str):
    vocabulary = Vocabulary.build(Counter(text), "\n")
    decoded = decode_text(encode_text(text.encode(), vocabulary, "char"), vocabulary, "char")
    assert decoded == text if text.endswith("\n") else decoded == text + "\n"


@given(st.binary(min_size=1))
def test_bytes_come_back_with_one_token_each(content: bytes):
    same = {"train": content, "valid": content, "test": content}
    text = build_text_set("bytes", same, "byte")
    assert bytes(ord(token) for token in text.vocabulary.decode(text.train)) == content
    assert not text.has_lines


def test_every_line_ends_in_one_eos_and_blank_lines_count(text_folder: Path):
    text = load(text_folder)
    decoded = text.vocabulary.decode(text.train)
    assert decoded.count("<eos>") == 3
    assert decoded[6:8] == ["<eos>", "<eos>"]
    assert (text.unit, text.train.dtype, text.vocabulary.unknown) == ("word", torch.int32, None)
    train = (text_folder / "train.txt").read_bytes()
    assert text.checksums["train"] == hashlib.sha256(train).hexdigest()
    assert text.split("valid") is text.valid
    with pytest.raises(DataError, match="split='dev' must be one of train, valid, test"):
        text.split("dev")


def test_a_last_line_without_newline_counts_if_it_has_words():
    vocabulary = Vocabulary.build({"a": 1}, "<eos>")
    assert encode_text(b"a\na", vocabulary, "word").tolist() == [1, 0, 1, 0]
    assert encode_text(b"a\n ", vocabulary, "word").tolist() == [1, 0]


def test_byte_order_mark_and_windows_line_ends_are_not_text():
    vocabulary = Vocabulary.build({"a": 1}, "\n")
    assert encode_text(b"\xef\xbb\xbfa\r\na\r\n", vocabulary, "char").tolist() == [1, 0, 1, 0]


def test_rare_words_become_unk_and_keep_their_count(text_folder: Path):
    vocabulary = load(text_folder, min_count=2).vocabulary
    assert vocabulary.tokens == ("<eos>", "<unk>", "be", "to")
    assert vocabulary.counts == (3, 6, 2, 2)


def test_an_unk_of_the_training_text_stands_for_unseen_words(text_folder: Path):
    (text_folder / "train.txt").write_text("to <unk> be\n")
    text = load(text_folder)
    assert text.vocabulary.decode(text.test) == ["<unk>", "to", "be", "<eos>"]


@pytest.mark.parametrize("level, token", [("word", "'nobler'"), ("char", "'l'"), ("byte", "'l'")])
def test_unknown_tokens_name_file_line_and_token(text_folder: Path, level: str, token: str):
    (text_folder / "valid.txt").write_text("to be\nnot nobler\n")
    with pytest.raises(DataError, match=rf"valid\.txt, line 2: {token} does not .*min_count=2"):
        load(text_folder, level=level)
    text = load(text_folder, level=level, min_count=2)
    assert text.vocabulary.unknown_id in text.valid


def test_bad_utf8_names_file_and_offset_and_bytes_still_read(text_folder: Path):
    (text_folder / "test.txt").write_bytes(b"to be\nor \xff not\n")
    with pytest.raises(DataError, match=r"test\.txt is not UTF-8: byte 0xff at byte offset 9 "):
        load(text_folder)
    with pytest.raises(DataError, match=r"test\.txt, line 2: 'ÿ'"):
        load(text_folder, level="byte")


def test_missing_empty_blank_and_truncated_splits(text_folder: Path):
    valid = text_folder / "valid.txt"
    valid.write_text("")
    with pytest.raises(FileError, match=r"valid\.txt is empty"):
        load(text_folder)
    valid.write_text(" \n\n")
    with pytest.raises(DataError, match=r"valid\.txt holds no text at level='word'"):
        load(text_folder)
    valid.unlink()
    with pytest.raises(FileError, match=r"no valid\.txt \(or \.gz, \.xz\) in .*needs train\.txt"):
        load(text_folder)
    (text_folder / "valid.txt.xz").write_bytes(lzma.compress(b"to be\n")[:-9])
    with pytest.raises(FileError, match=r"valid\.txt\.xz is truncated"):
        load(text_folder)


def test_the_reserved_word_is_refused_with_its_line(text_folder: Path):
    (text_folder / "train.txt").write_text("fine\nfine <eos>. \nnot fine <eos>\n")
    with pytest.raises(DataError, match=r"train\.txt, line 3 holds '<eos>'"):
        load(text_folder)


def test_options_out_of_range(text_folder: Path):
    with pytest.raises(DataError, match="level='letter' must be one of word, char, byte"):
        load(text_folder, level="letter")
    with pytest.raises(DataError, match="min_count=0 must be at least 1"):
        load(text_folder, min_count=0)
    with pytest.raises(DataError, match="ptb is fixed, level='char' does not apply"):
        load("ptb", text_folder, level="char")
    with pytest.raises(DataError, match=r"'pdb' is neither a folder nor one of the sets ptb, "):
        load("pdb")


def test_a_vocabulary_that_contradicts_itself_is_refused():
    with pytest.raises(DataError, match="one count per token"):
        Vocabulary(("a", "b"), (1,), "a")
    with pytest.raises(DataError, match="distinct"):
        Vocabulary(("a", "a"), (1, 1), "a")
    with pytest.raises(DataError, match="eos='b' is not among"):
        Vocabulary(("a",), (1,), "b")
    with pytest.raises(DataError, match="needs an unknown token"):
        Vocabulary.build({"a": 1}, "b", min_count=2)
    with pytest.raises(DataError, match=r"token number 7 is not in 0\.\.1"):
        Vocabulary(("a", "b"), (1, 1), "b").decode([7])


def expected(content: bytes) -> Expected:
    return Expected(len(content), f"sha256:{hashlib.sha256(content).hexdigest()}")


def named(contents: dict[str, bytes], tokens: tuple[int, int, int], level="word") -> NamedText:
    files = tuple((name, expected(content)) for name, content in contents.items())
    return NamedText("toy", ("toy",), files, tokens, level=level, unit=level)


def test_named_sets_lie_in_either_folder_and_have_the_dead_class(tmp_path: Path):
    contents = {"a.train": b"x <unk>\n", "a.valid": b"x\n", "a.test": b"y x\n"}
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "a.train.gz").write_bytes(gzip.compress(contents["a.train"]))
    (tmp_path / "a.valid").write_bytes(contents["a.valid"])
    (tmp_path / "toy" / "a.test.xz").write_bytes(lzma.compress(contents["a.test"]))
    text = load_named_text(named(contents, (3, 2, 3)), tmp_path)
    assert text.vocabulary.tokens == ("<UNK>", "<eos>", "<unk>", "x")
    assert text.vocabulary.counts == (0, 1, 1, 1)
    assert text.vocabulary.decode(text.test) == ["<UNK>", "x", "<eos>"]
    with pytest.raises(DataError, match="toy: 3 tokens in train, 4 were published"):
        load_named_text(named(contents, (4, 2, 3)), tmp_path)
    (tmp_path / "a.valid").write_bytes(b"z\n")
    with pytest.raises(FileError, match=r"a\.valid has sha256"):
        load_named_text(named(contents, (3, 2, 3)), tmp_path)


def test_one_file_is_cut_into_three_by_bytes(tmp_path: Path):
    (tmp_path / "all").write_bytes(b"abcab\ncab")
    text = load_named_text(named({"all": b"abcab\ncab"}, (6, 2, 1), "byte"), tmp_path)
    assert [decode_text(text.split(s), text.vocabulary, "byte") for s in ("train", "valid")] == [
        "abcab\n",
        "ca",
    ]
    assert sum(ENWIK8.tokens) == ENWIK8.files[0][1].size


def runs_of_lines(text: TextSet, split: str) -> set[tuple[str, ...]]:
    lines = decode_text(text.split(split), text.vocabulary, text.level).split("\n")
    return {tuple(lines[i : i + 5]) for i in range(len(lines) - 4)}


def test_pydoc_splits_do_not_repeat_are_fixed_and_say_their_python():
    text = load("builtin:pydoc", level="char")
    again = load(text.name, level="char")
    assert torch.equal(text.train, again.train)
    train, valid, test = (runs_of_lines(text, split) for split in ("train", "valid", "test"))
    # `with` and `async with` share some lines of code within paragraphs that differ.
    assert len(valid & train) + len(test & train) < 0.01 * len(valid | test)
    assert 0.06 < len(text.valid) / len(text.train) < 0.2
    assert 0.06 < len(text.test) / len(text.train) < 0.2
    words = load("builtin:pydoc")
    assert words.unit == "word" and len(words.vocabulary) > 1_000
    with pytest.raises(DataError, match=r"builtin:pydoc-2\.7 needs that Python version"):
        load("builtin:pydoc-2.7")


@pytest.mark.parametrize(
    "name, types, unit",
    [("ptb", 10_001, "word"), ("ptb-char", 51, "char"), ("wikitext-2", 33_279, "word")],
)
def test_published_counts(real_data: Path, name: str, types: int, unit: str):
    text = load(name, real_data)  # itself checks checksums and token counts
    assert len(text.vocabulary) == types
    assert text.unit == unit
    assert sum(text.vocabulary.counts) == NAMED_TEXTS[name].tokens[0] == len(text.train)
    counts = torch.tensor(text.vocabulary.counts)
    assert torch.equal(torch.bincount(text.train, minlength=types), counts)
    assert text.vocabulary.counts[text.vocabulary.unknown_id] == 0
    assert text.vocabulary.unknown_id not in torch.cat([text.valid, text.test])


def test_the_head_of_enwik8_as_bytes(real_data: Path):
    content = read_content(real_data / "enwik8-head" / "enwik8-first-4154399-bytes.xz")
    parts = {"train": content[:-400_000], "valid": content[-400_000:], "test": content[:9]}
    text = build_text_set("head", parts, "byte", unknown=LAMB_UNKNOWN)
    assert len(text.train) + len(text.valid) == 4_154_399
    assert 100 < len(text.vocabulary) <= 206
    assert decode_text(text.test, text.vocabulary, "byte") == "<mediawik"
