"""Reads through the time-series server: errors in queries, and rules indefinitelyy reader."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from tests.unit.servers.timeseries.test_api import NOW_MS, body, served, write
from tests.unit.timeseries.database_doubles import disk
from tests.unit.timeseries.remote_write_wire import request

from penstock.timeseries import TimeSeries, TimeSeriesConfig
from penstock.timeseries.keys import ForwardKey
from penstock.timeseries.model import Bucket, SeriesId

FAST = {"coordinator": {"flush_interval": "5ms"}}


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("/api/v1/query", {"query": "sum(up"}),
        ("/api/v1/query", {"query": "rate(up)"}),
        ("/api/v1/query", {"query": 'up{job=~"("}'}),
        ("/api/v1/query_range", {"query": "up{", "start": "0", "end": "1", "step": "1"}),
        ("/api/v1/query_range", {"query": "up[5m]", "start": "0", "end": "1", "step": "1"}),
        ("/api/v1/series", {"match[]": "up{job=}"}),
        ("/api/v1/labels", {"match[]": "up offset 5m"}),
        ("/api/v1/label/job/values", {"match[]": "up @ 5"}),
        ("/federate", {"match[]": "up up"}),
    ],
)
async def test_a_text_that_is_not_a_query_is_a_parse_error(path: str, parameters: dict[str, str]) -> None:
    async with served() as client:
        answer = await client.get(path, params=parameters)
        assert (answer.status_code, answer.json()["errorType"]) == (400, "bad_data")
        assert "parse error: " in answer.json()["error"]


async def test_slow_selectors_do_not_delay_other_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    def parse(text: str) -> None:
        threads.append(threading.get_ident())
        raise ValueError("no query")

    monkeypatch.setattr("promql_parser.parse", parse)
    async with served() as client:
        for selector in ("+".join(["1"] * 60) + "]", "+".join(["1"] * 499) + "]"):
            assert (await client.get("/api/v1/series", params={"match[]": selector})).status_code == 400
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_every_list_reports_its_limit() -> None:
    async with served() as client:
        await write(client, body(20))
        for path in ("/api/v1/series", "/api/v1/labels", "/api/v1/label/instance/values"):
            parameters = {"limit": "2"} if path != "/api/v1/series" else {"limit": "2", "match[]": "up"}
            answer = (await client.get(path, params=parameters)).json()
            assert len(answer["data"]) == 2
            assert "truncated" in answer["warnings"][0]
        answer = (await client.get("/api/v1/labels", params={"limit": "3"})).json()
        assert answer == {"status": "success", "data": ["__name__", "instance", "job"]}


async def test_a_response_without_a_damaged_record_has_a_warning_or_is_an_error() -> None:
    there, hour = disk(), Bucket.at(NOW_MS)
    async with served(there) as client:
        await write(client, request(*(({"__name__": "up", "n": n}, [(NOW_MS, 1.0)]) for n in "abc")))
    key = ForwardKey(hour, SeriesId(1)).encode()
    there.persisted[key] = there.persisted[key]._replace(value=b"broken")
    seconds, name = str(NOW_MS / 1000), f"{hour.start_text} has damage, which is left out: labels of series 1"
    async with served(there) as client:
        span = {"start": seconds, "end": seconds}
        for path, parameters, found in (
            ("query", {"query": "up", "time": seconds}, 2),
            ("query_range", {"query": "up", "step": "1", **span}, 2),
            ("series", {"match[]": "up", **span}, 2),
            ("labels", {"match[]": "up", **span}, 2),
            ("label/n/values", {"match[]": "up", **span}, 2),
        ):
            answer = (await client.get(f"/api/v1/{path}", params=parameters)).json()
            data = answer["data"]["result"] if path.startswith("query") else answer["data"]
            assert (path, answer["status"], len(data)) == (path, "success", found)
            assert [name in one for one in answer["warnings"]] == [True]
        limited = (await client.get("/api/v1/series", params={"match[]": "up", "limit": "1"})).json()
        assert [name in one for one in limited["warnings"]] == [True, False]
        federated = await client.get("/federate", params={"match[]": "up"})
        assert federated.status_code == 500
        assert hour.start_text in federated.text
        assert "labels of series 1" in federated.text


async def test_readers_above_the_limit_are_asked_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TimeSeriesConfig.from_mapping({**FAST, "queries_max": 1, "engine": {"timeout": "100ms"}})
    opened: list[TimeSeries] = []
    open_database = TimeSeries.open

    async def remembered(*args: object, **settings: object) -> TimeSeries:
        opened.append(await open_database(*args, **settings))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(TimeSeries, "open", remembered)
    async with served(config=config) as client:
        await write(client, body())
        async with opened[0]._place(opened[0]._engine.budget()):
            paths = ["query?query=up", "series?match[]=up", "labels", "label/job/values"]
            urls = [*(f"/api/v1/{path}" for path in paths), "/federate?match[]=up"]
            answers = await asyncio.gather(*map(client.get, urls))
        assert [answer.status_code for answer in answers] == [503] * 5
        assert all("retry-after" in answer.headers for answer in answers)
        assert not opened[0]._querying.locked()


async def test_any_name_reaches_a_scraper_that_supports_it() -> None:
    odd = request(({"__name__": "a.b", "c\nd 1": "x"}, [(NOW_MS, 1.0)]))
    async with served() as client:
        assert (await write(client, odd)).status_code == 204
        plain: httpx.Response = await client.get("/federate", params={"match[]": '{"a.b"}'})
        assert plain.text == "# 1 series are not shown: accept escaping=allow-utf-8\n"
        quoted = await client.get(
            "/federate",
            params={"match[]": '{"a.b"}'},
            headers={"accept": "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.1"},
        )
        assert quoted.text == f'# TYPE "a.b" untyped\n{{"a.b","c\\nd 1"="x"}} 1 {NOW_MS}\n'


async def test_a_large_response_is_complete() -> None:
    async with served() as client:
        await write(client, body(300))
        answer = (await client.get("/api/v1/query", params={"query": "up", "time": NOW_MS / 1000})).json()
        assert len(answer["data"]["result"]) == 300
        assert len((await client.get("/api/v1/series", params={"match[]": "up"})).json()["data"]) == 300
