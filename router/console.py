"""A router's answers for people at a terminal: why it would send a prompt where, and how its replicas are doing."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from shared.settings import RouteSettings, TopSettings

__all__ = ["show_replicas", "show_route"]

_ANSWER_SECONDS = 10.0
_MAX_ANSWER_BYTES = 64 * 2**20


class _NoAnswerError(Exception):
    """The router does not answer as it should. The message says what to do."""


def show_route(settings: RouteSettings) -> int:
    """The decision for one user message, as a table and a sentence. 1 where the router cannot be asked."""
    console, errors = Console(), Console(stderr=True)
    try:
        model = settings.model or _first_model(settings)
        messages = [{"role": "user", "content": settings.prompt}]
        decision = _ask(settings, "/route", {"model": model, "messages": messages})
    except _NoAnswerError as error:
        errors.print(f"warmroute route: {error}", markup=False, soft_wrap=True)
        return 1
    console.print(_candidates_table(decision))
    console.print(decision["sentence"], markup=False)
    return 0


def show_replicas(settings: TopSettings) -> int:
    """A table that renews itself until Ctrl-C, or one table where `once`."""
    errors = Console(stderr=True)
    try:
        fleet = _ask(settings, "/replicas")
        if settings.once:
            Console().print(_replicas_table(fleet))
            return 0
        with Live(_replicas_table(fleet), auto_refresh=False, screen=False) as live:
            while True:
                time.sleep(settings.every_seconds)
                live.update(_replicas_table(_ask(settings, "/replicas")), refresh=True)
    except _NoAnswerError as error:
        errors.print(f"warmroute top: {error}", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 0


def _first_model(settings: RouteSettings) -> str:
    models = _ask(settings, "/v1/models")["data"]
    if not models:
        raise _NoAnswerError("the router knows no replica yet; wait for one to join, or start one")
    return str(models[0]["id"])


def _ask(settings: RouteSettings | TopSettings, path: str, body: Any = None) -> dict[str, Any]:
    url = settings.router.rstrip("/") + path
    request = urllib.request.Request(  # noqa: S310 - the settings allow http and https only
        url, None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    if settings.api_key:
        request.add_header("Authorization", f"Bearer {settings.api_key}")
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as response:  # noqa: S310
            answer = json.loads(response.read(_MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        raise _NoAnswerError(_complaint(error, settings)) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _NoAnswerError(f"no router answers at {settings.router} ({error}); give its URL with --router") from error
    if not isinstance(answer, dict):
        raise _NoAnswerError(f"what answers at {settings.router} is not a warmroute router")
    return answer


def _complaint(error: urllib.error.HTTPError, settings: RouteSettings | TopSettings) -> str:
    if error.code == HTTPStatus.UNAUTHORIZED:
        if settings.api_key:
            return f"the router at {settings.router} does not accept the key in WARMROUTE_API_KEY; check it"
        return f"the router at {settings.router} asks for an API key; put one into WARMROUTE_API_KEY"
    try:
        return str(json.loads(error.read(_MAX_ANSWER_BYTES))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"the router answers {error.code} {error.reason}; is it a warmroute router?"


def _candidates_table(decision: dict[str, Any]) -> Table:
    table = Table(title=f"{decision['prompt_tokens']} prompt tokens, {decision['policy']}, {decision['view']} view")
    table.add_column("replica")
    for heading in ("cached", "active", "wait s", "prefill s", "guard s", "cost s"):
        table.add_column(heading, justify="right")
    chosen = decision["chosen"]["replica_id"]
    for candidate in sorted(
        decision["candidates"], key=lambda candidate: (candidate["cost_seconds"], candidate["replica_id"])
    ):
        seconds = [f"{candidate[f'{name}_seconds']:.4f}" for name in ("wait", "service", "guard", "cost")]
        table.add_row(
            candidate["replica_id"],
            str(candidate["matched_tokens"] + candidate["host_tokens"]),
            str(candidate["active"]),
            *seconds,
            style="bold green" if candidate["replica_id"] == chosen else None,
        )
    return table


def _replicas_table(fleet: dict[str, Any]) -> Table:
    # On 80 columns too, whatever a replica is called: names are folded, never cut off.
    table = Table(title=f"{fleet['policy']}, {fleet['view']} view", box=SIMPLE_HEAD, padding=0)
    for heading in ("replica", "model"):
        table.add_column(heading, overflow="fold")
    table.add_column("state", no_wrap=True)
    for heading in ("blocks", "running", "waiting", "active", "wait s", "trust"):
        table.add_column(heading, justify="right", no_wrap=True)
    for replica in sorted(fleet["replicas"], key=lambda replica: str(replica["id"])):
        load = replica["load"] or {}
        state = replica["state"] if replica["reachable"] else "unreachable"
        table.add_row(
            replica["id"],
            replica["model"],
            state,
            f"{_known(replica['blocks'])}/{_known(replica['capacity_blocks'])}",
            _known(load.get("running")),
            _known(load.get("waiting")),
            str(replica["active"]),
            f"{replica['wait_seconds']:.2f}",
            f"{replica['trust']:.2f}",
            style=None if state == "accepting" else "yellow",
        )
    return table


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)
