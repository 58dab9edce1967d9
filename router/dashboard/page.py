"""The page itself: one document with style and script inside, allowed by their digests and by nothing else."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from router.client_request import Response

__all__ = ["page"]


def page() -> Response:
    """The same for everybody: what is to be seen, it asks for."""
    folder = files(__package__)
    style, script = ((folder / name).read_text("utf-8") for name in ("page.css", "page.js"))
    document = (folder / "page.html").read_text("utf-8").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = [
        ("Content-Security-Policy", policy),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cache-Control", "no-cache"),
    ]
    return Response(200, document.encode(), "text/html; charset=utf-8", headers)


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
