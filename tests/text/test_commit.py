from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler_svc.commit import Finish, OutputCommitter, Piece, Published, _StopSearch
from scheduler_svc.text import TextCodec
from tests.text.folders import SHIPPED, byte_tokenizer, write_folder

TINY_CODEC = TextCodec(SHIPPED)
B = 32
# Tokens of several characters, of parts of characters, and of both.
MORE = [
    b"ab",
    b"ba",
    b"abc",
    b"cab",
    "é".encode(),
    b"a\xc3",
    b"\xa9b",
    b"\xe2\x82",
    b"\x82\xac",
    b"\xef\xbf",
    b"c\xf0\x9f",
]
MORE_IDS = {data: 256 + i for i, data in enumerate(MORE)}
SPECIAL = 256 + len(MORE)
STOP_ID = SPECIAL + 1
OTHER_STOP_ID = SPECIAL + 2
ALPHABET = [*b"abc\xc3\xa9\xe2\x82\xac\xef\xbf\xbd", *MORE_IDS.values(), SPECIAL, STOP_ID, OTHER_STOP_ID]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    special = ("<role>", "<|endoftext|>", "<|role_end|>", "<|mask|>")
    return TextCodec(write_folder(tmp_path_factory.mktemp("commit"), tokenizer=byte_tokenizer(MORE, special)))


def make(
    codec: TextCodec,
    *,
    stop_strings: Sequence[str] = (),
    request_stop_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    max_new_tokens: int = 1000,
    model_stop_ids: Sequence[int] = (STOP_ID,),
) -> OutputCommitter:
    return OutputCommitter(
        codec,
        model_stop_ids=model_stop_ids,
        request_stop_ids=request_stop_ids,
        stop_strings=stop_strings,
        ignore_eos=ignore_eos,
        max_new_tokens=max_new_tokens,
    )


# The naive version: everything is decoded again after each token.


def decode(codec: TextCodec, ids: Sequence[int], final: bool) -> str:
    data = b"".join(codec.token_bytes(token_id) for token_id in ids)
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data, final)


def naive_cut(codec: TextCodec, ids: Sequence[int], final: bool, limit: int) -> list[int]:
    """As many ids as end at a border between characters, at or before `limit` characters."""
    whole = decode(codec, ids, final)
    for num in range(len(ids), 0, -1):
        head = decode(codec, ids[:num], True)
        if len(head) <= limit and head + decode(codec, ids[num:], final) == whole:
            return list(ids[:num])
    return []


def naive(
    codec: TextCodec, ids: Sequence[int], stop_strings: Sequence[str], stop_ids: Sequence[int], max_new_tokens: int
) -> tuple[str, list[int], Finish | None]:
    """All that is published once these ids were pushed."""

    def search(text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), len(stop), stop) for stop in stop_strings if stop in text]
        return (min(found)[0], min(found)[2]) if found else None

    for num, token_id in enumerate(ids, start=1):
        if token_id in stop_ids:
            taken, finish = ids[: num - 1], Finish("stop", stop_token_id=token_id)
        else:
            taken, finish = ids[:num], Finish("length")
        final = token_id in stop_ids or num == max_new_tokens
        text = decode(codec, taken, final)
        if (match := search(text)) is not None:
            return text[: match[0]], naive_cut(codec, taken, final, match[0]), Finish("stop", stop_string=match[1])
        if final:
            return text, list(taken), finish

    text = decode(codec, ids, False)
    starts = [at for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in stop_strings)]
    published = naive_cut(codec, ids, False, min(starts, default=len(text)))
    return decode(codec, published, True), published, None


