"""The drafts of one request: from the texts that came with it, from itself, from recent outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from teola_plugin.engines.drafts.accuracy import (
    AGREED,
    AppAccuracy,
    ForecastRatio,
    GuessAccuracy,
    GuessKind,
    usual_accuracy,
)
from teola_plugin.engines.drafts.corpus import LONGEST, Corpus
from teola_plugin.engines.drafts.draft_lengths import DraftCandidate, for_share
from teola_plugin.engines.drafts.followed_texts import GAP_TOKEN, FollowedText, Skeleton

_WATCHED = 2
"""Number of tokens of an undrafted guess that are compared with the output."""
_HIGH_SHARE = 0.9
"""Share of right tokens from which no other guess is searched."""
_MAX_REST = 8
"""Maximum number of tokens that are written without a search, after many searches in a row without a draft."""
_PATIENCE = 4
"""Searches without a draft before the rest grows by a token, for a row alone. With other rows, whose step is held up as
well, it takes fewer."""
_TRY = 2
"""Number of tokens of the first draft of a kind, where others share the step: little cost for much information."""
_STEADY = 8
"""Number of steps of one token that count as made at first, so that the speed changes slowly."""


class _Guess(NamedTuple):
    kind: GuessKind
    tokens: Sequence[int]


class RequestDrafter:
    """The drafts of a running greedy request, which is a row of vLLM's batch. Tokens are ids of the model.

    Guesses are compared with the output even if they were not drafted. This shows when drafting for a row does not pay,
    and when it pays again, without verifying a token in vain.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        prompt_tokens: int,
        texts: Sequence[Sequence[int]],
        recent: Corpus | None,
        max_draft: int,
        *,
        lookup: bool = True,
        app_accuracy: AppAccuracy | None = None,
        forecast_ratio: ForecastRatio | None = None,
        max_total: int | None = None,
    ) -> None:
        """Create the drafter of a request.

        Args:
            tokens: The prompt and what is written already.
            prompt_tokens: Number of tokens of the prompt.
            texts: Texts that the output may repeat, read when something is first looked up; one with a `GAP_TOKEN` is
                a skeleton.
            recent: Recent outputs of the same app and tenant.
            max_draft: Maximum number of tokens of a draft.
            lookup: True if the request's own tokens are searched, too.
            app_accuracy: How often guesses were right in requests of its app and tenant.
            forecast_ratio: How often guesses were right on its engine, compared with what was expected.
            max_total: Maximum number of tokens at the end, with the prompt.
        """
        self._request_corpus = Corpus(tokens[:prompt_tokens])
        self._prompt_tokens, self._max_draft = prompt_tokens, max_draft
        self._unread_texts: Sequence[Sequence[int]] = texts
        """Texts that were not read yet: many a row is never drafted for."""
        self._texts = list[FollowedText]()
        self._skeletons = list[Skeleton]()
        self._recent, self._lookup = recent, lookup
        self._app_accuracy, self._forecast_ratio = app_accuracy, forecast_ratio or ForecastRatio()
        self._max_total = max_total
        self._accuracy: dict[GuessKind, GuessAccuracy] = {}
        self._rest = self._failed_searches = self._searches_before = 0
        self._rows = 1
        self._unfollowed = 0
        """Number of tokens at the end that were not yet searched in the texts."""
        self._unread: list[int] = []
        """Tokens written since the rest began."""
        self._best: tuple[GuessKind, float] | None = None
        """The kind of the likeliest guess, and its share of right tokens."""
        self._guesses: list[_Guess] = []
        self._draft: list[int] = []
        self.drafted = self.accepted = 0
        self._initial_tokens = len(tokens)
        self.grow(tokens[prompt_tokens:])

    def __len__(self) -> int:
        return len(self._request_corpus) + len(self._unread)

    def forget(self) -> None:
        """Stop using recent outputs as a source."""
        self._recent = None

    @property
    def has_texts(self) -> bool:
        """True if it has a text that its output may still repeat."""
        return bool(self._unread_texts or self._texts or self._skeletons)

    @property
    def output(self) -> list[int]:
        """The tokens that the request has produced."""
        return [*self._request_corpus.tokens[self._prompt_tokens :], *self._unread]

    def accuracy(self, kind: GuessKind) -> GuessAccuracy:
        """Return the record of how often guesses of this kind were right in this request; it begins with the app's."""
        accuracy = self._accuracy.get(kind)
        if accuracy is None:
            of_app = self._app_accuracy
            accuracy = GuessAccuracy(usual_accuracy(kind)) if of_app is None else of_app.for_new_request(kind)
            self._accuracy[kind] = accuracy
        return accuracy

    def grow(self, new: Sequence[int]) -> None:
        """Add tokens that the model has produced: the accepted part of the draft, and one more."""
        if self._unread:
            new, self._unread = [*self._unread, *new], []
        if self._guesses:
            self._judge_guesses(new)
        self._rest = max(0, self._rest - len(new))
        self._request_corpus.add(new)
        self._follow_skeletons(new)
        self._unfollowed += len(new)

    def _judge_guesses(self, new: Sequence[int]) -> None:
        """Compare the last guesses with the tokens that the model wrote, and record which were right.

        This updates the accuracy in the request and its app, the engine's forecast ratio, and the counts of drafted and
        accepted tokens.
        """
        self.drafted += len(self._draft)
        self.accepted += _common_length(self._draft, new)
        for kind, tokens in self._guesses:
            right = _common_length(tokens, new)
            wrong = right < min(len(tokens), len(new))
            if self._best is not None and kind == self._best[0]:
                self._forecast_ratio.record(*self._best, len(tokens) if wrong else right, right)
            self.accuracy(kind).record(right, wrong=wrong)
            if self._app_accuracy is not None:
                self._app_accuracy.record(kind, right, wrong=wrong)
        self._guesses, self._draft = [], []

    @property
    def rest(self) -> int:
        """The number of tokens that may be produced before guesses are searched again."""
        return max(0, self._rest - len(self._unread) - 1)

    def rests(self, new: Sequence[int]) -> bool:
        """Return True if no draft need be searched after these tokens, which are then kept for the next `grow`.

        Return False, and keep nothing, once the rest is over: the caller then calls `grow` with them.
        """
        if len(self._unread) + len(new) >= self._rest:
            return False
        self._unread += new
        return True

    def draft(self, room: int, longest: Sequence[int] | None = None, rows: int = 1) -> list[int]:
        """Return the tokens that the model is likely to produce next, [] if unknown.

        Args:
            room: Maximum number of tokens.
            longest: Maximum length by the share of right tokens (see `draft_lengths`); None for no such limit.
            rows: Number of rows that share the step.
        """
        if self._rest:
            return []
        if self._max_total is not None:
            room = min(room, self._max_total - len(self._request_corpus) - 1)
        self._searches_before, self._rows = self._failed_searches, rows
        guesses, best, best_share = list[_Guess](), None, 0.0
        for guess in self._search():
            guesses.append(guess)
            share = self.accuracy(guess.kind).share
            if share > best_share:
                best, best_share = guess, share
            if share >= _HIGH_SHARE:
                break
        if best is None:
            self._draft, self._best = [], None
        else:
            if rows > 1 and not self.accuracy(best.kind).proven:
                room = min(room, _TRY)
            length = room if longest is None else min(room, self._paying_length(best.kind, best_share, longest))
            self._draft = list(best.tokens[:length]) if length > 0 else []
            self._best = best.kind, best_share
        self._guesses = [
            _Guess(guess.kind, self._draft if guess is best and self._draft else guess.tokens[:_WATCHED])
            for guess in guesses
        ]
        self._update_rest()
        return self._draft

    def _paying_length(self, kind: GuessKind, share: float, longest: Sequence[int]) -> int:
        """Return the length of a draft that pays. With other rows, the forecast ratio is applied by `candidate`."""
        return for_share(longest, share * self._forecast_ratio.of(kind) if self._rows == 1 else share)

    @property
    def speed(self) -> float:
        """Return how many tokens a step has written on average in this request; 1 at first.

        A step writes the accepted tokens and one more, so all written tokens less the accepted ones are the number of
        steps.
        """
        written = len(self) - self._initial_tokens
        return (written + _STEADY) / (written - self.accepted + _STEADY)

    @property
    def candidate(self) -> DraftCandidate:
        """The draft, to be weighed against those of other rows."""
        kind, share = self._best or (GuessKind.ONE, 0.0)
        return DraftCandidate(len(self._draft), share, self._forecast_ratio.of(kind), self.speed)

    def cut(self, length: int) -> list[int]:
        """Cut the draft to `length` tokens. A few of the others are still compared with the output."""
        self._draft = self._draft[:length]
        compared = max(length, _WATCHED)
        self._guesses = [_Guess(guess.kind, guess.tokens[:compared]) for guess in self._guesses]
        self._update_rest()
        return self._draft

    def _update_rest(self) -> None:
        """Search less and less often after searches without a draft."""
        self._failed_searches = 0 if self._draft else self._searches_before + 1
        if self._rows == 1:
            self._rest = min(_MAX_REST, self._failed_searches // _PATIENCE)
        else:
            self._rest = min(_MAX_REST + self._rows, self._failed_searches**2 * self._rows // (2 * _PATIENCE))

    def first_tokens(self, count: int) -> list[int]:
        """Return the first tokens of the prompt, as a draft for measuring the cost of verification."""
        return [self._request_corpus.tokens[i % self._prompt_tokens] for i in range(count)]

    def _read_texts(self) -> None:
        """Read the texts, and find the position of the output in those that are skeletons."""
        texts, self._unread_texts = [*self._unread_texts], ()
        self._texts = [FollowedText(text) for text in texts if text and GAP_TOKEN not in text]
        self._skeletons = [Skeleton(text) for text in texts if GAP_TOKEN in text]
        self._follow_skeletons(self.output)

    def _follow_skeletons(self, new: Sequence[int]) -> None:
        for skeleton in self._skeletons:
            skeleton.follow(new)
        self._skeletons = [skeleton for skeleton in self._skeletons if not skeleton.is_exhausted]

    def _follow_texts(self) -> None:
        """Update the positions in texts. Called only when a draft is wanted."""
        if self._unread_texts:
            self._read_texts()
        if self._texts and self._unfollowed:
            last = self._request_corpus.tokens[
                max(self._prompt_tokens, len(self._request_corpus) - self._unfollowed - LONGEST) :
            ]
            for text in self._texts:
                text.follow(last, self._unfollowed)
        self._unfollowed = 0

    def _search(self) -> Iterator[_Guess]:
        """Yield guesses from the texts, and from the look-up of the last tokens."""
        self._follow_texts()
        if self._texts or self._skeletons:
            texts: list[FollowedText | Skeleton] = [*self._texts, *self._skeletons]
            for text in sorted(texts, key=lambda text: -text.agreed):
                if tokens := text.next(self._max_draft):
                    yield _Guess(_kind_of(text), tokens)
                    break
        corpus, position, agreed = self._look_up(self._request_corpus.tokens[-32:])
        if agreed:
            yield _Guess(GuessKind.after_match(agreed), corpus.continuation(position, self._max_draft))

    def _look_up(self, last: Sequence[int]) -> tuple[Corpus, int, int]:
        """Return the corpus and position with the longest match of the last tokens, and its length; 0 for no match."""
        request_corpus = self._request_corpus
        corpus, (position, agreed) = request_corpus, request_corpus.best(last) if self._lookup else (0, 0)
        if self._recent is not None:
            in_recent = self._recent.best(last)
            if in_recent[1] > agreed:
                corpus, (position, agreed) = self._recent, in_recent
        if not agreed and self._lookup and last:
            position = request_corpus.latest(last[-1])
            agreed = int(position >= 0)
        return corpus, position, agreed


def _kind_of(text: FollowedText | Skeleton) -> GuessKind:
    if isinstance(text, Skeleton):
        return GuessKind.SKELETON
    return GuessKind.FOLLOWED if text.agreed > AGREED else GuessKind.TEXT


def _common_length(guess: Sequence[int], new: Sequence[int]) -> int:
    """Return the number of guessed tokens that were produced."""
    right = 0
    for guessed, produced in zip(guess, new, strict=False):
        if guessed != produced:
            break
        right += 1
    return right
