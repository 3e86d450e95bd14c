"""The dashboard's application.

Each page has an address that can be shared, and its data as JSON under the same address with `.json`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import anyio.to_thread
import duckdb
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from jinja2.filters import do_urlencode
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.config import Config, ConfigError
from pipeline.running.installations import installation_settings, installations_under
from store.lake.storage import StoreError
from store.showing.dashboard import labels
from store.showing.dashboard.access import COOKIE, HEADERS, Access
from store.showing.dashboard.gateway import ACTIONS, Gateway
from store.showing.pages import checkpoints, groups, judge, overview, shadows, texts, trajectories, what_if
from store.showing.pages.errors import PageError, SignInError
from store.showing.pages.history import History

_HERE = Path(__file__).parent
_SAME_PAGE_AGAIN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Journeywork</title><meta http-equiv="refresh" content="0"></head>
<body><main><h1>Journeywork</h1><p>You followed a link. The page opens.</p></main></body></html>
"""
"""Answers a link on another site: the browser asks again, now from a page of the dashboard."""
_BODY = 256 * 1024
"""Bytes of a form at most."""
_SIDES = 6
"""Runs and branches that are compared at most."""
SECTIONS = ("store", "gateway", "models", "trainer", "feedback", "ui")
"""The settings of a run that the pages need."""

Data = dict[str, Any]

_LISTS: dict[str, Callable[..., Data]] = {
    "overview": overview.overview,
    "numbers": overview.numbers,
    "groups": groups.groups,
    "trajectories": trajectories.trajectories,
    "checkpoints": checkpoints.checkpoints,
    "judge": judge.judge,
    "shadows": shadows.shadows,
    "decisions": checkpoints.decisions,
    "whatif": what_if.what_if,
}
_SINGLE: dict[str, Callable[..., Data]] = {
    "group": groups.group,
    "trajectory": trajectories.trajectory,
    "checkpoint": checkpoints.checkpoint,
}
_JSON_DATA: dict[str, Callable[..., Data]] = {"overview": overview.with_curves}
"""Pages whose JSON holds more than their HTML."""
_WITH_POLICIES = ("overview", "numbers", "checkpoint", "decisions")
"""Pages that get what the gateway says of versions."""


