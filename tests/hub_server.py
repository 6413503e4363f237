"""A server on this machine that speaks the few routes of the Hugging Face Hub that ffmem needs.

Repositories are in memory. As on the Hub, large files (Parquet) are stored by their SHA-256 and
served from another address after a redirect; small ones are git's.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_a_token_of_the_tests"


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, str]] = field(default_factory=dict)
    """The files of every commit: path to the key of a blob."""
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch, files):
        sha = hashlib.sha1(f"{len(self.commits)} {sorted(files.items())}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha


@dataclass
class Hub:
    """All repositories, and what was asked of the server."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    bytes_sent: int = 0
    """Bytes of files, whole or in part."""
    truncate: str = ""
    """A file of which the server sends the first half."""
    corrupt: str = ""
    """A file in which the server changes a byte in the middle of what it sends."""
    fail: str = ""
    """A route that answers 500."""
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def files(self, name, branch="main"):
        """Return the contents of the files of a repository."""
        repository = self.repositories[name]
        files = repository.commits[repository.branches[branch]]
        return {path: self.blobs[key] for path, key in files.items()}

    def put(self, name, files, private=False, branch="main"):
        """Make a repository with these files."""
        repository = self.repositories.setdefault(name, Repository(private))
        repository.commit(branch, {path: self.add(path, data) for path, data in files.items()})

    def add(self, path, data):
        key = hashlib.sha256(data).hexdigest() if is_large(path) else git_hash(data)
        self.blobs[key] = data
        return key


def is_large(path):
    return path.endswith(".parquet")


