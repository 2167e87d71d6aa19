"""The requests and replies of each service. Pure: a query in, a request out; JSON in, hits out.

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

ServiceResult = Mapping[str, Any]
"""One result, as the service gives it."""


@dataclass(frozen=True, slots=True)
class ServiceRequest:
    """An HTTP request without the service's address and the key."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    json: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SearchService:
    """A web search service. `ask(query, k, options)` makes a request; `results` returns the list in a reply."""

    name: str
    base_url: str
    """The address; "" if each user has one of their own."""
    url_variable: str
    """Environment variable with the address, if it is not an argument."""
    key_variable: str
    """Environment variable with the key; empty for a service without keys."""
    key_header: str
    key_prefix: str
    most: int
    """Maximum results of one request."""
    ask: Callable[[str, int, Mapping[str, Any]], ServiceRequest]
    results: Callable[[Any], Sequence[ServiceResult]]
    text: str
    """Name of the field with a result's text."""
    published: str
    escaped: bool = False
    """True if texts are HTML."""

    def hits(self, answer: Any, k: int) -> tuple[Hit, ...]:
        """Return at most `k` hits, best first. Raise ValueError for a reply of another form."""
        try:
            results = [result for result in self.results(answer) if result.get("url")][:k]
            return tuple(self._hit(result, rank) for rank, result in enumerate(results, start=1))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the answer is not what {self.name} says: {error!r}") from error

    def _hit(self, result: ServiceResult, rank: int) -> Hit:
        """Return one result of the service as a hit; without a score of its own, it gets 1 over its rank from 1."""
        metadata = {"source": result["url"], "title": self._plain(result.get("title"))}
        if when := result.get(self.published):
            metadata["published"] = str(when)
        score = result.get("score")
        score = score if isinstance(score, int | float) else 1.0 / rank
        return Hit(str(result["url"]), self._plain(result.get(self.text)), metadata, score)

    def _plain(self, text: Any) -> str:
        plain = "" if text is None else str(text)
        return html.unescape(plain) if self.escaped else plain


def _searxng(query: str, k: int, options: Mapping[str, Any]) -> ServiceRequest:
    return ServiceRequest("GET", "/search", {**options, "q": query, "format": "json"})


def _brave(query: str, k: int, options: Mapping[str, Any]) -> ServiceRequest:
    plain = {"text_decorations": "false", "result_filter": "web"}
    return ServiceRequest("GET", "/res/v1/web/search", {**plain, **options, "q": query, "count": k})


def _tavily(query: str, k: int, options: Mapping[str, Any]) -> ServiceRequest:
    return ServiceRequest("POST", "/search", json={**options, "query": query, "max_results": k})


def _results_field(answer: Any) -> Sequence[ServiceResult]:
    results: Sequence[ServiceResult] = answer["results"]
    return results


def _brave_results(answer: Any) -> Sequence[ServiceResult]:
    """Return the results of an answer. Brave's answers without results have no `web`."""
    if answer["type"] != "search":
        raise KeyError("type")
    results: Sequence[ServiceResult] = (answer.get("web") or {}).get("results", ())
    return results


SERVICES: Mapping[str, SearchService] = {
    "searxng": SearchService(
        "searxng", "", "SEARXNG_URL", "", "", "", 100, _searxng, _results_field, "content", "publishedDate"
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
        _brave_results,
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
        _results_field,
        "content",
        "published_date",
    ),
}
