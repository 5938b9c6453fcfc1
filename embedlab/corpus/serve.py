"""An index behind HTTP on this machine alone, so that it is opened once: POST /search, one query at a time.

curl -d '{"queries": ["how do wings give lift?"], "k": 5}' -H 'Content-Type: application/json' localhost:8000/search
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from embedlab.corpus.search import Index
from embedlab.errors import UserError
from embedlab.evaluation.core.vectors import Encoder

MOST_BYTES = 1 << 20
MOST_K = 1000
_REQUEST = '{"queries": ["how do wings give lift?"], "k": 10}'
_HOSTS = ("localhost", "127.0.0.1")


def server(index: Index, encoder: Encoder, port: int = 0) -> HTTPServer:
    """A server on the loopback, not yet started; its port is ``server_address[1]``.

    ``POST /search`` with JSON ``{"queries": [text, ...], "k": 10}`` gives ``{"hits": [[{"row", "score", "text"}, ...],
    ...]}``, rows from 1 on; a request that cannot be meant has status 400 and ``{"error": line}``. One that is not
    addressed to localhost, or is no JSON by its header, is refused: a web page cannot ask.

    Raises:
        UserError: the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_POST(self) -> None:
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            if host not in _HOSTS or self.headers.get_content_type() != "application/json":
                return self._answer(403, {"error": "only JSON, and only for localhost"})
            if self.path != "/search":
                return self._answer(404, {"error": "POST /search"})
            try:
                size = int(self.headers.get("Content-Length", ""))
                if not 0 <= size <= MOST_BYTES:
                    raise ValueError(f"more than {MOST_BYTES:,} bytes")
                hits = answered(index, encoder, json.loads(self.rfile.read(size)))
            except (UserError, ValueError, RecursionError) as error:
                return self._answer(400, {"error": str(error)})
            self._answer(200, {"hits": hits})

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, *_: object) -> None:
            pass  # a line a query would bury the server's own

    try:
        return HTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(
            f"cannot be listened to ({error.strerror})", key="port", value=port, fix="port=8001"
        ) from None


def answered(index: Index, encoder: Encoder, request: Any) -> list[list[dict[str, Any]]]:
    """The answer to a request, as `server` says.

    Raises:
        UserError: queries that are no list of texts, or an impossible k.
    """
    if not isinstance(request, dict) or not request.keys() <= {"queries", "k"}:
        raise UserError("a request has queries and perhaps k", fix=_REQUEST)
    queries, k = request.get("queries"), request.get("k", 10)
    if (
        not isinstance(queries, list)
        or not queries
        or not all(isinstance(q, str) and q.strip() for q in queries)
    ):
        raise UserError("must be a list of texts", key="queries", fix=_REQUEST)
    if type(k) is not int or not 1 <= k <= MOST_K:
        raise UserError(f"must be a whole number from 1 to {MOST_K}", key="k", value=k, fix=_REQUEST)

    return [[hit.plain() for hit in hits] for hits in index.search(encoder, queries, k)]
