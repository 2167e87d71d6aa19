"""Documents of a request as an app takes them: under which name, and in which form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.errors import RegistrationError
from teola_plugin.server.errors import HttpError, bad_request
from teola_plugin.server.models.asked import Way
from teola_plugin.server.models.ways import CHAT_ENGINE, DEPLOYMENT, QUERY_ENGINE
from teola_plugin.server.settings import AppSettings


@dataclass(frozen=True, slots=True)
class DocumentInput:
    """`key`: of the app's input; empty where it takes no documents."""

    app: str
    key: str = ""
    form: str = "texts"
    """`texts`: a list of them; `text`: one; `documents`: texts with their names."""

    def given(self, value: Any, documents: Sequence[tuple[str, str]]) -> Any:
        """The app's input with documents, name and text each. Raises `HttpError`."""
        if documents:
            self.check()
        if not self.key or (not documents and self.form != "texts"):
            return value
        if not isinstance(value, Mapping):
            raise bad_request(f"the input of {self.app!r} is no object.", "give one", param="inputs")
        if documents and self.key in value:
            raise bad_request(
                f"inputs has {self.key!r}, and documents are given, too.", "give one of both", param="inputs"
            )
        return {self.key: self._formed(documents), **value}

    def check(self) -> None:
        """Raises `HttpError` where documents cannot be taken."""
        if not self.key:
            raise self._takes_none()

    def _formed(self, documents: Sequence[tuple[str, str]]) -> Any:
        if self.form == "text":
            return "\n\n".join(text for _, text in documents)
        if self.form == "documents":
            return [{"text": text, "metadata": {"source": name}} for name, text in documents]
        return [text for _, text in documents]

    def _takes_none(self) -> HttpError:
        hint = "ask an app that does; or say which of its inputs they are (`documents:` in the app's settings)"
        return bad_request(f"the app {self.app!r} takes no documents.", hint, param="documents", code="unsupported")


def document_input(name: str, settings: AppSettings, way: Way, fast: Any) -> DocumentInput:
    """Of a workflow the input whose kind is documents, unless the settings name one. Raises `RegistrationError`."""
    if way is DEPLOYMENT:
        return _of_workflow(name, settings.documents, fast)
    if settings.documents and way in (QUERY_ENGINE, CHAT_ENGINE):
        raise RegistrationError(
            f"app {name!r}: documents names {settings.documents!r}, and its input is a text.",
            hint="leave it out: an engine of LlamaIndex has an index of its own",
        )
    return DocumentInput(name, settings.documents)


def _of_workflow(name: str, key: str, fast: Any) -> DocumentInput:
    from teola_plugin.workflow.values import Kind

    forms = {Kind.DOCUMENTS: "documents", Kind.TEXT: "text"}
    inputs = {one.name: one.kind for one in fast.workflow.inputs}
    if key and key not in inputs:
        raise RegistrationError(
            f"app {name!r}: documents names {key!r}, which is no input of the workflow.",
            hint=f"its inputs are {', '.join(sorted(inputs)) or 'none'}",
        )
    found = key or next((one for one, kind in inputs.items() if kind is Kind.DOCUMENTS), "")
    return DocumentInput(name, found, forms.get(inputs[found], "texts") if found else "documents")