@settings(deadline=None, max_examples=400)
@given(
    ids=st.lists(st.sampled_from(ALPHABET), max_size=24),
    stop_strings=st.lists(st.text("abcé€\ufffd", min_size=1, max_size=4), max_size=3),
    ignore_eos=st.booleans(),
    max_new_tokens=st.integers(1, 30),
    cuts=st.lists(st.integers(0, 24), max_size=6),
)
def test_equal_to_the_naive_version_after_every_block(
    codec: TextCodec,
    ids: list[int],
    stop_strings: list[str],
    ignore_eos: bool,
    max_new_tokens: int,
    cuts: list[int],
) -> None:
    """However the ids are cut into blocks, all that is published so far equals decoding everything and searching it."""
    committer = make(
        codec,
        stop_strings=stop_strings,
        request_stop_ids=[OTHER_STOP_ID],
        ignore_eos=ignore_eos,
        max_new_tokens=max_new_tokens,
    )
    stop_ids = [OTHER_STOP_ID] if ignore_eos else [STOP_ID, OTHER_STOP_ID]
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    text, token_ids = "", list[int]()
    for begin, end in itertools.pairwise(borders):
        published = committer.push(ids[begin:end])
        text += published.text
        token_ids += published.token_ids
        assert (text, token_ids, committer.finish) == naive(codec, ids[:end], stop_strings, stop_ids, max_new_tokens)


@settings(deadline=None, max_examples=300)
@given(stop_string=st.text("ab", min_size=1, max_size=10), text=st.text("ab", max_size=40))
def test_the_search_equals_the_naive_one(stop_string: str, text: str) -> None:
    """For strings that repeat themselves, match and part of a match are those of searching the whole text."""
    search = _StopSearch(stop_string)
    for end, char in enumerate(text, start=1):
        found = search.advance(char)
        assert found == text[:end].endswith(stop_string)
        if found:
            break
        parts = [length for length in range(len(stop_string)) if text[:end].endswith(stop_string[:length])]
        assert search.matched == max(parts)


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 511), max_size=80), stop_strings=st.lists(st.text("ae o1", min_size=1, max_size=3)))
def test_published_text_is_what_the_published_ids_decode_to(ids: list[int], stop_strings: list[str]) -> None:
    """With the shipped tokenizer, at every moment text and ids agree, and no stop string is ever published."""
    committer = make(TINY_CODEC, stop_strings=stop_strings, model_stop_ids=[0, 4])
    text, token_ids = "", list[int]()
    for token_id in ids:
        published = committer.push([token_id])
        text += published.text
        token_ids += published.token_ids
        decoded = decode(TINY_CODEC, token_ids, True)
        if committer.finish is not None and committer.finish.stop_string is not None:
            assert text.startswith(decoded)  # the rest stood in the token in which the stop string began
        else:
            assert text == decoded
        assert not any(stop in text for stop in stop_strings)


# What is shown of a block that is not done.


@settings(deadline=None, max_examples=300)
@given(
    before=st.lists(st.sampled_from(ALPHABET), max_size=12),
    ids=st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=12),
    stop_strings=st.lists(st.text("abcé€\ufffd", min_size=1, max_size=3), max_size=2),
    max_new_tokens=st.integers(1, 30),
)
def test_a_preview_of_a_whole_block_is_what_it_publishes_and_holds_back(
    codec: TextCodec, before: list[int], ids: list[int], stop_strings: list[str], max_new_tokens: int
) -> None:
    """But for the rest of a character at a finish, with no token of what the finish drops; and it takes nothing."""
    committer = make(codec, stop_strings=stop_strings, max_new_tokens=max_new_tokens)
    committer.push(before)
    assume(committer.finish is None)
    preview = num_shown, pieces = committer.preview(ids, [False] * len(ids))
    assert committer.preview(ids, [False] * len(ids)) == preview
    num_before, text = committer.num_ids, "".join(piece.text for piece in pieces)
    published = committer.push(ids)
    if committer.finish is None:
        assert text == published.text + committer._text
        assert num_shown == len(ids)
    else:
        assert text in (published.text, published.text[:-1]) and published.text[len(text) :] in ("", "\ufffd")
        is_stop_token = committer.finish.stop_token_id is not None
        assert num_shown <= committer.num_ids - num_before - is_stop_token


