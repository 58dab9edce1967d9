"""Locust users who hold conversations with an OpenAI-compatible server.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --workload chat      closed loop, with the web page
    locust -f loadtest/locustfile.py --host ... --headless -u 8 -t 60s                 closed loop, in the terminal
    locust -f loadtest/locustfile.py --host ... --headless -u 1 --plan plan.json       open loop: arrivals as planned

In a closed loop each user asks, waits, reads and asks again, so a slow server gets fewer requests; good for trying
things out. In an open loop one user plays the whole plan (`loadtest.plans`) and arrivals wait for nobody,
which is what `warmroute compare` measures with.

Metrics, each its own row: `TTFT`, `TPOT` and `E2E` in milliseconds, `CACHED` in prompt tokens.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from pathlib import Path
from typing import IO, Any
from urllib.request import urlopen

import gevent
import msgspec
from locust import User, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.exception import StopUser

from loadtest.chat_client import Answer, ChatClient, ChatRequest, RequestFailedError
from loadtest.plans import read_plan
from loadtest.records import RequestRecord, append_record, unsent
from loadtest.workloads import SHAPES, Session, Workload

_HEAD_START_SECONDS = 0.5
_numbers = itertools.count()
_logger = logging.getLogger(__name__)


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument(
        "--workload", choices=list(SHAPES), default="chat", env_var="WARMROUTE_WORKLOAD", help="What is asked"
    )
    parser.add_argument("--model", default="", env_var="WARMROUTE_MODEL", help="Default: the first one served")
    parser.add_argument("--seed", type=int, default=0, help="Same seed, same conversations")
    parser.add_argument("--request-timeout", type=float, default=60.0, help="Seconds until a request has failed")
    parser.add_argument("--plan", default="", include_in_web_ui=False, help="JSON file of a plan: run it, then stop")
    parser.add_argument("--records", default="", include_in_web_ui=False, help="Append one JSON line per request here")


class Talker(User):
    """Plays the plan, if there is one; else holds one conversation after the other."""

    wait_time = between(0.5, 2.0)
    _records: IO[bytes] | None = None
    _ready = False

    def on_start(self) -> None:
        try:
            self._prepare()
        except (OSError, ValueError) as error:
            _logger.error("cannot send requests: %s", error)
            self.environment.process_exit_code = 1
            self._quit()
        else:
            self._ready = True

    def _prepare(self) -> None:
        options = self.environment.parsed_options
        host = self.host or self.environment.host
        if options is None or not host:
            raise ValueError("say where to send them: --host http://127.0.0.1:8000")
        self._client = ChatClient(host, options.request_timeout)
        self._model = options.model or _first_model(host)
        self._plan = read_plan(Path(options.plan)) if options.plan else None
        self._planned = self._plan.schedule() if self._plan else []  # takes its time, so before the clock starts
        self._workload = Workload(options.workload, SHAPES[options.workload], options.seed)
        self._records = Path(options.records).open("ab") if options.records else None  # noqa: SIM115 (until on_stop)
        self._start = time.perf_counter() + _HEAD_START_SECONDS

    def on_stop(self) -> None:
        if self._records:
            self._records.close()

    @task
    def talk(self) -> None:
        if not self._ready:  # said in `on_start`, where locust would add a traceback to what is raised
            raise StopUser
        if self._plan is None:
            self._converse(self._workload.session(next(_numbers)))
            return
        gevent.joinall([gevent.spawn(self._play, session) for session in self._planned])
        self._quit()
        raise StopUser

    def _quit(self) -> None:
        """End Locust; not by this greenlet, which ends with it."""
        runner = self.environment.runner
        assert runner is not None, "a user runs in a runner"
        gevent.spawn(runner.quit)

    def _play(self, session: Session) -> None:
        """Every turn at its scheduled time, or as soon as the answer before it is there."""
        answers: list[str] = []
        ready = 0.0
        for k, turn in enumerate(session.turns):
            body = self._encode(session, answers)
            scheduled = turn.at_seconds if turn.think_seconds is None else ready + turn.think_seconds
            gevent.sleep(max(0.0, scheduled - self._now()))
            record = self._ask(body, session.id, k, scheduled=scheduled, ready=max(scheduled, ready))
            if record.error is not None:
                for later in range(k + 1, len(session.turns)):
                    self._report(unsent(session.id, later, session.turns[later].at_seconds, "An earlier turn failed."))
                return
            answers.append(record.answer)
            ready = self._now()

    def _converse(self, session: Session) -> None:
        answers: list[str] = []
        for k in range(len(session.turns)):
            if k:
                self.wait()
            body = self._encode(session, answers)
            now = self._now()
            record = self._ask(body, session.id, k, scheduled=now, ready=now)
            if record.error is not None:
                return
            answers.append(record.answer)

    def _ask(self, body: bytes, session: int, turn: int, *, scheduled: float, ready: float) -> RequestRecord:
        sent = self._now()
        about: dict[str, Any] = {
            "session": session,
            "turn": turn,
            "scheduled_seconds": scheduled,
            "sent_seconds": sent,
            "lag_ms": (sent - ready) * 1000,
        }
        try:
            record = _success(self._client.ask(body), self._start + scheduled, about)
        except RequestFailedError as failure:
            record = RequestRecord(**about, error=str(failure), status=failure.status)
        self._report(record)
        return record

    def _report(self, record: RequestRecord) -> None:
        if self._records:
            append_record(self._records, record)
        metrics = {"TTFT": record.ttft_ms, "TPOT": record.tpot_ms, "E2E": record.e2e_ms}
        if record.error is None:
            for metric, value in {**metrics, "CACHED": record.cached_tokens}.items():
                if value is not None:
                    self._fire(metric, value, None)
        else:
            self._fire("E2E", 0.0, RequestFailedError(record.error, record.status))

    def _fire(self, metric: str, value: float, failure: Exception | None) -> None:
        name = self._plan.workload if self._plan else self._workload.name
        self.environment.events.request.fire(
            request_type=metric, name=name, response_time=value, response_length=0, exception=failure, context={}
        )

    def _encode(self, session: Session, answers: list[str]) -> bytes:
        request = ChatRequest(
            model=self._model,
            messages=session.messages(answers),
            max_tokens=session.turns[len(answers)].max_tokens,
        )
        return msgspec.json.encode(request)

    def _now(self) -> float:
        return time.perf_counter() - self._start


def _success(answer: Answer, scheduled_at: float, about: dict[str, Any]) -> RequestRecord:
    between_tokens = answer.completion_tokens - 1
    predicted = answer.headers.get("predicted-tokens", "")
    return RequestRecord(
        **about,
        status=200,
        ttft_ms=(answer.first_token_at - scheduled_at) * 1000,
        e2e_ms=(answer.ended_at - scheduled_at) * 1000,
        tpot_ms=(answer.ended_at - answer.first_token_at) * 1000 / between_tokens if between_tokens > 0 else None,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        completion_tokens=answer.completion_tokens,
        predicted_tokens=int(predicted) if predicted.isdecimal() else None,
        replica=answer.headers.get("replica", ""),
        answer=answer.text,
    )


def _first_model(host: str) -> str:
    try:
        with urlopen(host.rstrip("/") + "/v1/models", timeout=10) as response:  # noqa: S310 (the operator's own --host)
            return str(json.load(response)["data"][0]["id"])
    except OSError as error:
        raise OSError(f"{host} does not say which models it has ({error}); start it, or name another --host") from error
    except (LookupError, TypeError) as error:
        raise ValueError(f"{host} serves no model yet; wait for a replica, or name one with --model") from error
