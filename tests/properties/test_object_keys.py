"""No key reaches outside its store, and every key has one spelling."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import SYSTEM_CLOCK
from penstock.errors import NotFound, Rejected
from penstock.objects import normalise_key
from penstock.objects.directory import ObjectDirectory
from penstock.testing.disk import FakeDisk

TEXTS = st.text(st.one_of(st.characters(), st.sampled_from("/.\\%~ \0\n\ud800a")), max_size=40)


@given(TEXTS)
def test_a_key_is_rejected_or_has_one_spelling(text: str) -> None:
    try:
        key = normalise_key(text)
    except Rejected:
        return
    assert normalise_key(key) == key
    assert normalise_key(f"//{key}/") == key
    assert os.path.normpath(f"/root/{key}") == f"/root/{key}"
    assert key.encode().decode() == key


@given(TEXTS)
def test_no_key_reaches_outside_the_directory(text: str) -> None:
    disk = FakeDisk()
    store = ObjectDirectory("/data/root", fs=disk, clock=SYSTEM_CLOCK)
    try:
        store.get(text)
    except NotFound:
        store.put(text, b"x")
        assert [info.key for info in store.list("")] == [normalise_key(text)]
    except Rejected:
        assert disk.list_files("/") == []
    assert all(name.startswith("data/root/") for name, _ in disk.list_files("/"))
