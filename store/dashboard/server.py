"""The dashboard's application.

Each page has an address that can be shared, and its data as JSON under the same address with `.json`."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio.to_thread
import duckdb
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.config import Config
from pipeline.running.runs import SETTINGS, run_settings
from store.dashboard import pages, sandbox
from store.dashboard.access import COOKIE, HEADERS, Access
from store.dashboard.errors import PageError
from store.dashboard.gateway import ACTIONS, Gateway
from store.dashboard.history import History
from store.target import StoreError

_HERE = Path(__file__).parent
_BODY = 256 * 1024
"""Bytes of a form at most."""
SECTIONS = ("store", "gateway", "models", "ui")
"""The settings of a run that the pages need."""

Data = dict[str, Any]


class Dashboard:
    """The pages of one run."""

    def __init__(self, history: History, access: Access) -> None:
        self._history, self._access = history, access
        self._gateway = Gateway(history.config)
        self._templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"), autoescape=select_autoescape(), undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._templates.filters.update(number=_number, when=_when, short=_short, pretty=_pretty)
        lists: dict[str, Callable[[History, pages.Query], Data]] = {
            "overview": pages.overview, "groups": pages.groups, "trajectories": pages.trajectories,
            "checkpoints": pages.checkpoints, "judge": pages.judge,
        }  # fmt: skip
        single: dict[str, Callable[[History, str, pages.Query], Data]] = {
            "group": pages.group, "trajectory": pages.trajectory, "checkpoint": pages.checkpoint,
        }  # fmt: skip
        routes = [Route("/", self._home), Mount("/static", StaticFiles(directory=_HERE / "static"))]
        for name, load in lists.items():
            routes += [Route(f"/{name}{end}", self._list(name, load)) for end in ("", ".json")]
        for name, one in single.items():
            routes += [
                Route(f"/{name}/{{name:path}}.json", self._single(name, one)),
                Route(f"/{name}/{{name:path}}", self._single(name, one)),
            ]
        routes += [
            Route("/sql", self._sql), Route("/sql.json", self._sql),
            Route("/compare", self._compare), Route("/compare.json", self._compare),
            Route("/decisions", self._decisions), Route("/decisions.json", self._decisions),
            Route("/label/{group:path}", self._label, methods=["POST"]),
            Route("/sign-in", self._sign_in, methods=["GET", "POST"]),
            Route("/sign-out", self._sign_out, methods=["POST"]),
            Route("/policies/{model:path}", self._decide, methods=["POST"]),
        ]  # fmt: skip
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(_Headers)],
            exception_handlers={PageError: self._failed, StoreError: self._failed, duckdb.Error: self._failed,
                                404: self._failed, 405: self._failed},
            lifespan=self._life,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await self._gateway.close()
        self._history.close()

    # -- answering ---------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, page: str, load: Callable[[], Data]) -> Response:
        """Check the user, load the page's data in a thread, and render it as HTML or JSON."""
        key = self._admit(request)
        if key is None:
            return self._to_sign_in(request)
        data = await anyio.to_thread.run_sync(load)
        return self._render(request, page, data)

    def _render(self, request: Request, page: str, data: Data, status: int = 200) -> Response:
        if request.url.path.endswith(".json"):
            return Response(_json(data), status, media_type="application/json")
        link = request.url.path + ".json" + (f"?{request.url.query}" if request.url.query else "")
        text = self._templates.get_template(f"{page}.html").render(
            data, data=data, page_name=page, json_link=link, signed_in=COOKIE in request.cookies,
            run=data.get("run"), run_name=str(self._history.config.run_dir), query_of=request.query_params,
        )  # fmt: skip
        return HTMLResponse(text, status)

    def _admit(self, request: Request) -> str | None:
        self._access.check_origin(request)
        return self._access.key(request)

    def _to_sign_in(self, request: Request) -> Response:
        if request.url.path.endswith(".json"):
            raise PageError(401, "Send an operator's key of this run as bearer token.")
        return RedirectResponse("/sign-in", 303)

    async def _failed(self, request: Request, error: Exception) -> Response:
        status = getattr(error, "status", None) or getattr(error, "status_code", None) or 500
        message = getattr(error, "detail", None) or str(error)
        return self._render(request, "error", {"status": status, "message": message}, status)

    # -- pages -------------------------------------------------------------------------------------------------------

    async def _home(self, request: Request) -> Response:
        return RedirectResponse("/overview", 303)

    def _list(
        self, name: str, load: Callable[[History, pages.Query], Data]
    ) -> Callable[..., Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await self._answer(request, name, lambda: load(self._history, request.query_params))

        return answer

    def _single(
        self, name: str, load: Callable[[History, str, pages.Query], Data]
    ) -> Callable[..., Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            wanted = request.path_params["name"]
            return await self._answer(
                request, name, lambda: load(self._history, wanted, request.query_params)
            )

        return answer

    async def _sql(self, request: Request) -> Response:
        query = request.query_params.get("query", "")

        def load() -> Data:
            data: Data = {"query": query, "result": None, "error": ""}
            if query.strip():
                try:
                    data["result"] = sandbox.run(self._history.config.path(SETTINGS), query)
                except sandbox.SandboxError as error:
                    data["error"] = str(error)
            return data

        return await self._answer(request, "sql", load)

    async def _compare(self, request: Request) -> Response:
        query = request.query_params

        def load() -> Data:
            runs = self._runs()
            here = Path(self._history.config.run_dir).name
            sides = []
            for number in ("a", "b"):
                run, branch = query.get(f"run_{number}") or here, query.get(f"branch_{number}") or "main"
                if run not in runs:
                    raise PageError(404, f"There is no run {run[:80]!r} beside this one.")
                sides.append((run, branch))
            with contextlib.ExitStack() as opened:
                histories = {
                    run: self._history if run == here else opened.enter_context(
                        contextlib.closing(History(run_settings(runs[run], sections=SECTIONS)))
                    )
                    for run, _ in sides
                }  # fmt: skip
                data = pages.compare(
                    (histories[sides[0][0]], sides[0][1]), (histories[sides[1][0]], sides[1][1]), {}
                )
                known = {run: pages.branches(history) for run, history in histories.items()}
            return {**data, "runs": sorted(runs), "chosen": sides, "branches": known}

        return await self._answer(request, "compare", load)

    def _runs(self) -> dict[str, Path]:
        """The run and its neighbours that have a history, by name."""
        here = Path(self._history.config.run_dir)
        found = {folder.name: folder for folder in here.parent.glob("*/") if (folder / "store").is_dir()}
        return found | {here.name: here}

    async def _decisions(self, request: Request) -> Response:
        key = self._admit(request)
        policies = await self._gateway.policies(key) if key is not None else None

        def load() -> Data:
            return {**pages.decisions(self._history, request.query_params), "policies": policies}

        return await self._answer(request, "decisions", load)

    async def _decide(self, request: Request) -> Response:
        key = self._admit(request)
        if key is None:
            return self._to_sign_in(request)
        form = await self._form(request)
        action = form.pop("action", "")
        if action not in ACTIONS:
            raise PageError(400, f"action={action[:40]!r}: choose one of {', '.join(ACTIONS)}.")
        body: Data = {name: value for name, value in form.items() if value}
        if "percent" in body:
            body["percent"] = float(body["percent"])
        await self._gateway.decide(key, request.path_params["model"], action, body)
        return RedirectResponse("/decisions", 303)

    async def _label(self, request: Request) -> Response:
        """Record the scores of the form, whose fields are `score:<trajectory>` and `comment:<trajectory>`."""
        key = self._admit(request)
        if key is None:
            return self._to_sign_in(request)
        group, form = request.path_params["group"], await self._form(request)
        labels = []
        for field, text in form.items():
            what, _, trajectory = field.partition(":")
            if what == "score" and text.strip():
                comment = form.get(f"comment:{trajectory}", "").strip()
                labels.append({"trajectory": trajectory, "score": _score(text), "comment": comment})
        if not labels:
            raise PageError(400, "Give at least one run a score from 0 to 1.")
        body = {"labels": labels, "by": form.get("by", "").strip(), "source": "dashboard"}
        await self._gateway.label(key, group, body)
        return RedirectResponse(f"/group/{quote(group, safe='')}?labeled={len(labels)}", 303)

    # -- signing in --------------------------------------------------------------------------------------------------

    async def _sign_in(self, request: Request) -> Response:
        self._access.check_origin(request)
        if request.method == "GET":
            return self._render(request, "sign_in", {"error": ""})
        form = await self._form(request)
        response = RedirectResponse("/overview", 303)
        try:
            self._access.sign_in(form.get("key", "").strip(), response, request.url.scheme == "https")
        except PageError as error:
            return self._render(request, "sign_in", {"error": str(error)}, error.status)
        return response

    async def _sign_out(self, request: Request) -> Response:
        self._access.check_origin(request)
        self._access.sessions.close(request.cookies.get(COOKIE, ""))
        response = RedirectResponse("/sign-in", 303)
        response.delete_cookie(COOKIE)
        return response

    async def _form(self, request: Request) -> dict[str, str]:
        length = request.headers.get("content-length", "")
        if not length.isascii() or not length.isdigit() or int(length) > _BODY:
            raise PageError(413, f"A form has at most {_BODY} bytes.")
        return {name: str(value) for name, value in (await request.form(max_files=0)).items()}


class _Headers:
    """Adds the security headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in HEADERS.items()),
                ]
            await send(message)

        await self._app(scope, receive, with_headers)


def _score(text: str) -> float:
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not 0 <= score <= 1:
        raise PageError(400, f"A score is a number from 0 to 1, not {text[:40]!r}.")
    return score


# -- texts of values -----------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """What JSON can hold: no NaN, no bytes, times in ISO 8601."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, sandbox.Result):
        return _plain({"columns": value.columns, "types": value.types, "rows": value.rows, "cut": value.cut})
    return value


def _json(data: Data) -> bytes:
    return json.dumps(_plain(data), ensure_ascii=False, default=str).encode()


def _number(value: Any, digits: int = 3) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def _when(value: datetime | None) -> str:
    return value.strftime("%Y-%m-%d %H:%M:%S") if value else "–"


def _short(value: Any, length: int = 200) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def _pretty(text: Any) -> str:
    with contextlib.suppress(ValueError, TypeError):
        return json.dumps(
            json.loads(text) if isinstance(text, str) else _plain(text), indent=1, ensure_ascii=False
        )
    return str(text)


def make_app(config: Config) -> Starlette:
    """The application over a run. Raises `ConfigError`, `StoreError`."""
    return Dashboard(History(config), Access(config)).app
