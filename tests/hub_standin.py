"""A stand-in for the Hugging Face hub on loopback: what huggingface_hub 2.4 calls to make a repository and commit, and
to look for a file.

Source: huggingface_hub/hf_api.py (create_repo, model_info, _validate_yaml), _commit_api.py (preupload, commit), lfs.py
(batch, a single PUT), file_download.py (get_hf_file_metadata).
"""

from __future__ import annotations

import base64
import json
import re
import threading
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: Tokens and the owners that they may write to.
WRITES = {"hf_mine": ("me",), "hf_reads": ()}


@dataclass
class Repo:
    """A repository; `refuses`: commits to it."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    refuses: bool = False


class Hub:
    """The server, from its making to its `close`. `uses_lfs`: for weights, else they come within the commit."""

    def __init__(self, uses_lfs: bool = False) -> None:
        self.uses_lfs = uses_lfs
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.calls: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply(*hub.get(self.path, self.headers.get("Authorization", "")))

            def do_HEAD(self) -> None:
                name, _, file = self.path.removeprefix("/").partition("/resolve/main/")
                is_there = name in hub.repos and file in hub.repos[name].files
                self.send_response(200 if is_there else 404)
                if not is_there:
                    self.send_header("X-Error-Code", "EntryNotFound" if name in hub.repos else "RepoNotFound")
                    self.send_header("X-Error-Message", "Repository not found")
                self.end_headers()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.reply(*hub.post(self.path, body, self.headers.get("Authorization", "")))

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.reply(*hub.put(self.path, body))

            def reply(self, status: int, answer: Any) -> None:
                hub.calls.append(f"{self.command} {self.path} {status}")
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Content-Type", "application/json")
                if status == 401:
                    self.send_header("X-Error-Message", "Invalid credentials in Authorization header")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def get(self, path: str, authorization: str) -> tuple[int, Any]:
        name = path.partition("?")[0].removeprefix("/api/models/")
        if authorization.removeprefix("Bearer ") not in WRITES:
            return 401, {"error": "Invalid credentials in Authorization header"}
        if name not in self.repos:
            return 404, {"error": "Repository not found"}
        repo = self.repos[name]
        siblings = [{"rfilename": path} for path in repo.files]
        return 200, {"id": name, "modelId": name, "sha": "0" * 40, "private": repo.private, "siblings": siblings}

    def post(self, path: str, body: bytes, authorization: str) -> tuple[int, Any]:
        token = authorization.removeprefix("Bearer ")
        if token not in WRITES:
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            return self.create(json.loads(body), token)
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            return self.preupload(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(json.loads(body))
        if found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            return self.commit(found[1], [json.loads(line) for line in body.splitlines()])
        return 404, {"error": f"no {path} here"}

    def put(self, path: str, body: bytes) -> tuple[int, Any]:
        oid = path.rpartition("/")[2]
        if sha256(body).hexdigest() != oid:
            return 400, {"error": "other bytes"}
        self.objects[oid] = body
        return 200, {}

    def create(self, asked: dict[str, Any], token: str) -> tuple[int, Any]:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] not in WRITES[token]:
            return 403, {"error": f"You don't have the rights to create a model under {asked['organization']}"}
        if name in self.repos:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        self.repos[name] = Repo(asked["visibility"] == "private")
        return 200, {"url": f"{self.url}/{name}", "name": name}

    def preupload(self, asked: dict[str, Any]) -> tuple[int, Any]:
        def mode(path: str) -> str:
            return "lfs" if self.uses_lfs and path.endswith(".safetensors") else "regular"

        paths = [each["path"] for each in asked["files"]]
        return 200, {"files": [{"path": path, "uploadMode": mode(path), "shouldIgnore": False} for path in paths]}

    def batch(self, asked: dict[str, Any]) -> tuple[int, Any]:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.url}/objects/{each['oid']}"}}} for each in asked["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}

    def commit(self, name: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        repo = self.repos[name]
        if repo.refuses:
            return 403, {"error": "the test refuses"}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = self.objects[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40}
