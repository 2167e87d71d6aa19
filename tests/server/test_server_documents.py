"""Tests of documents: uploaded, sent with a query, parsed safely, used by apps, kept, limited, deleted."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import pdfs
from support.service import RunningServer, key, running_server

from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.pool import EnginePool
from teola_plugin.server.documents.extract import text_of_html
from teola_plugin.server.documents.files import FileStore, MemoryFiles, PostgresFiles, StoredFile
from teola_plugin.server.documents.reading import Reader, kind_of
from teola_plugin.server.errors import HttpError
from teola_plugin.server.queries.store import PostgresStore
from teola_plugin.server.settings import DocumentSettings

ONE, OTHER = key("one"), key("other")
SMALL = key("small", max_upload=50, max_kept=60, uploads_per_minute=3)
PAGE = b"<!doctype html><html><head><title>t</title></head><body><h1>Cows</h1><p>eat <b>gr</b>ass</p></body></html>"
APPS = {
    "template": {"object": "support.served_apps:reads_documents"},
    "chain": {"object": "support.served_apps:joins_documents", "documents": "documents"},
    "plain": {"object": "support.served_apps:chain"},
}


def llm() -> FakeLLM:
    return FakeLLM("llm", answer=lambda prompt, sampling: "said " + prompt.messages[-1].content)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    pool = EnginePool.local([llm(), FakeEmbedder(), FakeReranker(), FakeStore()])
    keys = [ONE.settings, OTHER.settings, SMALL.settings]
    with running_server(pool, apps=APPS, keys=keys, documents={"per_query": 3, "max_bytes": 100_000}) as server:
        yield server


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client(ONE.secret) as client:
        yield client


def upload(http: httpx.Client, name: str, data: bytes, type: str = "application/octet-stream", **form: Any) -> Any:
    return http.post("/v1/files", files={"file": (name, data, type)}, data=form)


def inline(name: str, data: bytes, type: str = "") -> dict[str, Any]:
    return {"filename": name, "file_data": f"data:{type};base64,{base64.b64encode(data).decode()}"}


def answered(http: httpx.Client, **query: Any) -> dict[str, Any]:
    accepted = http.post("/v1/queries", json=query)
    assert accepted.status_code == 202, accepted.text
    reply: dict[str, Any] = http.get(f"/v1/queries/{accepted.json()['id']}", params={"wait": 20}).json()
    return reply


# ------------------------------------------------------------ what a document is


@pytest.mark.parametrize(
    ("data", "declared", "name", "kind"),
    [
        (b"plain", "", "", "text"),
        (b"# title", "text/markdown", "a.md", "text"),
        ("hé".encode("utf-16"), "", "", "text"),
        (PAGE, "", "", "html"),
        (b"<p>a</p>", "text/html", "", "html"),
        (PAGE, "text/plain; charset=utf-8", "", "text"),
        (b"<!-- x -->\n<HTML>", "application/octet-stream", "", "html"),
        (pdfs.with_text("x"), "", "", "pdf"),
        (b"\n" + pdfs.with_text("x"), "application/pdf", "x.pdf", "pdf"),
        (b'<html><meta charset="latin-1">\xe9', "", "", "html"),
    ],
)
def test_document_kind_is_detected_from_its_content(data: bytes, declared: str, name: str, kind: str) -> None:
    assert kind_of(data, declared, name) == kind


@pytest.mark.parametrize(
    ("data", "declared", "name", "status"),
    [
        (PAGE, "application/pdf", "", 400),
        (pdfs.with_text("x"), "text/plain", "", 400),
        (pdfs.with_text("x"), "text/html", "", 400),
        (b"no pdf", "", "a.pdf", 400),
        (b"PK\x03\x04\x00\x00", "", "a.docx", 415),
        (b"\x89PNG\r\n\x1a\n\x00", "image/png", "", 415),
        (b"plain", "image/png", "", 415),
        (b"\x7fELF\x02", "text/plain", "", 415),
        (b"\xe9\xe8", "", "", 415),
        (b"<html><meta charset=utf-7>+ADw-script+AD4-", "", "", 415),
        (b"<html><meta charset='unicode_escape'>", "", "", 415),
    ],
)
def test_unsupported_documents_are_refused(data: bytes, declared: str, name: str, status: int) -> None:
    with pytest.raises(HttpError) as error_info:
        kind_of(data, declared, name)
    assert error_info.value.status == status


def test_text_of_a_page_is_extracted() -> None:
    page = """<html><head><title>t</title><style>a{}</style></head><body onload="x()">
    <script>var a = "<p>no</p>";</script><h1>One &amp; two</h1><p>a<b>b</b>
    c<br>d</p><noscript>no</noscript><ul><li>e</li><li>f</ul><template>no</template><svg><text>no</text></svg>
    <table><tr><td>1</td><td>2</td></tr></table><iframe src="http://x/">no</iframe><!-- no --><p>last"""
    assert text_of_html(page) == "One & two\n\nab c\nd\n\ne\nf\n\n1\t2\n\nlast"
    assert text_of_html("<head><title>no</title><body>yes") == "yes"


# ------------------------------------------------------------ documents that are made to do harm

HARM = {
    "a bomb": (pdfs.bomb(90), "broken_document"),
    "a bomb in a bomb": (pdfs.bomb_in_a_bomb(90), "broken_document"),
    "endless pages": (pdfs.endless_pages(), "broken_document"),
    "deep": (pdfs.deep(), "broken_document"),
    "a password": (pdfs.encrypted("x", "secret"), "encrypted_document"),
    "too many pages": (pdfs.with_text(*"abcd"), "too_many_pages"),
    "too long": (pdfs.with_text(*["a" * 400] * 3), "document_too_long"),
    "no end of a comment": (b"<html>" + b"<!--" * 200_000, "document_too_complex"),
    "garbage": (b"%PDF-1.4 \x00\xff", "broken_document"),
    "nothing in it": (pdfs.with_text(""), "no_text"),
}


async def test_hostile_documents_fail_within_their_limits() -> None:
    reader = Reader(DocumentSettings(max_pages=3, max_characters=1000, seconds=2, at_once=2))
    for name, (data, code) in HARM.items():
        began = time.monotonic()
        with pytest.raises(HttpError) as error_info:
            await reader.read(name, data)
        slow = {"document_too_complex"} if code == "broken_document" else set()  # on a busy machine
        assert error_info.value.status == 400 and error_info.value.code in {code, *slow}, name
        assert time.monotonic() - began < 30
    assert (await reader.read("x", pdfs.encrypted("open", ""))).text == "open"


def test_memory_of_the_pdf_reader_is_limited(tmp_path: Path) -> None:
    """Its own limits off, the reader of PDFs is stopped by those of its process."""
    script = f"""
