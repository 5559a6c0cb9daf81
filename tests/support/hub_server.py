"""A server on loopback that speaks the part of the Hub's protocol that downloads use, with faults on request.

    with HubServer() as hub:
        revision = hub.add_repo("owner/name", folder)
        download(HubSource("owner/name", revision, endpoint=hub.url), ...)

Large files go through a redirect to another host name, as on the Hub, with `X-Linked-*` headers and ranges.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

CHUNK_BYTES = 64 << 10
LFS_SUFFIXES = (".safetensors", ".model")


@dataclass
class Repo:
    """One repository at one commit."""

    folder: Path
    revision: str
    repo_type: str
    token: str = ""
    gated: bool = False


@dataclass
class Faults:
    """What goes wrong; paths are those of files in a repository.

    Attributes:
        cut_after: For each file, after how many bytes each next answer breaks off.
        wrong_bytes: How many next answers with a file have a bit flipped.
        whole_length: Files that the server holds to be only so long.
        busy: Statuses of the next answers, whatever is asked for, each with its Retry-After.
        busy_content: The same for requests of large files' content.
        no_ranges: Ranges are ignored.
        status: Status of all answers.
        bytes_per_second: Speed of each answer; 0: as fast as can be.
    """

    cut_after: dict[str, list[int]] = field(default_factory=dict)
    wrong_bytes: Counter[str] = field(default_factory=Counter)
    whole_length: dict[str, int] = field(default_factory=dict)
    busy: list[tuple[int, str]] = field(default_factory=list)
    busy_content: list[tuple[int, str]] = field(default_factory=list)
    no_ranges: bool = False
    status: int = 0
    bytes_per_second: float = 0


class HubServer:
    """The server; use it as a context manager.

    Attributes:
        url: Its address, for HF_ENDPOINT.
        fetched: File path -> how often its content was asked for.
        sent_bytes: File path -> bytes of content sent.
        tokens: Host name -> what stood in Authorization in requests to it.
        most_at_once: Largest number of files that were being sent at a time.
        faults: What goes wrong from now on.
        on_cut: Called before a connection is cut.
    """

    def __init__(self) -> None:
        self.url = self._content_url = ""
        self.fetched: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self.tokens: dict[str, set[str]] = {}
        self.most_at_once = self._sending = 0
        self.faults = Faults()
        self.on_cut: Callable[[], object] = lambda: None
        self._repos: dict[tuple[str, str], Repo] = {}
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def add_repo(
        self, repo_id: str, folder: Path, repo_type: str = "model", token: str = "", gated: bool = False
    ) -> str:
        """Serve the files of a folder and return the commit that stands for their content."""
        digest = hashlib.sha1()
        for path in _files_of(folder):
            digest.update(path.encode() + _sha256(folder / path).encode())
        self._repos[repo_type, repo_id] = Repo(folder, digest.hexdigest(), repo_type, token, gated)
        return digest.hexdigest()

    def revision(self, repo_id: str, repo_type: str = "model") -> str:
        """Return the commit that is served."""
        return self._repos[repo_type, repo_id].revision

    def __enter__(self) -> HubServer:
        self._thread.start()
        assert self._ready.wait(10), "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # ---- the server's thread ----

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(self._app(), shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        port = runner.addresses[0][1]
        self.url, self._content_url = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._watch])
        for prefix, repo_type in (("", "model"), ("/datasets", "dataset")):
            api = f"/api/{repo_type}s/{{owner}}/{{name}}/revision/{{revision}}"
            file = f"{prefix}/{{owner}}/{{name}}/resolve/{{revision}}/{{path:.+}}"
            app.router.add_get(api, self._handler(self._info, repo_type))
            access = f"/api/{repo_type}s/{{owner}}/{{name}}/auth-check"
            app.router.add_get(access, self._handler(self._may_read, repo_type))
            app.router.add_get(file, self._handler(self._resolve, repo_type))
        app.router.add_get("/content/{type}/{owner}/{name}/{path:.+}", self._content)
        return app

    @web.middleware
    async def _watch(self, request: web.Request, handler) -> web.StreamResponse:
        """Note the token of every request, and be busy when asked to."""
        self.tokens.setdefault(request.url.host or "", set()).add(request.headers.get("Authorization", ""))
        is_content = request.path.startswith("/content/")
        if faults := self.faults.busy_content if is_content else self.faults.busy:
            status, retry_after = faults.pop(0)
            return web.Response(status=status, headers={"Retry-After": retry_after} if retry_after else {})
        return await handler(request)

    def _handler(self, answer, repo_type: str):
        async def handle(request: web.Request) -> web.StreamResponse:
            repo_id = "{owner}/{name}".format(**request.match_info)
            repo = self._repos.get((repo_type, repo_id))
            if self.faults.status:
                return web.Response(status=self.faults.status)
            if request.headers.get("Authorization", "").endswith("_wrong"):
                return web.Response(
                    status=401, headers={"X-Error-Message": "Invalid credentials in Authorization header"}
                )
            if repo is None or (repo.token and not _has_token(request, repo) and not repo.gated):
                # The Hub does not tell a private repository from one that does not exist.
                return _refuse(401, "RepoNotFound", "Repository not found")
            if request.match_info.get("revision", "main") not in (repo.revision, "main"):
                return _refuse(404, "RevisionNotFound", "Invalid rev id")
            return await answer(request, repo, repo_id)

        return handle

    async def _info(self, request: web.Request, repo: Repo, repo_id: str) -> web.Response:
        siblings = [_sibling(repo.folder, path) for path in _files_of(repo.folder)]
        if "blobs" not in request.query:
            siblings = [{"rfilename": row["rfilename"]} for row in siblings]
        return web.json_response(
            {"_id": repo_id, "id": repo_id, "sha": repo.revision, "private": False, "siblings": siblings}
        )

    async def _may_read(self, request: web.Request, repo: Repo, repo_id: str) -> web.Response:
        if repo.gated and not _has_token(request, repo):
            return _refuse(403, "GatedRepo", f"Access to {repo_id} is restricted")
        return web.json_response({})

    async def _resolve(self, request: web.Request, repo: Repo, repo_id: str) -> web.StreamResponse:
        path = request.match_info["path"]
        if repo.gated and not _has_token(request, repo):
            return _refuse(403, "GatedRepo", "Access to this repository is restricted")
        if path not in _files_of(repo.folder):
            return _refuse(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": repo.revision}
        row = _sibling(repo.folder, path)
        if "lfs" in row:
            headers["X-Linked-Size"] = str(row["size"])
            headers["X-Linked-Etag"] = f'"{row["lfs"]["sha256"]}"'
            headers["Location"] = f"{self._content_url}/content/{repo.repo_type}/{repo_id}/{path}"
            return web.Response(status=302, headers=headers)
        headers["ETag"] = f'"{row["blobId"]}"'
        return await self._send(request, repo, path, headers)

    async def _content(self, request: web.Request) -> web.StreamResponse:
        key = request.match_info["type"], "{owner}/{name}".format(**request.match_info)
        return await self._send(request, self._repos[key], request.match_info["path"], {})

    async def _send(self, request: web.Request, repo: Repo, path: str, headers: dict) -> web.StreamResponse:
        """Send a file or a range of it, in chunks, with the faults that were asked for."""
        data = (repo.folder / path).read_bytes()[: self.faults.whole_length.get(path)]
        has_range = "Range" in request.headers and not self.faults.no_ranges
        wanted = request.http_range if has_range else slice(None)
        start, status = wanted.start or 0, 206 if has_range else 200
        if start >= len(data) > 0:
            return web.Response(status=416, headers={"Content-Range": f"bytes */{len(data)}"})
        body = data[wanted]
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{start + len(body) - 1}/{len(data)}"
        response = web.StreamResponse(status=status, headers={**headers, "Accept-Ranges": "bytes"})
        response.content_length = len(body)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        self.fetched[path] += 1
        self._sending += 1
        self.most_at_once = max(self.most_at_once, self._sending)
        # A client that is killed or has had enough is no error of the server.
        with contextlib.suppress(ConnectionResetError):
            await self._send_body(request, response, path, self._spoil(path, body))
        self._sending -= 1
        return response

    def _spoil(self, path: str, body: bytes) -> bytes:
        if self.faults.wrong_bytes[path] > 0:
            self.faults.wrong_bytes[path] -= 1
            return bytes([body[0] ^ 1]) + body[1:]
        return body

    async def _send_body(self, request: web.Request, response: web.StreamResponse, path: str, body: bytes) -> None:
        cuts = self.faults.cut_after.get(path, [])
        limit = cuts.pop(0) if cuts else len(body)
        for begin in range(0, min(limit, len(body)), CHUNK_BYTES):
            chunk = body[begin : min(begin + CHUNK_BYTES, limit)]
            await response.write(chunk)
            self.sent_bytes[path] += len(chunk)
            if self.faults.bytes_per_second:
                await asyncio.sleep(len(chunk) / self.faults.bytes_per_second)
        if limit < len(body):
            await asyncio.sleep(0.05)
            self.on_cut()
            request.transport.abort()


def _has_token(request: web.Request, repo: Repo) -> bool:
    return bool(repo.token) and request.headers.get("Authorization") == f"Bearer {repo.token}"


def _refuse(status: int, code: str, message: str) -> web.Response:
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    return web.json_response({"error": message}, status=status, headers=headers)


def _files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _sibling(folder: Path, path: str) -> dict:
    data = (folder / path).read_bytes()
    row = {
        "rfilename": path,
        "size": len(data),
        "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
    }
    if path.endswith(LFS_SUFFIXES):
        row["lfs"] = {"sha256": _sha256(folder / path), "size": len(data), "pointerSize": 134}
    return row


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
