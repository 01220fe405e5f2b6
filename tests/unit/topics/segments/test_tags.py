"""The search for records by tag without reading records."""

from __future__ import annotations

import pytest

from penstock.topics.model import Predicate
from penstock.topics.segments import tags as tags_module
from penstock.topics.segments.tags import LogTags, TagTable


def eq(tag: str) -> Predicate:
    return Predicate(value=tag)


def starts(prefix: str) -> Predicate:
    return Predicate(value=prefix, is_prefix=True)


@pytest.fixture(params=[2, 4096])
def tags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LogTags:
    monkeypatch.setattr(tags_module, "TAGS_IN_MAP_MAX", request.param)
    tags = LogTags()
    names = ["a", "ab", "a", "b", "\u00e9", "ab", "", "\U0001f600", "a"]
    for place, name in enumerate(names):
        tags.append(10 + place, [(0, name.encode())])
    return tags


def test_one_tag_and_every_tag_with_a_prefix(tags: LogTags) -> None:
    assert tags.find(eq("a")).tolist() == [10, 12, 18]
    assert tags.find(starts("a")).tolist() == [10, 11, 12, 15, 18]
    assert tags.find(starts("")).tolist() == list(range(10, 19))
    assert tags.find(eq("")).tolist() == [16]
    assert tags.find(starts("\u00e9")).tolist() == [14]
    assert tags.find(eq("c")).tolist() == tags.find(starts("abc")).tolist() == []


def test_tags_of_records_in_segments_are_dropped(tags: LogTags) -> None:
    tags.forget_below(12)
    assert tags.find(starts("a")).tolist() == [12, 15, 18]
    tags.forget_below(11)
    assert tags.find(eq("a")).tolist() == [12, 18]
    tags.forget_below(100)
    assert tags.find(starts("")).tolist() == []
    assert len(tags) == 0


def test_segments_are_searched_too(tags: LogTags) -> None:
    table = TagTable.of(1, {"a": [0, 3], "b": [1]})
    assert tags.find(eq("a"), [table]).tolist() == [1, 4, 10, 12, 18]
    assert tags.find(starts(""), [table]).tolist() == [1, 2, 4, *range(10, 19)]


def test_tags_of_removed_records_can_be_dropped(tags: LogTags) -> None:
    assert len(tags) == 9
    tags.keep(lambda seqs: seqs % 2 == 0)
    assert len(tags) == 5
    assert tags.find(starts("")).tolist() == [10, 12, 14, 16, 18]
    tags.append(19, [(0, b"a"), (1, b"zz")])
    assert tags.find(eq("a")).tolist() == [10, 12, 18, 19]
    assert tags.find(starts("z")).tolist() == [20]


def test_a_tag_per_record_is_kept_in_tables_not_in_objects() -> None:
    tags = LogTags()
    tags.append(1, [(place, b"tag-%07d" % place) for place in range(20_000)])
    assert len(tags._map) <= tags_module.TAGS_IN_MAP_MAX
    assert len(tags._frozen) == 4
    assert tags.find(eq("tag-0000007")).tolist() == [8]
    assert tags.find(starts("tag-00000")).tolist() == list(range(1, 101))
    assert len(tags) == 20_000
