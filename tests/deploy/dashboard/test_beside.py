"""A dashboard beside what a peer says otherwise."""

import asyncio
import socket

import httpx
import pytest

from shoal.deploy.dashboard.address import parse_address
from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.record.report import Note
from shoal.deploy.session.beside import serving

FACTS = RunFacts(name="a-run", steps=10, num_layers=2)


def test_without_an_address_there_is_none():
    async def scenario() -> None:
        async with serving(None, FACTS, title="", steers=True) as showing:
            assert showing is None

    asyncio.run(scenario())


def test_a_report_is_on_the_page_and_who_looks_wants_the_status():
    async def scenario() -> None:
        async with serving(parse_address("127.0.0.1:0"), FACTS, title="") as showing:
            showing.take(Note(text="somebody said so"))
            assert not showing.is_watched
            url = showing.announcement.removeprefix("dashboard: ")
            async with httpx.AsyncClient() as client:
                state = (await client.get(f"{url}state.json")).json()
            assert [change["text"] for change in state["changes"]] == ["somebody said so"]
            assert showing.is_watched

    asyncio.run(scenario())


@pytest.mark.parametrize(("address", "warns"), [("127.0.0.1:0", False), ("0.0.0.0:0", True)])
def test_on_an_address_of_others_it_says_who_can_read_it(address, warns):
    async def scenario() -> str:
        async with serving(parse_address(address), FACTS, title="") as showing:
            return showing.announcement

    assert ("everybody who reaches this address" in asyncio.run(scenario())) == warns


def test_a_port_that_another_program_has_is_no_reason_not_to_show_the_run_but_said():
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = other.getsockname()[1]
            async with serving(parse_address(f"127.0.0.1:{taken}"), FACTS, title="") as showing:
                url, _, why = showing.announcement.removeprefix("dashboard: ").partition(" ")
                assert why == f"(another program has port {taken})"
                async with httpx.AsyncClient(base_url=url) as client:
                    assert (await client.get("state.json")).status_code == 200

    asyncio.run(scenario())


def test_the_address_has_the_key_of_who_may_pause_and_only_where_one_can():
    async def scenario() -> None:
        async def act() -> dict[str, bool]:
            return {"paused": True}

        async with serving(parse_address("127.0.0.1:0"), FACTS, title="", steers=True) as showing:
            url, _, key = showing.announcement.removeprefix("dashboard: ").partition("#")
            async with httpx.AsyncClient(base_url=url, headers={"x-shoal-key": key}) as client:
                assert (await client.post("pause")).status_code == 409
                showing.steering.hand(pause=act, resume=act)
                assert (await client.post("pause")).json() == {"paused": True}
        async with serving(parse_address("127.0.0.1:0"), FACTS, title="") as showing:
            assert "#" not in showing.announcement

    asyncio.run(scenario())
