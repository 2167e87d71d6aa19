"""How each service is asked, and what it answers. Pure: a query in, a request out; JSON in, hits out.

The forms are those of the services' own documents:

* SearXNG, `docs.searxng.org/dev/search_api.html`: GET `/search?q=...&format=json` (`json` must be among the formats in
  its settings);
* Brave, `api-dashboard.search.brave.com/app/documentation/web-search`: GET, key in `X-Subscription-Token`;
* Tavily, `docs.tavily.com/documentation/api-reference/endpoint/search`: POST, key as bearer token.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.requests.payloads import Hit

Found = Mapping[str, Any]
"""One result, as the service gives it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request, but for the service's address and the key."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    json: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SearchService:
    """One way of asking. `ask(query, k, options)` makes the request; `results` finds the list in an answer."""

    name: str
    base_url: str
    """Empty where everybody has one of their own."""
    url_variable: str
    """Environment variable with the address, where it is not given."""
    key_variable: str
    """Environment variable with the key; empty for a service without keys."""
    key_header: str
    key_prefix: str
    most: int
    """Results of one request."""
    ask: Callable[[str, int, Mapping[str, Any]], Asked]
    results: Callable[[Any], Sequence[Found]]
    text: str
    """Under which name a result has its text."""
    published: str
    escaped: bool = False
    """Whether texts are HTML."""

    def hits(self, answer: Any, k: int) -> tuple[Hit, ...]:
        """Best first, `k` at most. Raises `ValueError` for an answer of another form."""
        try:
            found = [one for one in self.results(answer) if one.get("url")][:k]
            return tuple(self._hit(one, rank) for rank, one in enumerate(found, start=1))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the answer is not what {self.name} says: {error!r}") from error

    def _hit(self, one: Found, rank: int) -> Hit:
        metadata = {"source": one["url"], "title": self._plain(one.get("title"))}
        if when := one.get(self.published):
            metadata["published"] = str(when)
        score = one.get("score")
        score = score if isinstance(score, int | float) else 1.0 / rank
        return Hit(str(one["url"]), self._plain(one.get(self.text)), metadata, score)

    def _plain(self, text: Any) -> str:
        plain = "" if text is None else str(text)
        return html.unescape(plain) if self.escaped else plain


def _searxng(query: str, k: int, options: Mapping[str, Any]) -> Asked:
    return Asked("GET", "/search", {**options, "q": query, "format": "json"})


def _brave(query: str, k: int, options: Mapping[str, Any]) -> Asked:
    plain = {"text_decorations": "false", "result_filter": "web"}
    return Asked("GET", "/res/v1/web/search", {**plain, **options, "q": query, "count": k})


def _tavily(query: str, k: int, options: Mapping[str, Any]) -> Asked:
    return Asked("POST", "/search", json={**options, "query": query, "max_results": k})


def _listed(answer: Any) -> Sequence[Found]:
    found: Sequence[Found] = answer["results"]
    return found


def _of_brave(answer: Any) -> Sequence[Found]:
    """Return the results of an answer. Brave's answers without results have no `web`."""
    if answer["type"] != "search":
        raise KeyError("type")
    found: Sequence[Found] = (answer.get("web") or {}).get("results", ())
    return found


SERVICES: Mapping[str, SearchService] = {
    "searxng": SearchService(
        "searxng", "", "SEARXNG_URL", "", "", "", 100, _searxng, _listed, "content", "publishedDate"
    ),
    "brave": SearchService(
        "brave",
        "https://api.search.brave.com",
        "",
        "BRAVE_SEARCH_API_KEY",
        "X-Subscription-Token",
        "",
        20,
        _brave,
        _of_brave,
        "description",
        "page_age",
        escaped=True,
    ),
    "tavily": SearchService(
        "tavily",
        "https://api.tavily.com",
        "",
        "TAVILY_API_KEY",
        "Authorization",
        "Bearer ",
        20,
        _tavily,
        _listed,
        "content",
        "published_date",
    ),
}
