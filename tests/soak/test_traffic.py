"""What clients make of answers, and what counts as a leak: each kind of error is seen.

The server is a real one that answers as each test defines; nothing is computed.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil
import pytest
from aiohttp import web

from benchmarks.soak.accounts import GROWTH, Account, Ledger
from benchmarks.soak.traffic import Question, Traffic, TrafficOutcome, make_prompts

QUESTIONS = [Question([1, 2, 3], [7, 8, 9])]
BOUND_S = 3.0  # more than any client's patience
Answer = Callable[[web.Request, int], Awaitable[web.Response]]


async def right(request: web.Request, tokens: int) -> web.Response:
    """As many tokens as were asked for."""
    event = {"choices": [{"token_ids": QUESTIONS[0].answer[:tokens]}]}
    return web.Response(text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")


async def wrong(request: web.Request, tokens: int) -> web.Response:
    """A token that is not the plain engine's."""
    return web.Response(text='data: {"choices": [{"token_ids": [5]}]}\n\n')


async def broken(request: web.Request, tokens: int) -> web.Response:
    """A refusal."""
    return web.Response(status=500, text="no")


async def silent(request: web.Request, tokens: int) -> web.Response:
    """Nothing, ever."""
    await asyncio.Event().wait()
    raise AssertionError


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """The URL of a server that answers so."""

    async def complete(request: web.Request) -> web.Response:
        return await answer(request, (await request.json())["max_tokens"])

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def traffic_with(answer: Answer, *, disturbed: bool = False) -> Traffic:
    """Eight clients and at least 24 requests."""
    async with serving(answer) as url, asyncio.TaskGroup() as group:
        traffic = Traffic(url, QUESTIONS, seed=0, bound_s=BOUND_S)
        group.create_task(traffic.run(8))
        if disturbed:
            with traffic.disturbed():
                await traffic.wait_for_requests(8)
        else:
            await traffic.wait_for_requests(24)
        traffic.stop()
    return traffic


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (right, TrafficOutcome.RIGHT),
        (wrong, TrafficOutcome.WRONG),
        (broken, TrafficOutcome.FAILED),
        (silent, TrafficOutcome.LATE),
    ],
)
def test_every_kind_of_end_is_told_from_the_others(answer: Answer, outcome: TrafficOutcome) -> None:
    traffic = asyncio.run(traffic_with(answer))
    assert traffic.outcomes.keys() <= {outcome, TrafficOutcome.GIVEN_UP}
    assert traffic.outcomes[outcome] > 0
    assert bool(traffic.complaints) is (outcome is not TrafficOutcome.RIGHT)


def test_a_request_is_lost_only_while_a_server_is_disturbed() -> None:
    traffic = asyncio.run(traffic_with(broken, disturbed=True))
    assert traffic.outcomes[TrafficOutcome.LOST] == 8 and not traffic.complaints


def test_prompts_depend_on_nothing_but_their_number() -> None:
    prompts = make_prompts(20, 512)
    assert prompts == make_prompts(20, 512)
    assert len({tuple(prompt) for prompt in prompts}) == 20


def test_an_account_sees_files_and_maps() -> None:
    """Of this very process."""
    before = Account.of([psutil.Process()])
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
    grown = Account.of([psutil.Process()]) - before
    for file in files:
        os.close(file)
    assert before.processes == 1 and grown.files == 5 and before.maps > 10


@pytest.mark.parametrize("leak", ["processes", "files", "threads", "maps", "resident"])
def test_growth_within_one_run_of_a_server_is_a_leak(leak: str) -> None:
    """Not what a new server holds more than the one before it."""
    more = Account(**{name: 1000 << 20 if name == leak else 0 for name in Account.__slots__})
    none = Account(0, 0, 0, 0, 0)
    ledger = Ledger()
    for runs in ([none, none], [more, more]):
        ledger.restarted()
        for account in runs:
            ledger.note(account)
    assert ledger.growth.within(GROWTH) and ledger.moments == 2
    ledger.note(more - none)
    ledger.restarted()
    for account in (none, more):
        ledger.note(account)
    assert not ledger.growth.within(GROWTH)