def test_a_preview_tells_masks_from_text(codec: TextCodec) -> None:
    """Runs in order; what is held back comes first, and masks at the beginning do not hide it."""
    committer = make(codec, stop_strings=["!?"])
    committer.push(list(b"so!"))
    masked = [False, False, True, True, False, True]
    assert committer.preview(list(b"ab..c."), masked) == (
        6,
        [Piece("!ab", 0), Piece("", 2), Piece("c", 0), Piece("", 1)],
    )
    assert committer.preview(list(b"..cd"), [True, True, False, False]) == (
        4,
        [Piece("!", 0), Piece("", 2), Piece("cd", 0)],
    )


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ("é_€".encode(), "é_€"),
        (b"\xc3_x", "_x"),
        (b"a\xe2\x82_", "a_"),
        (b"_\x82\xacx", "_x"),
        (b"_\xa9\xc3\xa9", "_é"),
        (b"\xffa_", "\ufffda_"),
    ],
)
def test_a_preview_has_whole_characters_only(codec: TextCodec, data: bytes, shown: str) -> None:
    """Characters that begin or end in a mask (here _) are left out, with whatever of them is there; bytes that are none
    stay U+FFFD."""
    _, pieces = make(codec).preview(list(data), [byte == ord("_") for byte in data])
    assert "".join(piece.text or "_" * piece.num_masks for piece in pieces) == shown


@pytest.mark.parametrize(
    ("options", "ids", "num_shown", "shown"),
    [
        ({}, [*b"ab", STOP_ID, *b"cd"], 2, "ab"),
        ({}, [ord("_"), *b"b", STOP_ID, *b"cd"], 2, "_b"),
        ({"ignore_eos": True}, [*b"ab", STOP_ID, *b"cd"], 5, "abcd"),
        ({"max_new_tokens": 3}, list(b"ab__e"), 3, "ab_"),
        ({"stop_strings": ["cd"]}, list(b"ab_bcde"), 4, "ab_b"),
        ({"stop_strings": ["cd"]}, list(b"ab_c_d"), 6, "ab_c_d"),
        ({"stop_strings": ["ab"]}, list(b"ab_c"), 0, ""),
        ({"stop_strings": ["bcd", "c"]}, list(b"abcd"), 2, "ab"),
    ],
)
def test_a_preview_ends_where_a_finish_rule_would(
    codec: TextCodec, options: dict[str, Any], ids: list[int], num_shown: int, shown: str
) -> None:
    """Before a stop token, at the limit, before a stop string within a run (masks are _); masks in front do not count
    against that."""
    num, pieces = make(codec, **options).preview(ids, [token_id == ord("_") for token_id in ids])
    assert (num, "".join(piece.text or "_" * piece.num_masks for piece in pieces)) == (num_shown, shown)


# The cases that users have reported.


def block(text: str, length: int = B) -> list[int]:
    """A block of one-byte tokens: the text and dots."""
    return list(text.ljust(length, ".").encode())


def run(committer: OutputCommitter, *blocks: Sequence[int]) -> Published:
    parts = [committer.push(ids) for ids in blocks]
    return Published("".join(part.text for part in parts), [token_id for part in parts for token_id in part.token_ids])


def test_eos_before_the_limit_in_one_block(codec: TextCodec) -> None:
    """EOS at offset 3 and the limit at 20: the reason is stop, and nothing after EOS is published."""
    ids = block("abcdefgh")
    ids[3] = STOP_ID
    committer = make(codec, max_new_tokens=20)
    assert run(committer, ids) == Published("abc", list(b"abc"))
    assert committer.finish == Finish("stop", stop_token_id=STOP_ID)


def test_the_limit_before_eos_in_one_block(codec: TextCodec) -> None:
    """The limit at offset 3 and EOS at 20: the reason is length, with three tokens."""
    ids = block("abcdefgh")
    ids[20] = STOP_ID
    committer = make(codec, max_new_tokens=3)
    assert run(committer, ids) == Published("abc", list(b"abc"))
    assert committer.finish == Finish("length")


def test_eos_right_after_the_last_allowed_token(codec: TextCodec) -> None:
    """The limit ends a request before the token after it is looked at."""
    committer = make(codec, max_new_tokens=3)
    run(committer, [*b"abc", STOP_ID])
    assert committer.finish == Finish("length")


def test_eos_as_the_last_allowed_token(codec: TextCodec) -> None:
    """At one token the stop token comes before the limit."""
    committer = make(codec, max_new_tokens=3)
    assert run(committer, [*b"ab", STOP_ID]) == Published("ab", list(b"ab"))
    assert committer.finish == Finish("stop", stop_token_id=STOP_ID)