import json, sys
from pypdf import filters
for name in dir(filters):
    if "MAX" in name:
        setattr(filters, name, 1 << 40)
sys.path.insert(0, {str(Path(pdfs.__file__).parent)!r})
import pdfs
sys.path.pop(0)
from teola_plugin.server.documents import extract
data = pdfs.bomb_in_a_bomb(300)
extract.confine(256 << 20, 20)
print(json.dumps(extract.read("pdf", data, 9, 9)))
try:
    __import__("socket").create_connection(("127.0.0.1", 9))
except PermissionError as error:
    print("refused")
try:
    open({str(tmp_path / "written")!r}, "w")
except OSError:
    print("not written")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    first_line, *rest = done.stdout.splitlines()
    assert json.loads(first_line)["error"] == "document_too_complex", done.stderr
    assert rest == ["refused", "not written"], done.stderr


async def test_documents_beyond_the_queue_limit_get_429() -> None:
    import asyncio

    reader = Reader(DocumentSettings(at_once=1, waiting=1, seconds=20))
    results = await asyncio.gather(*(reader.read("x", pdfs.with_text("a")) for _ in range(4)), return_exceptions=True)
    refusal = [one for one in results if isinstance(one, HttpError)]
    assert [one.status for one in refusal] == [429, 429]
    assert all(one.headers["Retry-After"] for one in refusal)


