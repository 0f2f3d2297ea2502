"""A done block becomes output: stop tokens, stop strings, the limit, and what is held back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from scheduler_svc.text import TextCodec


@dataclass(frozen=True)
class Finish:
    """Why the output ended; a stop says which token or string."""

    reason: Literal["stop", "length"]
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True)
class Published:
    """What a client may see now, after what it saw before. Either may be empty, and both."""

    text: str
    token_ids: list[int]


class Piece(NamedTuple):
    """A run of positions of a block that is not done: their text, or how many of them are masked."""

    text: str
    num_masks: int


class OutputCommitter:
    """Applies the finish rules token by token: stop token, stop string, limit.

    The published text is what the published ids decode to. Only where a stop string begins inside a token does the
    text go on to the match and the token's id stay back. The result depends on the ids pushed, not on how they were
    cut into blocks, so pushing them again rebuilds everything.

    What is not yet published is a text and, for each token, the offset at which it ends there. A token that ends inside
    a character has no offset: nothing can be published up to it.

        text      o n e ,   t w o       tokens "one" "," " t" "wo" end at 3, 4, 6, 8
                            ^ 5         a stop string "two!" may begin here: only "one" and "," may go
    """

    finish: Finish | None
    num_ids: int  # taken so far; a stop token is, what stands behind the finish is not

    def __init__(
        self,
        codec: TextCodec,
        *,
        model_stop_ids: Collection[int],
        request_stop_ids: Collection[int],
        stop_strings: Sequence[str],
        ignore_eos: bool,
        max_new_tokens: int,
    ) -> None:
        self.finish = None
        self.num_ids = 0
        self._codec = codec
        self._stop_ids = frozenset(request_stop_ids) | (frozenset() if ignore_eos else frozenset(model_stop_ids))
        self._searches = [_StopSearch(stop_string) for stop_string in stop_strings]
        self._tokens_left = max_new_tokens
        self._detokenizer = codec.detokenizer()
        # Not yet published.
        self._text = ""
        self._token_ids: list[int] = []
        self._end_offsets: list[int | None] = []
        # Once a stop string was found: where it begins in _text.
        self._match_start: int | None = None

    def push(self, ids: Sequence[int]) -> Published:
        """Take the generated ids of a done block, in order; those after the finish are dropped."""
        for token_id in ids:
            if self.finish is not None:
                break
            self.num_ids += 1
            if token_id in self._stop_ids:
                self._end(Finish("stop", stop_token_id=token_id))
                break
            self._append(token_id)
            self._tokens_left -= 1
            if self.finish is None and self._tokens_left <= 0:
                self._end(Finish("length"))
        return self._publish()

    def preview(self, ids: Sequence[int], masked: Sequence[bool]) -> tuple[int, list[Piece]]:
        """What may follow the published text if the next block, whose generated positions these are, becomes done as it
        stands: how many of the positions count, and what they show. Takes nothing.

        It ends before the first stop token, at the limit, and before the first stop string that stands in one run. Text
        begins with what is held back; parts of characters are left out.
        """
        num_shown = min(len(ids), self._tokens_left)
        for place in range(num_shown):
            if ids[place] in self._stop_ids and not masked[place]:
                num_shown = place
                break
        pieces: list[Piece] = []
        text, detokenizer = self._text, self._detokenizer.copy()
        for is_masked, run in groupby(range(num_shown), masked.__getitem__):
            places = list(run)
            if is_masked:
                pieces += [Piece(text, 0)] if text else []
                pieces.append(Piece("", len(places)))
                text, detokenizer = "", self._codec.detokenizer()
                continue
            ends = []
            for place in places:
                new = detokenizer.push(ids[place])
                # After a mask, U+FFFD is the end of a character that began in it.
                text += new.lstrip("\ufffd") if pieces and not text else new
                ends.append(len(text))
                matches = [start for search in self._searches if (start := text.find(search.stop_string)) >= 0]
                if matches:
                    shown = [Piece(text[: min(matches)], 0)] if min(matches) else []
                    return places[0] + bisect_right(ends, min(matches)), pieces + shown
        return num_shown, [*pieces, Piece(text, 0)] if text else pieces

    def _append(self, token_id: int) -> None:
        was_pending = self._detokenizer.pending
        text = self._detokenizer.push(token_id)
        if was_pending and text and text == "\ufffd" + self._codec.detokenizer().push(token_id):
            # The pending bytes were no character after all: U+FFFD is theirs alone, so their tokens end behind it.
            self._close_pending(len(self._text) + 1)
        self._take_text(text)
        self._token_ids.append(token_id)
        self._end_offsets.append(None if self._detokenizer.pending else len(self._text))

    def _end(self, finish: Finish) -> None:
        self.finish = finish
        # The rest of a character becomes text, and a stop string may end in it: it came first.
        self._take_text(self._detokenizer.flush())
        self._close_pending(len(self._text))

    def _close_pending(self, end_offset: int) -> None:
        for i in range(len(self._end_offsets) - 1, -1, -1):
            if self._end_offsets[i] is not None:
                break
            self._end_offsets[i] = end_offset

    def _take_text(self, text: str) -> None:
        """Append to the text and search it. Of the matches that end in it, the one that begins first counts.

        Of those that begin together it is the shorter one: it ended first.
        """
        first: tuple[int, str] | None = None
        for end, char in enumerate(text, start=len(self._text) + 1):
            for search in self._searches:
                if search.advance(char):
                    start = end - len(search.stop_string)
                    if first is None or start < first[0]:
                        first = (start, search.stop_string)
        self._text += text
        if first is not None:
            self._match_start = first[0]
            self.finish = Finish("stop", stop_string=first[1])

    def _publish(self) -> Published:
        if self.finish is None:
            limit = len(self._text) - max((search.matched for search in self._searches), default=0)
        else:
            limit = len(self._text) if self._match_start is None else self._match_start
        num_tokens, text_end = 0, 0
        for i, end_offset in enumerate(self._end_offsets, start=1):
            if end_offset is None:
                continue
            if end_offset > limit:
                break
            num_tokens, text_end = i, end_offset
        if self.finish is not None:
            text_end = limit
        published = Published(self._text[:text_end], self._token_ids[:num_tokens])
        if self.finish is not None:
            self._text, self._token_ids, self._end_offsets, self._match_start = "", [], [], None
        else:
            self._text = self._text[text_end:]
            self._token_ids = self._token_ids[num_tokens:]
            self._end_offsets = [
                None if end_offset is None else end_offset - text_end for end_offset in self._end_offsets[num_tokens:]
            ]
        return published


class _StopSearch:
    """Finds one string in a text that comes character by character (Knuth, Morris and Pratt 1977)."""

    def __init__(self, stop_string: str) -> None:
        self.stop_string = stop_string
        # How many characters of the string the text now ends with.
        self.matched = 0
        # For each length of a matched beginning: the longest shorter beginning that it ends with.
        self._shorter = [0, 0]
        length = 0
        for char in stop_string[1:-1]:
            while length and char != stop_string[length]:
                length = self._shorter[length]
            length += char == stop_string[length]
            self._shorter.append(length)

    def advance(self, char: str) -> bool:
        """Whether the string ends with this character. Begins anew after that: only a first match counts."""
        while self.matched and char != self.stop_string[self.matched]:
            self.matched = self._shorter[self.matched]
        self.matched += char == self.stop_string[self.matched]
        if self.matched < len(self.stop_string):
            return False
        self.matched = 0
        return True
