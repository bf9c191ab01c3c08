"""Sends every kind of invalid request a few times and prints the statuses, as a process of its own.

python bad_traffic.py PORT TIMES
"""

from __future__ import annotations

import json
import sys
from http.client import HTTPConnection

LONG = 5_000_000  # characters
LIMIT = 8_000_000  # the body limit of the server, in bytes
EXPECTED = {
    "no text": 422,
    "ten thousand texts": 413,
    "a text of 5 MB": 422,
    "a text of 5 MB without spaces": 422,
    "more than the body's limit": 413,
    "NUL": 422,
    "a control character": 422,
    "half a surrogate pair": 422,
    "numbers for texts": 422,
    "nested lists": 422,
    "an object": 422,
    "a hundred thousand fields": 422,
    "a threshold that is no number": 422,
    "brackets without end": 400,
    "half a body": 400,
    "no JSON": 422,
}


def bodies() -> dict[str, bytes]:
    """Return the body of each kind."""
    inputs = {
        "no text": [],
        "ten thousand texts": ["a text"] * 10_000,
        "a text of 5 MB": "word " * (LONG // 5),
        "a text of 5 MB without spaces": "a" * LONG,
        "NUL": "a\x00b",
        "a control character": ["a text", "a\x1bb"],
        "half a surrogate pair": "\ud800",
        "numbers for texts": [1, 2.5, None, True] * 250,
        "nested lists": [[["a"]], ["a", "b"], []],
        "an object": {"text": "a"},
    }
    raw = {kind: json.dumps({"inputs": value}).encode() for kind, value in inputs.items()}
    fields = {f"f{number}": number for number in range(100_000)}
    raw["a hundred thousand fields"] = json.dumps(fields).encode()
    raw["a threshold that is no number"] = b'{"inputs": "a", "threshold": NaN}'
    raw["brackets without end"] = b"[" * 100_000
    raw["half a body"] = b'{"inputs": "a'
    raw["no JSON"] = b""
    raw["more than the body's limit"] = b" " * (LIMIT + 1)
    return raw


def main(port: int, times: int) -> None:
    """Send all bodies and print one JSON object that maps each kind to its statuses."""
    found: dict[str, list[int]] = {kind: [] for kind in EXPECTED}
    for _ in range(times):
        for kind, body in bodies().items():
            connection = HTTPConnection("127.0.0.1", port, timeout=120)
            headers = {"content-type": "application/json", "content-length": str(len(body))}
            # A body over the limit is refused by its Content-Length, so none of it is sent.
            connection.request("POST", "/predict", body if len(body) <= LIMIT else None, headers)
            response = connection.getresponse()
            problem = json.loads(response.read())
            assert problem["status"] == response.status, problem
            found[kind].append(response.status)
            connection.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