def test_a_stop_string_ending_at_the_limit(codec: TextCodec) -> None:
    """At one token the stop string comes before the limit."""
    committer = make(codec, max_new_tokens=3, stop_strings=["bc"])
    assert run(committer, [*b"abc"]) == Published("a", list(b"a"))
    assert committer.finish == Finish("stop", stop_string="bc")


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ([block("END after")], ""),
        ([block("before END after")], "before "),
        ([block("." * 29 + "END"), block("after")], "." * 29),
        ([block("." * 31 + "E"), block("ND after")], "." * 31),
        ([block("." * 30 + "EN"), block("D after")], "." * 30),
        ([block("one END two END")], "one "),
        ([[*b"x END", STOP_ID, *block("after", 26)]], "x "),
        ([block("." * 29 + "ENE"), block("ND after")], "." * 29 + "EN"),
        ([block("." * 32), block("END")], "." * 32),
    ],
    ids=["start", "middle", "end", "across", "across 2", "two in one", "before EOS", "false start", "next block"],
)
def test_a_stop_string_wherever_it_stands(codec: TextCodec, blocks: list[list[int]], text: str) -> None:
    """The text ends before the stop string, and nothing of it or after it is published."""
    committer = make(codec, stop_strings=["END"])
    assert run(committer, *blocks) == Published(text, list(text.encode()))
    assert committer.finish == Finish("stop", stop_string="END")


def test_text_is_held_back_with_its_ids(codec: TextCodec) -> None:
    """What may begin a stop string waits, ids and all, and comes as soon as it cannot be one."""
    committer = make(codec, stop_strings=["END"])
    assert committer.push(block("." * 30 + "EN")) == Published("." * 30, list(b"." * 30))
    assert committer.push(block("Nx", 4)) == Published("ENNx..", list(b"ENNx.."))
    assert committer.finish is None


def test_what_was_held_back_comes_at_the_limit(codec: TextCodec) -> None:
    """The limit releases the beginning of a stop string and the beginning of a character."""
    committer = make(codec, stop_strings=["END"], max_new_tokens=5)
    assert run(committer, [*b"xEN"], [*b"E\xc3"]) == Published("xENE\ufffd", [*b"xENE\xc3"])
    assert committer.finish == Finish("length")


def test_what_was_held_back_comes_at_a_stop_token(codec: TextCodec) -> None:
    """A stop token releases what might have become a stop string."""
    committer = make(codec, stop_strings=["END"])
    assert run(committer, [*b"xEN"], [STOP_ID]) == Published("xEN", list(b"xEN"))


def test_the_earliest_end_wins(codec: TextCodec) -> None:
    """Of two stop strings the one complete at the earlier token counts, though the other began before it."""
    committer = make(codec, stop_strings=["abcd", "bc"])
    assert run(committer, [*b"xabcd"]) == Published("xa", list(b"xa"))
    assert committer.finish == Finish("stop", stop_string="bc")


def test_the_leftmost_match_at_one_token_wins(codec: TextCodec) -> None:
    """Of those complete at the same token the one that began first counts, then the shorter, whatever their order."""
    for stop_strings, winner in ((["b", "abc"], "abc"), (["abc", "b", "ab"], "ab")):
        committer = make(codec, stop_strings=stop_strings)
        assert run(committer, [*b"x", MORE_IDS[b"abc"]]) == Published("x", list(b"x"))
        assert committer.finish == Finish("stop", stop_string=winner)


def test_a_stop_string_that_begins_inside_a_token(codec: TextCodec) -> None:
    """The text goes on to the match; the token in which it begins is not published."""
    committer = make(codec, stop_strings=["b."])
    assert run(committer, [*b"x", MORE_IDS[b"ab"], *b"."]) == Published("xa", list(b"x"))
    assert committer.finish == Finish("stop", stop_string="b.")


