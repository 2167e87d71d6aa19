"""The drafts of one request: from the texts that came with it, from itself, from recent outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from teola_plugin.engines.drafts.adaptive import AGREED, Calibration, Experience, Kind, Trust, expected
from teola_plugin.engines.drafts.corpus import LONGEST, Corpus
from teola_plugin.engines.drafts.followed import FollowedText
from teola_plugin.engines.drafts.lengths import of_share
from teola_plugin.engines.drafts.skeleton import GAP_TOKEN, Skeleton
from teola_plugin.engines.drafts.together import Offer

_WATCHED = 2
"""Tokens of a guess that is not drafted: whether they come is seen anyhow."""
_SURE = 0.9
"""Share from which no other guess is looked for."""
_MOST_REST = 8
"""Tokens that are written without a look for guesses, where many looks in a row led to no draft."""
_PATIENCE = 4
"""Looks without a draft for each of them, of a row alone; beside others, whose step it holds up as well, fewer."""


_TRY = 2
"""Tokens of the first draft of a kind, where others share the step: what they cost is little beside what is seen."""
_STEADY = 8
"""Steps of one token by which its speed is taken for less of a difference at first."""


class _Guess(NamedTuple):
    kind: Kind
    tokens: Sequence[int]


class Row:
    """A running greedy request. Tokens are ids of the model.

    Guesses are compared with the output even if they were not drafted. This shows when drafting for a row does not pay,
    and when it pays again, without verifying a token in vain.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        prompt: int,
        texts: Sequence[Sequence[int]],
        recent: Corpus | None,
        most: int,
        *,
        lookup: bool = True,
        learned: Experience | None = None,
        calibration: Calibration | None = None,
        ends: int | None = None,
    ) -> None:
        """`tokens`: the prompt, which has `prompt` of them, and what is written already. `texts`: what the output may
        repeat, read when something is first looked up; one with a `GAP_TOKEN` is a skeleton. `most`: of one draft.
        `lookup`: whether the tokens are looked through themselves. `learned`: how often guesses were right in the
        requests of its app and tenant, of which it is one; `calibration`: the same of its engine. `ends`: tokens that
        it has at most in the end."""
        self._own = Corpus(tokens[:prompt])
        self._prompt, self._most = prompt, most
        self._unfound: Sequence[Sequence[int]] = texts
        """Texts that were not looked at yet: many a row is never drafted for."""
        self._texts = list[FollowedText]()
        self._skeletons = list[Skeleton]()
        self._recent, self._lookup = recent, lookup
        self._learned, self._calibration, self._ends = learned, calibration or Calibration(), ends
        self._trust: dict[Kind, Trust] = {}
        self._rest = self._idle = self._looks = 0
        self._rows = 1
        self._unfollowed = 0
        """Tokens at its end that were not yet looked for in the texts."""
        self._unread: list[int] = []
        """Tokens written since it began to rest."""
        self._best: tuple[Kind, float] | None = None
        """The likeliest guess: its kind and share."""
        self._guessed: list[_Guess] = []
        self._draft: list[int] = []
        self.drafted = self.accepted = 0
        self._begun = len(tokens)
        self.grow(tokens[prompt:])

    def __len__(self) -> int:
        return len(self._own) + len(self._unread)

    def forget(self) -> None:
        """Stop using recent outputs as a source."""
        self._recent = None

    @property
    def told(self) -> bool:
        """True if it has a text that its output may still repeat."""
        return bool(self._unfound or self._texts or self._skeletons)

    @property
    def output(self) -> list[int]:
        """The tokens that the request has produced."""
        return [*self._own.tokens[self._prompt :], *self._unread]

    def trust(self, kind: Kind) -> Trust:
        found = self._trust.get(kind)
        if found is None:
            found = Trust(expected(kind)) if self._learned is None else self._learned.begin(kind)
            self._trust[kind] = found
        return found

    def grow(self, new: Sequence[int]) -> None:
        """Add tokens that the model has produced: the accepted part of the draft, and one more."""
        if self._unread:
            new, self._unread = [*self._unread, *new], []
        if self._guessed:
            self._learn(new)
        self._rest = max(0, self._rest - len(new))
        self._own.add(new)
        self._follow_skeletons(new)
        self._unfollowed += len(new)

    def _learn(self, new: Sequence[int]) -> None:
        self.drafted += len(self._draft)
        self.accepted += _common(self._draft, new)
        for kind, tokens in self._guessed:
            right = _common(tokens, new)
            wrong = right < min(len(tokens), len(new))
            if self._best is not None and kind == self._best[0]:
                self._calibration.saw(*self._best, len(tokens) if wrong else right, right)
            self.trust(kind).saw(right, wrong=wrong)
            if self._learned is not None:
                self._learned.saw(kind, right, wrong=wrong)
        self._guessed, self._draft = [], []

    @property
    def rest(self) -> int:
        """The number of tokens that may be produced before guesses are searched again."""
        return max(0, self._rest - len(self._unread) - 1)

    def rests(self, new: Sequence[int]) -> bool:
        """Return True if no guess need be searched after these tokens. They are then kept for the next `grow`."""
        if len(self._unread) + len(new) >= self._rest:
            return False
        self._unread += new
        return True

    def draft(self, room: int, longest: Sequence[int] | None = None, rows: int = 1) -> list[int]:
        """Return the tokens that the model is likely to produce next, [] if unknown.

        Args:
            room: Maximum number of tokens.
            longest: Maximum length by the share of right tokens (see `lengths`); None for no such limit.
            rows: Number of rows that share the step.
        """
        if self._rest:
            return []
        if self._ends is not None:
            room = min(room, self._ends - len(self._own) - 1)
        self._looks, self._rows = self._idle, rows
        guesses, best, most = list[_Guess](), None, 0.0
        for guess in self._guesses():
            guesses.append(guess)
            share = self.trust(guess.kind).share
            if share > most:
                best, most = guess, share
            if share >= _SURE:
                break
        if best is not None and rows > 1 and not self.trust(best.kind).proven:
            room = min(room, _TRY)
        length = 0 if best is None else room if longest is None else min(room, self._length(best.kind, most, longest))
        self._draft = list(best.tokens[:length]) if best is not None and length > 0 else []
        self._guessed = [
            _Guess(guess.kind, self._draft if guess is best and self._draft else guess.tokens[:_WATCHED])
            for guess in guesses
        ]
        self._best = None if best is None else (best.kind, most)
        self._tire()
        return self._draft

    def _length(self, kind: Kind, share: float, longest: Sequence[int]) -> int:
        """Return the length of a draft that pays. With other rows, the calibration is applied later (see `offer`)."""
        return of_share(longest, share * self._calibration.of(kind) if self._rows == 1 else share)

    @property
    def speed(self) -> float:
        """The tokens per step that the row has produced here; 1 at first."""
        written = len(self) - self._begun
        return (written + _STEADY) / (written - self.accepted + _STEADY)

    @property
    def offer(self) -> Offer:
        """The draft, to be weighed against those of other rows."""
        kind, share = self._best or (Kind.ONE, 0.0)
        return Offer(len(self._draft), share, self._calibration.of(kind), self.speed)

    def cut(self, length: int) -> list[int]:
        """Cut the draft to `length` tokens. A few of the others are still compared with the output."""
        self._draft = self._draft[:length]
        kept = max(length, _WATCHED)
        self._guessed = [_Guess(guess.kind, guess.tokens[:kept]) for guess in self._guessed]
        self._tire()
        return self._draft

    def _tire(self) -> None:
        """Search less and less often after searches without a draft."""
        self._idle = 0 if self._draft else self._looks + 1
        if self._rows == 1:
            self._rest = min(_MOST_REST, self._idle // _PATIENCE)
        else:
            self._rest = min(_MOST_REST + self._rows, self._idle**2 * self._rows // (2 * _PATIENCE))

    def first_tokens(self, count: int) -> list[int]:
        """Return the first tokens of the prompt, as a draft for measuring the cost of verification."""
        return [self._own.tokens[i % self._prompt] for i in range(count)]

    def _read(self) -> None:
        """Read the texts, and find the position of the output in those that are skeletons."""
        texts, self._unfound = [*self._unfound], ()
        self._texts = [FollowedText(text) for text in texts if text and GAP_TOKEN not in text]
        self._skeletons = [Skeleton(text) for text in texts if GAP_TOKEN in text]
        self._follow_skeletons(self.output)

    def _follow_skeletons(self, new: Sequence[int]) -> None:
        for skeleton in self._skeletons:
            skeleton.follow(new)
        self._skeletons = [skeleton for skeleton in self._skeletons if not skeleton.over]

    def _follow(self) -> None:
        """Update the positions in texts. Called only when a draft is wanted."""
        if self._unfound:
            self._read()
        if self._texts and self._unfollowed:
            last = self._own.tokens[max(self._prompt, len(self._own) - self._unfollowed - LONGEST) :]
            for text in self._texts:
                text.follow(last, self._unfollowed)
        self._unfollowed = 0

    def _guesses(self) -> Iterator[_Guess]:
        """Yield guesses from the texts, and from the look-up of the last tokens."""
        self._follow()
        if self._texts or self._skeletons:
            named: list[FollowedText | Skeleton] = [*self._texts, *self._skeletons]
            for one in sorted(named, key=lambda one: -one.agreed):
                if found := one.next(self._most):
                    yield _Guess(_kind_of(one), found)
                    break
        corpus, place, agreed = self._looked_up(self._own.tokens[-32:])
        if agreed:
            yield _Guess(Kind.behind(agreed), corpus.behind(place, self._most))

    def _looked_up(self, last: Sequence[int]) -> tuple[Corpus, int, int]:
        """Return the corpus and place with the longest match of the last tokens, and its length; 0 for no match."""
        own = self._own
        corpus, (place, agreed) = own, own.best(last) if self._lookup else (0, 0)
        if self._recent is not None:
            elsewhere = self._recent.best(last)
            if elsewhere[1] > agreed:
                corpus, (place, agreed) = self._recent, elsewhere
        if not agreed and self._lookup and last:
            place = own.latest(last[-1])
            agreed = int(place >= 0)
        return corpus, place, agreed


def _kind_of(one: FollowedText | Skeleton) -> Kind:
    if isinstance(one, Skeleton):
        return Kind.SKELETON
    return Kind.FOLLOWED if one.agreed > AGREED else Kind.TEXT


def _common(guess: Sequence[int], new: Sequence[int]) -> int:
    """Return the number of guessed tokens that were produced."""
    right = 0
    for one, other in zip(guess, new, strict=False):
        if one != other:
            break
        right += 1
    return right