def git_hash(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.route("GET")

    def do_HEAD(self):
        self.route("HEAD")

    def do_POST(self):
        self.route("POST")

    def do_PUT(self):
        self.route("PUT")

    def route(self, method):
        parts = urlsplit(self.path)
        path, self.query = unquote(parts.path), parse_qs(parts.query)
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = self.read_chunks()
        self.hub.requests.append((method, path))
        if self.hub.fail and self.hub.fail in path:
            return self.answer(400, {"error": "the server of the tests fails here"})
        name = r"(?P<name>[^/]+/[^/]+?)"
        for pattern, handle in (
            (r"/api/repos/create", self.create),
            (r"/api/validate-yaml", self.validate),
            (rf"/api/datasets/{name}/preupload/(?P<branch>.+)", self.preupload),
            (rf"/api/datasets/{name}/commit/(?P<branch>.+)", self.commit),
            (rf"/api/datasets/{name}/branch/(?P<branch>.+)", self.make_branch),
            (rf"/api/datasets/{name}(/revision/(?P<revision>.+))?", self.info),
            (rf"/datasets/{name}\.git/info/lfs/objects/batch", self.batch),
            (r"/upload/(?P<key>\w+)", self.upload),
            (rf"/datasets/{name}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", self.resolve),
            (r"/cdn/(?P<key>\w+)/(?P<file>.+)", self.send_large),
        ):
            if found := re.fullmatch(pattern, path):
                return handle(**found.groupdict())
        return self.answer(404, {"error": f"no route {path}"})

    def read_chunks(self):
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(self, status, content=None, headers=None):
        data = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def has_token(self):
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def find(self, name, revision="main"):
        """Return a repository and its commit; None after an answer that says what is missing."""
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.has_token):
            headers = {"X-Error-Code": "RepoNotFound"}
            self.answer(404 if self.has_token else 401, {"error": "not found"}, headers)
            return None
        sha = repository.branches.get(revision, revision)
        if sha not in repository.commits:
            self.answer(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
            return None
        return repository, sha

    # Writing

    def create(self):
        if not self.has_token:
            return self.answer(401, {"error": "Invalid username or password."})
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.hub.url}/datasets/{name}"
        if name in self.hub.repositories:
            return self.answer(409, {"error": "You already created this repo", "url": url})
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.put(name, {".gitattributes": b"*.parquet filter=lfs"}, private)
        return self.answer(200, {"url": url, "name": name})

    def validate(self):
        text = json.loads(self.body)["content"]
        bad = not text.startswith("---\n")
        return self.answer(200, {"errors": [{"message": "no YAML"}] if bad else [], "warnings": []})

    def make_branch(self, name, branch):
        if (found := self.find(name)) is None:
            return None
        repository, sha = found
        if branch in repository.branches:
            return self.answer(409, {"error": "Reference already exists"})
        repository.branches[branch] = sha
        return self.answer(200, {})

    def preupload(self, name, branch):
        if (found := self.find(name, branch)) is None:
            return None
        there = found[0].commits[found[1]]
        files = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if is_large(one["path"]) else "regular",
                "shouldIgnore": False,
                **({"oid": there[one["path"]]} if one["path"] in there else {}),
            }
            for one in json.loads(self.body)["files"]
        ]
        return self.answer(200, {"files": files})

    def batch(self, name):
        if not self.has_token:
            return self.answer(401, {"error": "no token"})
        objects = []
        for one in json.loads(self.body)["objects"]:
            actions = {"upload": {"href": f"{self.hub.url}/upload/{one['oid']}"}}
            missing = one["oid"] not in self.hub.blobs
            objects.append(one | ({"actions": actions} if missing else {}))
        return self.answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, key):
        assert hashlib.sha256(self.body).hexdigest() == key
        self.hub.blobs[key] = self.body
        self.answer(200)

    def commit(self, name, branch):
        if (found := self.find(name, branch)) is None:
            return None
        if not self.has_token:
            return self.answer(403, {"error": "you may not write"})
        repository, sha = found
        header, *operations = map(json.loads, self.body.splitlines())
        parent = header["value"].get("parentCommit")
        if parent not in (None, sha):
            return self.answer(412, {"error": "the branch has moved"})
        files = dict(repository.commits[sha])
        for one in operations:
            value = one["value"]
            if one["key"] == "file":
                data = base64.b64decode(value["content"])
                files[value["path"]] = self.hub.add(value["path"], data)
            elif one["key"] == "lfsFile":
                assert value["oid"] in self.hub.blobs
                files[value["path"]] = value["oid"]
            else:
                del files[value["path"]]
        sha = repository.commit(branch, files)
        url = f"{self.hub.url}/datasets/{name}/commit/{sha}"
        return self.answer(200, {"commitUrl": url, "commitOid": sha})

    # Reading

    def info(self, name, revision=None):
        if (found := self.find(name, revision or "main")) is None:
            return None
        repository, sha = found
        siblings = []
        for path, key in sorted(repository.commits[sha].items()):
            one = {"rfilename": path}
            if "blobs" in self.query:
                size = len(self.hub.blobs[key])
                one |= {"size": size, "blobId": key[:40]}
                if is_large(path):
                    one["lfs"] = {"size": size, "sha256": key, "pointerSize": 130}
            siblings.append(one)
        about = {"_id": "1", "id": name, "sha": sha, "private": repository.private}
        return self.answer(
            200, about | {"siblings": siblings, "downloads": 0, "likes": 0, "tags": []}
        )

    def resolve(self, name, revision, file):
        if (found := self.find(name, revision)) is None:
            return None
        repository, sha = found
        files = repository.commits[sha]
        if file not in files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}
            return self.answer(404, {"error": "no entry"}, headers)
        key = files[file]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{key}"'}
        if not is_large(file):
            return self.send_blob(key, file, headers)
        size = str(len(self.hub.blobs[key]))
        headers |= {"X-Linked-Etag": f'"{key}"', "X-Linked-Size": size}
        # Another host, as on the Hub: clients must not send their token there.
        other = self.hub.url.replace("127.0.0.1", "localhost")
        headers["Location"] = f"{other}/cdn/{key}/{file}"
        return self.answer(302, None, headers)

    def send_large(self, key, file):
        assert "Authorization" not in self.headers
        self.send_blob(key, file)

    def send_blob(self, key, file, headers=None):
        data = self.hub.blobs[key]
        status, headers = 200, {"ETag": f'"{key}"', **(headers or {})}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            status, data = 206, data[first : last + 1]
        if self.hub.truncate == file:
            data = data[: len(data) // 2]
        if self.hub.corrupt == file and data:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            with self.hub.lock:
                self.hub.bytes_sent += len(data)
            self.wfile.write(data)


def start():
    """Return a hub that serves, and the server to shut down."""
    hub = Hub()
    handler = type("HubHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return hub, server
