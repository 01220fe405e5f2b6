"""§7 and §8.3: copies of routers exist before a subscription begins."""

from __future__ import annotations

from tests.contract.socket_client import opened
from tests.contract.topics_server import Server, fresh_name


async def test_a_subscription_to_a_destination_begins_with_all_copies(server: Server) -> None:
    api, source, dest = server.api(), fresh_name("source"), fresh_name("dest")
    api.ask("PUT", f"/v0/routers/{source}", {"source": source, "dest": dest}, status=201)
    async with opened(server) as socket:
        for round_ in range(1, 30):
            await socket.publish(source, round_)
            told = (await socket.subscribe(topic=dest, tail=True))["topics"][dest]
            assert told["head_seq"] == told["from_seq"] == round_
            message = await socket.next()
            assert (message["op"], message["head_seq"]) == ("caught_up", round_)
