"""Who may take a request for a model, and how its prompt is read: the fleet and its health, as placement needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from msgspec.structs import replace

from router.fleet import Fleet, FleetReplica, Namespace
from router.health import Health
from router.placement import View
from router.policies.base import Request
from router.prompt_reader import PromptReader
from router.public_prompts import PublicPrompts
from shared.api import ApiError, RoutingFields, TokenizeRequest
from shared.api_errors import model_not_found, not_ready
from shared.blocks import namespace_root
from shared.prompts import EncodedPrompt

__all__ = ["Candidates"]

_MOST_ROOTS = 1024


class Candidates:
    """`view` tells the rung of the ladder the router stands on now."""

    def __init__(
        self,
        fleet: Fleet,
        health: Health,
        reader: PromptReader,
        view: Callable[[], View],
        secret: str,
        public: PublicPrompts | None = None,
    ) -> None:
        """`public` is what tenants share, if anything."""
        self._public = public
        self._fleet = fleet
        self._health = health
        self._reader = reader
        self._root_of = lru_cache(_MOST_ROOTS)(partial(namespace_root, secret=secret))
        self.view = view

    async def read(self, routing: RoutingFields, tenant: str = "", session: bytes | None = None) -> Request:
        """Tokens and keys of a tenant's prompt, as the replicas that serve its model compute them.

        `session` is what a header calls it; a name in the body goes before.
        Raises ApiError 404 for a model that nobody serves, 400 for a prompt that its template refuses.
        """
        self.require_served(routing.model)
        if session and not routing.session:
            routing = replace(routing, session=session.decode("latin-1"))
        if tenant and routing.session:  # the same name means another session for another tenant
            routing = replace(routing, session=f"{tenant}\0{routing.session}")
        namespace = self._namespace(routing.model)
        if namespace is None or namespace.encoder is None:
            return self._reader.approximate(routing, tenant)
        # A fleet between two versions of a model is read by the more common one; the others match by promises alone.
        root = self._root_of(namespace.fingerprint, tenant)
        begins = partial(self._public.of(namespace).namespace, tenant) if self._public is not None and tenant else None
        return await self._reader.exact(routing, namespace.encoder, root, namespace.block_size, begins)

    async def tokenize(self, wanted: TokenizeRequest) -> EncodedPrompt | None:
        """None where this router does not have the model's tokenizer. Raises ApiError 400 as `read` does."""
        models = self._fleet.models
        namespace = self._namespace(wanted.model or (models[0] if len(models) == 1 else ""))
        if namespace is None or namespace.encoder is None:
            return None
        return await self._reader.encode(namespace.encoder, wanted.prompt)

    def of(self, model: str, now: float) -> Sequence[FleetReplica]:
        """Replicas that take work for the model (any model, if it is empty), those with an open breaker left out.

        Where every breaker is open they are all tried: nothing is lost by it.
        """
        accepting = self._fleet.accepting(model)
        if self._health.all_well:
            return accepting
        taking = [replica for replica in accepting if self._health.reachable(replica.id)]
        return [replica for replica in taking if self._health.usable(replica.id, now)] or taking

    def taking_work(self) -> int:
        """How many replicas take traffic."""
        return sum(self._health.reachable(replica.id) for replica in self._fleet.accepting())

    def nobody(self, model: str) -> ApiError:
        """Why no replica can take the request, and what to do."""
        if not len(self._fleet):
            return not_ready("no replica has joined yet: start one, or see GET /replicas and the router's log")
        states = ", ".join(f"{replica.id} is {self._condition(replica)}" for replica in list(self._fleet)[:8])
        return not_ready(
            f"no replica takes requests{f' for {model[:200]!r}' if model else ''} now ({states}): retry later"
        )

    def require_served(self, model: str) -> None:
        """Raises ApiError 404 for a model that nobody serves; an empty fleet may yet get one that does."""
        if len(self._fleet) and not self._fleet.serving(model):
            raise model_not_found(model, self._fleet.models)

    def _namespace(self, model: str) -> Namespace | None:
        return next(iter(self._fleet.namespaces(model)), None)

    def _condition(self, replica: FleetReplica) -> str:
        return "unreachable" if not self._health.reachable(replica.id) else replica.state