def test_a_stop_string_behind_bytes_that_are_no_character(codec: TextCodec) -> None:
    """Bytes that turn out to be no character belong to their own token, which is published."""
    committer = make(codec, stop_strings=["a"])
    assert run(committer, [0xE2, 0x82, *b"a"]) == Published("\ufffd", [0xE2, 0x82])


@pytest.mark.parametrize("last", [[0xE2], [0xE2, STOP_ID]], ids=["limit", "stop token"])
def test_a_stop_string_that_only_the_end_reveals(codec: TextCodec, last: list[int]) -> None:
    """The rest of a character becomes U+FFFD at the end; a stop string in it is not published either."""
    committer = make(codec, stop_strings=["b\ufffd"], max_new_tokens=3 if len(last) == 1 else 9)
    assert run(committer, [*b"ab"], last) == Published("a", list(b"a"))
    assert committer.finish == Finish("stop", stop_string="b\ufffd")


@pytest.mark.parametrize("text", ["é", "a€b", "💡", "x👩‍👩‍👧y"])
def test_characters_cut_at_every_token_border(codec: TextCodec, text: str) -> None:
    """With one byte a token, a character and its ids are published together, with its last byte."""
    committer = make(codec)
    data = text.encode()
    shown, num_ids = "", 0
    for length, byte in enumerate(data, start=1):
        published = committer.push([byte])
        shown += published.text
        num_ids += len(published.token_ids)
        assert shown == data[:length].decode(errors="ignore")
        assert num_ids == len(shown.encode())


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_stop_string_whose_characters_are_cut(codec: TextCodec, num_bytes: int) -> None:
    """A stop string is found whichever bytes of its characters stand in which block."""
    data = "a€b".encode()
    committer = make(codec, stop_strings=["€"])
    assert run(committer, data[: 1 + num_bytes], data[1 + num_bytes :]) == Published("a", list(b"a"))
    assert committer.finish == Finish("stop", stop_string="€")


@pytest.mark.parametrize("max_new_tokens", [1, B - 1, B, B + 1])
def test_limits_around_a_block(codec: TextCodec, max_new_tokens: int) -> None:
    """Exactly so many tokens come out, whatever the block border."""
    committer = make(codec, max_new_tokens=max_new_tokens)
    assert run(committer, block("x"), block("y")).token_ids == (block("x") + block("y"))[:max_new_tokens]
    assert committer.finish == Finish("length")


def test_ignore_eos(codec: TextCodec) -> None:
    """With ignore_eos the model's stop ids are ordinary tokens, those of the request still stop."""
    committer = make(codec, ignore_eos=True, request_stop_ids=[OTHER_STOP_ID])
    ids = [*b"a", STOP_ID, *b"b", OTHER_STOP_ID, *b"c"]
    assert run(committer, ids) == Published("ab", [*b"a", STOP_ID, *b"b"])
    assert committer.finish == Finish("stop", stop_token_id=OTHER_STOP_ID)
    both = make(codec, ignore_eos=True, request_stop_ids=[STOP_ID])
    run(both, [*b"a", STOP_ID])
    assert both.finish == Finish("stop", stop_token_id=STOP_ID)


def test_special_tokens_are_ids_without_text(codec: TextCodec) -> None:
    """A special token in the output is published as an id only, and does not hide a stop string around it."""
    committer = make(codec, stop_strings=["END"])
    assert run(committer, [*b"x", SPECIAL, *b"E"], [SPECIAL, *b"ND"]) == Published("x", [*b"x", SPECIAL])


def test_nothing_after_the_finish(codec: TextCodec) -> None:
    """Blocks pushed after the finish publish nothing and change nothing."""
    committer = make(codec, max_new_tokens=2)
    run(committer, [*b"abc"])
    assert committer.push([*b"d", STOP_ID]) == Published("", [])
    assert committer.finish == Finish("length")


def test_the_work_does_not_grow_with_the_text(codec: TextCodec) -> None:
    """After long output only what is held back is kept."""
    committer = make(codec, stop_strings=["a" * 256], max_new_tokens=10**9)
    for _ in range(50):
        committer.push(block("a" * 31))
    assert len(committer._text) == len(committer._token_ids) == len(committer._end_offsets) == 0
    committer.push(block("a" * 32))
    assert len(committer._text) == 32