class Dashboard:
    """The pages of one run: `app` answers."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError`, `StoreError`."""
        self._access, self._history, self._gateway = Access(config), History(config), Gateway(config)
        self._templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=select_autoescape(),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        filters = (texts.number, texts.when, texts.short, texts.pretty, texts.signed, texts.name, texts.counted)
        self._templates.filters.update(
            {filter_.__name__: filter_ for filter_ in filters}, code=_code, urlencode=_quoted
        )
        routes = [Route("/", _home), Mount("/static", StaticFiles(directory=_HERE / "static"))]
        for name, load in _LISTS.items():
            routes += [
                Route(f"/{name}", self._page(name, load)),
                Route(f"/{name}.json", self._page(name, _JSON_DATA.get(name, load))),
            ]
        routes += [Route(f"/{name}/{{name:path}}", self._page_of_one(name, load)) for name, load in _SINGLE.items()]
        routes += [
            *(Route(f"/compare{end}", self._compare) for end in ("", ".json")),
            Route("/label/{group:path}", self._label, methods=["POST"]),
            Route("/correct/{trajectory:path}", self._correct, methods=["POST"]),
            Route("/policies/{model:path}", self._decide, methods=["POST"]),
            Route("/sign-in", self._sign_in, methods=["GET", "POST"]),
            Route("/sign-out", self._sign_out, methods=["POST"]),
        ]
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(_Guard, access=self._access)],
            exception_handlers=dict.fromkeys((PageError, StoreError, duckdb.Error, 404, 405), self._failed),
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Close the history when the server stops."""
        yield
        self._history.close()

    # -- answering ---------------------------------------------------------------------------------------------------

    async def _answer(
        self, request: Request, page: str, load: Callable[[], Data], as_json: bool | None = None
    ) -> Response:
        """Check the user, load the page's data in a thread, and render it (`_render`). A page about versions gets what
        the gateway says they are now."""
        key = self._access.key(request)
        data = await anyio.to_thread.run_sync(load)
        if page in _WITH_POLICIES:
            data = {**data, "policies": await self._gateway.policies(key)}
        return self._render(request, page, data, as_json=as_json)

    def _render(
        self, request: Request, page: str, data: Data, status: int = 200, as_json: bool | None = None
    ) -> Response:
        """Return `data` as JSON, or as HTML by the template of `page`. By default the address decides: `.json` at its
        end asks for JSON."""
        if request.url.path.endswith(".json") if as_json is None else as_json:
            return Response(texts.as_json(data), status, media_type="application/json")
        link = request.url.path + ".json" + (f"?{request.url.query}" if request.url.query else "")
        text = self._templates.get_template(f"{page}.html").render(
            data,
            data=data,
            page_name=page,
            json_link=link,
            signed_in=COOKIE in request.cookies,
            run=data.get("run"),
            run_name=str(self._history.config.run_dir),
            query_of=request.query_params,
        )
        return HTMLResponse(text, status)

    async def _failed(self, request: Request, error: Exception) -> Response:
        """Return the page, or the JSON, of an error. A browser that has to sign in is sent to that page."""
        if isinstance(error, SignInError) and not request.url.path.endswith(".json"):
            return _redirect("/sign-in", "An operator's key is needed: programs send it as bearer token. ")
        status: int = getattr(error, "status", 0) or getattr(error, "status_code", 500)
        message = str(error)
        if isinstance(error, HTTPException):
            here = request.url.path[:200]
            message = f"There is no page {here!r}." if status == 404 else f"{request.method} is not for {here!r}."
        return self._render(request, "error", {"status": status, "message": message}, status)

    # -- pages -------------------------------------------------------------------------------------------------------

    def _page(self, page: str, load: Callable[..., Data]) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a page of `_LISTS`, whose data `load` returns."""

        async def answer(request: Request) -> Response:
            return await self._answer(request, page, lambda: load(self._history, request.query_params))

        return answer

    def _page_of_one(self, page: str, load: Callable[..., Data]) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a page of `_SINGLE`, whose data `load` returns for a name. The address `<name>.json` is
        the data of `<name>`; if there is none, it is the page of what is called `<name>.json`."""

        async def answer(request: Request) -> Response:
            def data_of(name: str) -> Callable[[], Data]:
                return lambda: load(self._history, name, request.query_params)

            name = request.path_params["name"]
            try:
                return await self._answer(request, page, data_of(name.removesuffix(".json")))
            except PageError as error:
                if error.status != 404 or not name.endswith(".json"):
                    raise
                with contextlib.suppress(PageError):
                    return await self._answer(request, page, data_of(name), as_json=False)
                raise

        return answer

    async def _compare(self, request: Request) -> Response:
        """Compare the parameters `side`, each `<run>/<branch>` or `<run>` for its branch `main`; without one, this run
        is shown alone."""
        requested, key = request.query_params.getlist("side"), self._access.key(request)
        return await self._answer(request, "compare", lambda: self._compared(requested, self._readable_runs(key)))

    def _compared(self, requested: list[str], runs: dict[str, Config]) -> Data:
        """Return the curves of the `requested` sides, and every side that can be chosen. Branches of a run can be
        chosen only once one of its sides is shown: to list them, its history has to be opened. `runs`: those that the
        user may read. Raises `PageError`."""
        here = Path(self._history.config.run_dir).name
        parts = (side.partition("/") for side in requested or [here])
        sides = list(dict.fromkeys((run, branch or "main") for run, _, branch in parts))
        if len(sides) > _SIDES:
            raise PageError(400, f"{len(sides)} runs and branches: choose {_SIDES} at most.")
        for run, _ in sides:
            if run not in runs:
                raise PageError(404, f"There is no run {run[:80]!r} beside this one that your key opens.")
        with contextlib.ExitStack() as opened:
            histories = {here: self._history}
            for run, _ in sides:
                if run not in histories:
                    histories[run] = opened.enter_context(contextlib.closing(History(runs[run])))
            shown = [
                {**overview.curves(histories[run], {"branch": branch}), "run": runs[run].run_dir}
                for run, branch in sides
            ]
            known = {name: overview.branches(history) for name, history in histories.items()}
        choices = [f"{run}/{branch}" for run in sorted(runs) for branch in known.get(run, ["main"])]
        selection = [f"{run}/{branch}" for run, branch in sides]
        return {"sides": shown, "runs": sorted(runs), "choices": choices, "selection": selection}

    def _readable_runs(self, key: str) -> dict[str, Config]:
        """Return, by folder name, the settings of this run and of those runs in the same parent folder that the user
        who has `key` may read. For this run `Access.key` has checked it."""
        here = Path(self._history.config.run_dir)
        runs = {here.name: self._history.config}
        for folder in installations_under(here.parent):
            with contextlib.suppress(ConfigError):  # a run that can't be read opens to nobody
                config = installation_settings(folder, sections=SECTIONS)
                if folder.name != here.name and self._access.may_read(config, key):
                    runs[folder.name] = config
        return runs

    async def _decide(self, request: Request) -> Response:
        """Send the decision of the form (promote, rollback, split, follow) about the version that a model's name stands
        for to the gateway. Fields left empty are not sent."""
        key = self._access.key(request)
        form = await self._form(request)
        action = form.pop("action", "")
        if action not in ACTIONS:
            raise PageError(400, f"action={action[:40]!r}: choose one of {', '.join(ACTIONS)}.")
        body: Data = {name: value for name, value in form.items() if value}
        if "percent" in body:
            try:
                body["percent"] = float(body["percent"])
            except ValueError:
                raise PageError(400, f"percent={body['percent'][:40]!r}: write a number from 0 to 100.") from None
        await self._gateway.decide(key, request.path_params["model"], action, body)
        return _redirect("/decisions?decided=1")

    async def _label(self, request: Request) -> Response:
        """Record the scores of the form (`store.showing.dashboard.labels`)."""
        key = self._access.key(request)
        group, form = request.path_params["group"], await self._form(request)
        bodies = labels.feedback_of_scores(form)
        for trajectory, body in bodies.items():
            await self._gateway.give_feedback(key, trajectory, body)
        query = urlencode({**request.query_params, "labeled": len(bodies)})
        return _redirect(f"/group/{quote(group, safe='')}?{query}")

    async def _correct(self, request: Request) -> Response:
        """Record what a call of a run should have answered."""
        key, trajectory = self._access.key(request), request.path_params["trajectory"]
        use = await self._gateway.give_feedback(key, trajectory, labels.correction(await self._form(request)))
        query = urlencode({**request.query_params, "corrected": use})
        return _redirect(f"/trajectory/{quote(trajectory, safe='')}?{query}")

    # -- signing in --------------------------------------------------------------------------------------------------

    async def _sign_in(self, request: Request) -> Response:
        """GET: the form. POST: open a session for the form's key; with a wrong key, show the form with the error."""
        if request.method == "GET":
            return self._render(request, "sign_in", {"error": ""})
        form = await self._form(request)
        response = _redirect("/overview")
        try:
            self._access.sign_in(form.get("key", "").strip(), response, request.url.scheme == "https")
        except PageError as error:
            return self._render(request, "sign_in", {"error": str(error)}, error.status)
        return response

    async def _sign_out(self, request: Request) -> Response:
        response = _redirect("/sign-in")
        self._access.sign_out(request, response)
        return response

    async def _form(self, request: Request) -> dict[str, str]:
        """Return the fields of a form. Raises a 413 `PageError` if it is too large, or does not say its length."""
        length = request.headers.get("content-length", "")
        if not length.isascii() or not length.isdigit() or int(length) > _BODY:
            raise PageError(413, f"A form has at most {_BODY} bytes.")
        return {name: str(value) for name, value in (await request.form(max_files=0)).items()}


def _redirect(address: str, reason: str = "") -> Response:
    """Send a browser to another page. The body says so to a program, which may not follow."""
    return PlainTextResponse(f"{reason}See {address}\n", 303, {"location": address})


def _home(request: Request) -> Response:
    return _redirect("/overview")


def _quoted(value: Any) -> str:
    """Jinja's `urlencode`, which keeps a slash: a browser goes from `/correct/../label/x` to `/label/x`, and agents
    choose the names of their runs."""
    return do_urlencode(value).replace("/", "%2F")


def _code(text: str) -> Markup:
    """Return a text as HTML, with its parts between backticks as `<code>`."""
    parts = text.split("`")
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


class _Guard:
    """Middleware that checks where every request comes from (`Access.check_origin`), and adds the security headers to
    every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = ((k.encode(), v.encode()) for k, v in HEADERS.items())
                message["headers"] = [*message["headers"], *own]
            await send(message)

        app = self._app
        if scope["type"] == "http":
            try:
                if self._access.check_origin(Request(scope)):
                    app = HTMLResponse(_SAME_PAGE_AGAIN)
            except PageError as error:
                app = PlainTextResponse(f"{error}\n", error.status)
        await app(scope, receive, with_headers)
