"""The drafts of one request: from the texts that came with it, from itself, from recent outputs."""

from __future__ import annotations

from collections.abc import Sequence

from teola_plugin.engines.drafts.adaptive import DraftLength
from teola_plugin.engines.drafts.corpus import Corpus
from teola_plugin.engines.drafts.followed import FollowedText
from teola_plugin.engines.drafts.skeleton import GAP_TOKEN, Skeleton


class Row:
    """A running greedy request. Tokens are the model's ids."""

    def __init__(
        self,
        tokens: Sequence[int],
        prompt: int,
        texts: Sequence[Sequence[int]],
        recent: Corpus | None,
        most: int,
        *,
        lookup: bool = True,
    ) -> None:
        """`tokens`: the prompt, which has `prompt` of them, and what is written already. `texts`: what the output may
        repeat; one with a `GAP_TOKEN` is a skeleton. `lookup`: whether the tokens are looked through themselves."""
        self._own = Corpus(tokens[:prompt])
        self._prompt = prompt
        self._texts = [FollowedText(text) for text in texts if text and GAP_TOKEN not in text]
        self._skeletons = [Skeleton(text) for text in texts if GAP_TOKEN in text]
        self._recent, self._lookup = recent, lookup
        self._length = DraftLength(most, first=most if self._texts else 4)
        self._draft: list[int] = []
        self.drafted = self.accepted = 0
        self.grow(tokens[prompt:])

    def __len__(self) -> int:
        return len(self._own)

    def forget(self) -> None:
        """Recent outputs are no source any more."""
        self._recent = None

    @property
    def output(self) -> list[int]:
        """What the request has written."""
        return self._own.tokens[self._prompt :]

    def grow(self, new: Sequence[int]) -> None:
        """The model has written these: what was accepted of the draft, and one more."""
        if self._draft:
            accepted = _common(self._draft, new)
            self.drafted += len(self._draft)
            self.accepted += accepted
            self._length.verified(len(self._draft), accepted)
            self._draft = []
        self._own.add(new)
        for skeleton in self._skeletons:
            skeleton.follow(new)
        self._skeletons = [skeleton for skeleton in self._skeletons if not skeleton.over]
        if self._texts:
            output = self.output
            for text in self._texts:
                text.follow(output, len(new))

    def draft(self, most: int) -> list[int]:
        """What the model is likely to write next, at most so many tokens; nothing where nobody knows."""
        allowed = min(most, self._length.now())
        self._draft = (self._named(allowed, most) or self._found(allowed)) if allowed > 0 else []
        return self._draft

    def first_tokens(self, count: int) -> list[int]:
        """Of the prompt, whatever comes next: a draft for measuring what verifying takes."""
        return [self._own.tokens[i % self._prompt] for i in range(count)]

    def _named(self, allowed: int, most: int) -> list[int]:
        """Of the text or skeleton that came with the request and has agreed longest. A skeleton is as long as it is:
        it is drafted up to its next gap."""
        if not self._texts and not self._skeletons:
            return []
        followed: list[FollowedText | Skeleton] = [*self._texts, *self._skeletons]
        for one in sorted(followed, key=lambda one: -one.agreed):
            if found := one.next(most if isinstance(one, Skeleton) else allowed):
                return found
        return []

    def _found(self, most: int) -> list[int]:
        """What followed the last tokens before."""
        own = self._own
        last = own.tokens[-32:]
        corpus, (place, agreed) = own, own.best(last) if self._lookup else (0, 0)
        if self._recent is not None:
            elsewhere = self._recent.best(last)
            if elsewhere[1] > agreed:
                corpus, (place, agreed) = self._recent, elsewhere
        if not agreed and self._lookup and self._length.trusted:
            place, agreed = own.best(last, least=1)
        return corpus.behind(place, most) if agreed else []


def _common(draft: Sequence[int], new: Sequence[int]) -> int:
    """How many of the draft's tokens were accepted."""
    accepted = 0
    for one, other in zip(draft, new, strict=False):
        if one != other:
            break
        accepted += 1
    return accepted
