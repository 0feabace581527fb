"""Serves a stand-in for somebody's HTTP endpoint, over real HTTP, while a test lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: Of a path, a body (empty for a GET) and headers: status, headers and body. Status 0: the connection ends without one.
Answer = Callable[[str, bytes, Mapping[str, str]], tuple[int, Mapping[str, str], bytes]]


@contextmanager
def served(answer: Answer, port: int = 0) -> Iterator[str]:
    """Yield the URL, without a path. A client that is gone is no error."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(b"")

        def do_POST(self) -> None:
            self.reply(self.rfile.read(int(self.headers["content-length"])))

        def reply(self, body: bytes) -> None:
            status, headers, data = answer(self.path, body, {name.lower(): text for name, text in self.headers.items()})
            if not status:
                self.close_connection = True
                return
            try:
                self.send_response(status)
                for name, value in (*headers.items(), ("content-length", str(len(data)))):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # the caller has gone: it waited too long, or read enough

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a caller that closed its connection

    with Server(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
