"""PDFs by hand: one that is fine, and others that are hostile."""

from __future__ import annotations

import zlib

CATALOG = b"<</Type/Catalog/Pages 2 0 R>>"
SAYS = b"BT /F1 12 Tf 72 700 Td (Lima was founded in 1535.) Tj ET"


def pdf(*objects: bytes, trailer: bytes = b"") -> bytes:
    """The objects, numbered from 1; the first is the root."""
    body, table = b"%PDF-1.7\n", b"xref\n0 1\n0000000000 65535 f \n"
    for number, content in enumerate(objects, start=1):
        table += b"%d 1\n%010d 00000 n \n" % (number, len(body))
        body += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    end = b"trailer<</Size %d/Root 1 0 R%b>>\n" % (len(objects) + 1, trailer)
    return body + table + end + b"startxref\n%d\n%%%%EOF" % len(body)


def pages(data: bytes, keys: bytes = b"", *, num_pages: int = 1, trailer: bytes = b"") -> bytes:
    """So many pages of this content, a stream with these keys."""
    return pdf(
        CATALOG,
        b"<</Type/Pages/Kids[%b]/Count %d>>" % (b"3 0 R " * num_pages, num_pages),
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R"
        b"/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<<%b/Length %d>>stream\n%b\nendstream" % (keys, len(data), data),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        b"<</Filter/Standard/V 1/R 2/P -1/O<%b>/U<%b>>>" % (b"00" * 32, b"00" * 32),
        trailer=trailer,
    )


def _packed(data: bytes, keys: bytes = b"/Filter/FlateDecode") -> bytes:
    return pages(zlib.compress(data, 9), keys)


def hostile() -> dict[str, bytes]:
    """Hostile PDFs by kind."""
    twice = b"/Filter[/FlateDecode/FlateDecode]"
    return {
        "inflates": _packed(b" " * 100_000_000),
        "inflates twice": _packed(zlib.compress(b" " * 100_000_000, 9), twice),
        "many operators": _packed(b"q Q " * 5_000_000),
        "runs": pages(b"\x81a" * 4_000_000, b"/Filter/RunLengthDecode"),
        "circle": pdf(CATALOG, b"<</Type/Pages/Kids[2 0 R 2 0 R]/Count 2>>"),
        "100,000 pages": pages(SAYS, num_pages=100_000),
        "encrypted": pages(SAYS, trailer=b"/Encrypt 6 0 R/ID[<00><00>]"),
        "jbig2": pages(b"\x97JB2", b"/Filter/JBIG2Decode"),
        "nested": pages(b"", b"/A " + b"[" * 900_000),
        "slow": b"%PDF-1.7\n" + b"startxref\n5\n" * 200_000,
        "cut": pages(SAYS * 1000)[:9000],
    }
