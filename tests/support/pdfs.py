"""PDFs for tests, written by hand: ordinary ones, and malicious ones."""

from __future__ import annotations

import io
import zlib


def pdf(*objects: bytes) -> bytes:
    """Return a PDF of these objects, given by their bodies. The first one is the catalog."""
    content, offsets = b"%PDF-1.7\n", list[int]()
    for number, body in enumerate(objects, 1):
        offsets.append(len(content))
        content += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    tail = b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, len(content))
    return content + b"xref\n0 %d\n0000000000 65535 f \n" % size + table + tail


def stream(data: bytes, more: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(data), more, data)


_FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
_FONTS = b"/Resources << /Font << /F 3 0 R >> >>"


def with_text(*pages: str) -> bytes:
    """Return a PDF with one page for each text."""
    kids, objects = list[bytes](), list[bytes]()
    for text in pages:
        number = 4 + len(objects)
        kids.append(b"%d 0 R" % number)
        words = b"BT /F 12 Tf 20 100 Td (%s) Tj ET" % text.encode("latin-1")
        page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] %s /Contents %d 0 R >>" % (_FONTS, number + 1)
        objects += [page, stream(words)]
    tree = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(kids), b" ".join(kids))
    return pdf(b"<< /Type /Catalog /Pages 2 0 R >>", tree, _FONT, *objects)


def _one_page(contents: bytes) -> bytes:
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] %s /Contents 5 0 R >>" % _FONTS
    tree = b"<< /Type /Pages /Count 1 /Kids [4 0 R] >>"
    return pdf(b"<< /Type /Catalog /Pages 2 0 R >>", tree, _FONT, page, contents)


def bomb(megabytes: int = 400) -> bytes:
    """Return a PDF with one page whose small contents unpack to `megabytes`."""
    packer, packed = zlib.compressobj(9), b""
    block = b"BT /F 1 Tf (a) Tj ET " * 50_000
    for _ in range(megabytes):
        packed += packer.compress(block)
    return _one_page(stream(packed + packer.flush(), b"/Filter /FlateDecode"))


def bomb_in_a_bomb(megabytes: int = 400) -> bytes:
    """Return a PDF with one page whose contents are packed twice and unpack to `megabytes`."""
    inner = zlib.compress(b"\0" * (megabytes << 20), 9)
    return _one_page(stream(zlib.compress(inner, 9), b"/Filter [/FlateDecode /FlateDecode]"))


def endless_pages() -> bytes:
    """Return a PDF whose page tree contains itself."""
    tree = b"<< /Type /Pages /Count 1000000 /Kids [2 0 R 2 0 R] >>"
    return pdf(b"<< /Type /Catalog /Pages 2 0 R >>", tree, _FONT)


def deep() -> bytes:
    """Return a PDF with deeply nested arrays."""
    return pdf(b"<< /Type /Catalog /Pages 2 0 R /X " + b"[" * 200_000 + b"]" * 200_000 + b" >>", b"<< /Type /Pages >>")


def encrypted(text: str, password: str) -> bytes:
    from pypdf import PdfReader, PdfWriter

    writer, output = PdfWriter(PdfReader(io.BytesIO(with_text(text)))), io.BytesIO()
    writer.encrypt(password, "owner", algorithm="RC4-128")
    writer.write(output)
    return output.getvalue()
