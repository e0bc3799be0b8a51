"""Stands in for vLLM's API server: takes its flags, answers health, models and completions."""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    model = ""

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {"index": 0, "text": " world", "finish_reason": "stop"}
        self._answer({"id": "x", "object": "text_completion", "model": self.model, "choices": [choice]})

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    flags, _ = parser.parse_known_args()
    Handler.model = flags.served_model_name
    ThreadingHTTPServer(("127.0.0.1", flags.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
