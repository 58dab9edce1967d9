"""Somebody else's router, as `warmroute compare --peers` starts one: replicas in turn, bytes in, bytes out.

python tests/loadtest/peer_router.py PORT REPLICA_URL ...
"""

from __future__ import annotations

import itertools
import sys

from aiohttp import ClientSession, web


def main() -> None:
    port, *replicas = sys.argv[1:]
    turns = itertools.cycle(replicas)

    async def relay(request: web.Request) -> web.StreamResponse:
        url = next(turns) + request.path
        async with ClientSession() as session, session.request(request.method, url, data=await request.read()) as reply:
            headers = {"content-type": reply.content_type, "x-warmroute-replica": reply.headers["x-warmroute-replica"]}
            response = web.StreamResponse(status=reply.status, headers=headers)
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            return response

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", relay)
    web.run_app(application, host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main()
