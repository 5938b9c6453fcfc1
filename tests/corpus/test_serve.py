"""A served index answers as `Index.search`, and refuses what cannot be meant, or comes from elsewhere."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embedlab.cli.main import main
from embedlab.corpus.search import Index
from embedlab.corpus.serve import MOST_BYTES, server
from embedlab.errors import UserError
from tests.corpus.test_search import TEXTS, build
from tests.evaluation.helpers import HashedWords

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return build(tmp_path_factory.mktemp("served") / "index")


@pytest.fixture(scope="module")
def port(index: Index) -> Iterator[int]:
    with server(index, HashedWords()) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield int(serving.server_address[1])
        serving.shutdown()
        thread.join()


def ask(
    port: int, body: Any, path: str = "/search", headers: dict[str, str] = JSON
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("localhost", port, timeout=20)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_answers(index: Index, port: int) -> None:
    queries = ["red cat sat", "a bird"]
    status, answer = ask(port, {"queries": queries, "k": 3})
    assert status == 200
    wanted = index.search(HashedWords(), queries, 3)
    assert [[hit["text"] for hit in hits] for hits in answer["hits"]] == [
        [h.text for h in hits] for hits in wanted
    ]
    first = answer["hits"][0][0]
    assert (first["text"], TEXTS[first["row"] - 1], first["score"]) == ("red cat sat", "red cat sat", 1)
    assert len(ask(port, {"queries": ["old dog"]})[1]["hits"][0]) == 10


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "Expecting"),
        (b"\xff\xfe\x00", "decode"),
        (b"[" * 100_000, "recursion"),
        ([], "a request has queries"),
        ({"queries": ["a"], "index": "/etc"}, "a request has queries"),
        ({"queries": "a cat"}, "must be a list of texts (queries)"),
        ({"queries": []}, "must be a list of texts (queries)"),
        ({"queries": ["a", " "]}, "must be a list of texts (queries)"),
        ({"queries": ["a"], "k": 0}, "from 1 to 1000 (k=0)"),
        ({"queries": ["a"], "k": 10**9}, "from 1 to 1000"),
        ({"queries": ["a"], "k": True}, "from 1 to 1000"),
    ],
)
def test_requests_that_cannot_be_meant(port: int, body: Any, message: str) -> None:
    status, answer = ask(port, body)
    assert status == 400
    assert message in answer["error"]
    assert ask(port, {"queries": ["a cat"]})[0] == 200, "it goes on"


@pytest.mark.parametrize(
    ("path", "headers", "wanted"),
    [
        ("/search", JSON | {"Host": "evil.example"}, 403),
        ("/search", {"Content-Type": "text/plain"}, 403),
        ("/", JSON, 404),
        ("/search", JSON | {"Content-Length": str(MOST_BYTES + 1)}, 400),
        ("/search", JSON | {"Content-Length": "-1"}, 400),
    ],
)
def test_what_is_refused(port: int, path: str, headers: dict[str, str], wanted: int) -> None:
    assert ask(port, {"queries": ["a cat"]}, path, headers)[0] == wanted


def test_it_listens_to_this_machine_alone(index: Index) -> None:
    with server(index, HashedWords()) as serving:
        assert serving.server_address[0] == "127.0.0.1"
        with pytest.raises(UserError, match=r"cannot be listened to .*\(port="):
            server(index, HashedWords(), int(serving.server_address[1]))


def test_bad_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "serve", str(tmp_path / "nowhere")]) == 2
    assert "is no search index" in capsys.readouterr().err
    assert main(["search", "serve", str(tmp_path), "port=99999"]) == 2
    assert "(port=99999)" in capsys.readouterr().err
