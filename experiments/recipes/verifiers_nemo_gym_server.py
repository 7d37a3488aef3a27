"""A resource server of NeMo-Gym in its HTTP protocol, for `verifiers_nemo_gym.yaml`; nothing in it knows asyncrl.

    .venv-verifiers-v1/bin/python verifiers_nemo_gym_server.py PORT

`/weather` is the tool of its rows. `/verify` gets a row with the `response` of its episode, and adds the `reward`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from aiohttp import web

WEATHER = ("sunny", "rainy", "windy", "cloudy")


def weather_in(city: str) -> str:
    return WEATHER[sum(map(ord, city)) % len(WEATHER)]


def texts(response: dict[str, Any]) -> Iterator[str]:
    for item in response["output"]:
        if item["type"] == "message":
            yield from (part["text"] for part in item["content"])


async def seed_session(request: web.Request) -> web.Response:
    return web.json_response({})


async def weather(request: web.Request) -> web.Response:
    return web.json_response({"weather": weather_in(str((await request.json()).get("city")))})


async def verify(request: web.Request) -> web.Response:
    """1 if the weather was looked up and told, a quarter if it was only looked up."""
    body = await request.json()
    asked = any(item["type"] == "function_call" for item in body["response"]["output"])
    told = weather_in(body["city"]) in " ".join(texts(body["response"])).lower()
    return web.json_response({**body, "reward": float(asked) * (0.25 + 0.75 * told), "asked": asked})


if __name__ == "__main__":
    app = web.Application()
    app.add_routes([web.post(f"/{each.__name__}", each) for each in (seed_session, weather, verify)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