# ------------------------------------------------------------ files


def test_files_follow_the_openai_protocol(server: RunningServer) -> None:
    client = server.openai(ONE.secret)
    created = client.files.create(file=("cows.pdf", io.BytesIO(pdfs.with_text("Cows eat grass"))), purpose="user_data")
    other = client.files.create(
        file=("b.txt", b"plain"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert created.id.startswith("file-") and created.filename == "cows.pdf" and created.status == "processed"
    assert 3500 < other.expires_at - time.time() <= 3600
    assert {created.id, other.id} <= {one.id for one in client.files.list(limit=1)}
    assert client.files.retrieve(created.id).bytes == created.bytes
    assert client.files.content(created.id).text == "Cows eat grass"
    assert client.files.delete(created.id).deleted
    with pytest.raises(Exception, match="404"):
        client.files.retrieve(created.id)
    client.files.delete(other.id)
    client.close()


@pytest.mark.parametrize(
    ("form", "status", "message"),
    [
        ({"data": {"purpose": "user_data"}}, 400, "no document"),
        ({"files": {"file": ("a.bin", b"\0\1")}}, 415, "no text"),
        ({"files": {"file": ("a.txt", b"x")}, "data": {"purpose": "fine-tune"}}, 400, "fine-tune"),
        ({"files": {"file": ("a.txt", b"x" * 100_001)}}, 413, "larger"),
        ({"files": {"file": ("a.txt", b"  ")}}, 400, "no text"),
        ({"files": {"file": ("a.txt", b"x")}, "data": {"expires_after[seconds]": "soon"}}, 400, "seconds"),
        ({"json": {"file": "x"}}, 400, "no document"),
        ({"content": b"--x\r\nbroken", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, 400, ""),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, ""),
    ],
)
def test_invalid_uploads_are_refused(http: httpx.Client, form: dict[str, Any], status: int, message: str) -> None:
    reply = http.post("/v1/files", **form)
    assert (reply.status_code, message in reply.text) == (status, True), reply.text
    assert sorted(reply.json()["error"]) == ["code", "message", "param", "type"]


def test_upload_without_key_gets_401(server: RunningServer) -> None:
    with server.client() as nobody:
        assert upload(nobody, "a.txt", b"x").status_code == 401


def test_file_names_are_stripped_of_folders(http: httpx.Client) -> None:
    names = {"../../etc/passwd": "passwd", "C:\\a\\b.txt": "b.txt", "a" * 500: "a" * 200}
    for sent_name, name in names.items():
        file = upload(http, sent_name, b"x").json()
        assert file["filename"] == name
        http.delete(f"/v1/files/{file['id']}")


def test_document_limits_of_a_key_are_enforced(server: RunningServer) -> None:
    with server.client(SMALL.secret) as http:
        assert upload(http, "a.txt", b"x" * 51).status_code == 413
        assert upload(http, "a.txt", b"x" * 40).status_code == 200
        results = upload(http, "a.txt", b"x" * 40)
        assert (results.status_code, results.json()["error"]["code"]) == (413, "files_full")
        assert upload(http, "a.txt", b"x").status_code == 429


def test_expired_files_are_deleted(server: RunningServer) -> None:
    with server.client(OTHER.secret) as http:
        id = upload(http, "a.txt", b"x", **{"expires_after[seconds]": "1"}).json()["id"]
        end = time.monotonic() + 10
        while http.get(f"/v1/files/{id}").status_code == 200 or http.get("/v1/files").json()["data"]:
            assert time.monotonic() < end
            time.sleep(0.1)


# ------------------------------------------------------------ models and apps


def test_model_gets_the_text_of_documents(server: RunningServer, http: httpx.Client) -> None:
    file_id = upload(http, "b.html", PAGE).json()["id"]
    parts = [
        {"type": "file", "file": inline("a.pdf", pdfs.with_text("Sheep"))},
        {"type": "file", "file": {"file_id": file_id}},
    ]
    body = {"model": "llm", "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]}
    expected = (
        'said <document name="a.pdf">\nSheep\n</document>\n'
        '<document name="b.html">\nCows\n\neat grass\n</document>\nWhat?'
    )
    assert http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == expected
    client = server.openai(ONE.secret)
    parts = [
        {"type": "input_file", **inline("a.pdf", pdfs.with_text("Sheep"))},
        {"type": "input_file", "file_id": file_id},
    ]
    messages = [{"role": "user", "content": [*parts, {"type": "input_text", "text": "What?"}]}]
    assert client.responses.create(model="llm", input=messages).output_text == expected
    client.close()
    assert (
        answered(
            http, model="llm", input="What?", documents=[inline("a.pdf", pdfs.with_text("Sheep")), {"file_id": file_id}]
        )["answer"]["text"]
        == expected
    )


def test_workflow_gets_documents_and_settings(http: httpx.Client) -> None:
    query: dict[str, Any] = {
        "model": "template",
        "input": "cows",
        "documents": [inline("a.txt", b"Cows eat grass. " * 40)],
    }
    reply = answered(http, **query)
    assert reply["status"] == "done", reply
    assert len(reply["answer"]["sources"]) == 2
    one = answered(http, **query, settings={"found.k": 1, "answer.prompt": "Only {context} to {question}"})
    assert len(one["answer"]["sources"]) == 1
    assert one["answer"]["text"].startswith("said Only Cows")
    chat = {
        "model": "template",
        "messages": [
            {
                "role": "user",
                "content": [{"type": "file", "file": query["documents"][0]}, {"type": "text", "text": "cows"}],
            }
        ],
    }
    assert (
        http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
        == reply["answer"]["text"]
    )


def test_model_entry_lists_inputs_and_settings_of_an_app(http: httpx.Client) -> None:
    reply = http.get("/v1/models/template").json()
    assert (reply["documents"], sorted(reply["inputs"]["required"])) == ("documents", ["documents", "question"])
    assert "k" in reply["settings"]["properties"]["found"]["properties"]
    assert http.get("/v1/models/chain").json()["documents"] == "documents"
    assert "documents" not in http.get("/v1/models/plain").json()


def test_chain_gets_the_text_of_documents(http: httpx.Client) -> None:
    texts = [{"name": "a", "text": "one"}, {"text": "two {{x}}"}]
    assert answered(http, model="chain", input="q", documents=texts)["answer"]["text"] == "q: one|two {{x}}"
    assert answered(http, model="chain", inputs={"question": "q"}, documents=texts[:1])["answer"]["text"] == "q: one"
    assert answered(http, model="chain", input="q")["answer"]["text"] == "q: "
    with_variable = answered(http, model="chain", input="{{y}}", documents=texts[1:], variables={"y": "z"})
    assert with_variable["answer"]["text"] == "z: two {{x}}"


def test_query_is_accepted_as_multipart_form(http: httpx.Client) -> None:
    files = [
        ("documents", ("a.pdf", pdfs.with_text("Sheep"), "application/pdf")),
        ("documents", ("b.txt", b"two", "text/plain")),
    ]
    accepted = http.post("/v1/queries", data={"query": json.dumps({"model": "chain", "input": "q"})}, files=files)
    assert accepted.status_code == 202, accepted.text
    reply = http.get(f"/v1/queries/{accepted.json()['id']}", params={"wait": 20}).json()
    assert reply["answer"]["text"] == "q: Sheep|two"


def test_documents_of_a_query_are_deleted_when_it_ends(server: RunningServer, http: httpx.Client) -> None:
    reply = answered(http, model="chain", input="q", documents=[inline("a.txt", b"one")])
    assert reply["status"] == "done"
    store = server.server.config.app.state.documents.store
    assert not [one for one in store._files.values() if one.query]
    refusal = http.post(
        "/v1/queries", json={"model": "chain", "input": "q", "documents": [{"text": "a"}, {"file_id": "file-none"}]}
    )
    assert refusal.status_code == 404
    assert not [one for one in store._files.values() if one.query]


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ({"model": "plain", "input": "x", "documents": [{"text": "a"}]}, 400, "takes no documents"),
        ({"model": "plain", "input": "x", "settings": {"k": 1}}, 400, "no settings"),
        ({"model": "llm", "input": "x", "settings": {"k": 1}}, 400, "no settings"),
        ({"model": "template", "input": "x", "documents": [{"text": "a"}], "settings": {"nothing": 1}}, 400, "nothing"),
        (
            {"model": "template", "input": "x", "documents": [{"text": "a"}], "settings": {"found.k": -1}},
            400,
            "found.k",
        ),
        ({"model": "chain", "inputs": {"question": "q", "documents": []}, "documents": [{"text": "a"}]}, 202, ""),
        ({"model": "chain", "input": "x", "documents": [{"text": "a"}] * 4}, 400, "3 are taken"),
        ({"model": "chain", "input": "x", "documents": [{}]}, 400, "one of file_id"),
        ({"model": "chain", "input": "x", "documents": [{"text": "a", "url": "http://x"}]}, 400, "one of file_id"),
        ({"model": "chain", "input": "x", "documents": [{"file_data": "%%%"}]}, 400, "base64"),
        ({"model": "chain", "input": "x", "documents": [{"file_data": "data:text/plain,abc"}]}, 400, "base64"),
        ({"model": "chain", "input": "x", "documents": ["a"]}, 400, "documents"),
        ({"model": "chain", "input": "x", "documents": [{"file_id": "file-none"}]}, 404, "file-none"),
        ({"model": "chain", "input": "x", "documents": [{"url": "http://example.org/"}]}, 400, "fetches no documents"),
    ],
)
def test_invalid_documents_of_a_query_are_refused(
    http: httpx.Client, query: dict[str, Any], status: int, message: str
) -> None:
    reply = http.post("/v1/queries", json=query)
    assert (reply.status_code, message in reply.text) == (status, True), reply.text


# ------------------------------------------------------------ keeping


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
async def store(request: pytest.FixtureRequest) -> Any:
    if request.param == "memory":
        yield MemoryFiles()
        return
    stored = PostgresStore(request.getfixturevalue("postgres_dsn"), f"pool-{time.monotonic_ns()}")
    await stored.open()
    yield PostgresFiles(stored)
    await stored.close()


def file(id: str, tenant: str = "one", **more: Any) -> StoredFile:
    fields = {"purpose": "user_data", "kind": "text", "bytes": 5, "created": 1.0, "expires": None, "text": "hello"}
    return StoredFile(id=id, tenant=tenant, name="a", **{**fields, **more})


async def test_file_stores_keep_expire_and_delete_files(store: FileStore) -> None:
    await store.open()
    await store.open()
    for one in (file("a"), file("a", "other", text="hi"), file("b", expires=10.0, created=2.0), file("c", query="q_1")):
        await store.put(one)
    file_ = await store.get("one", "a")
    assert file_ == file("a")
    assert await store.get("two", "a") is None
    assert [one.id for one in await store.uploaded("one")] == ["b", "a"]
    assert (await store.total_bytes("one"), await store.total_bytes("two")) == (15, 0)
    assert (await store.expire(9.0), await store.expire(10.0)) == (0, 1)
    assert await store.delete("one", query="q_2") == 0
    assert await store.delete("one", query="q_1") == 1
    assert await store.delete("one", "a") == 1
    assert await store.delete("other") == 1
