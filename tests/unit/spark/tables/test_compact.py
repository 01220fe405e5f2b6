"""The choice of the files to rewrite."""

from __future__ import annotations

from penstock.spark.tables.compact import CompactionReport, pack

A, B = (("k", "a"),), (("k", "b"),)


def test_partitions_with_few_small_files_are_skipped() -> None:
    sized = {A: [(f"a{n}", 10) for n in range(5)], B: [(f"b{n}", 10) for n in range(4)]}
    [found] = pack(sized, target_bytes=1000, min_files=5)
    assert (found.partition, found.files, found.size) == (A, ("a0", "a1", "a2", "a3", "a4"), 50)


def test_files_near_the_target_size_are_skipped() -> None:
    sized = {A: [("large", 800), *((f"a{n}", 10) for n in range(5))]}
    [found] = pack(sized, target_bytes=1000, min_files=5)
    assert "large" not in found.files


def test_groups_have_about_the_target_size() -> None:
    sized = {A: [(f"a{n}", 300) for n in range(7)]}
    groups = pack(sized, target_bytes=1000, min_files=2)
    assert [len(found.files) for found in groups] == [3, 3]
    assert all(found.size <= 1000 for found in groups)


def test_reports_add_up() -> None:
    one = CompactionReport(partitions=1, files_before=5, files_after=1, bytes_before=50, bytes_after=40)
    total = CompactionReport.total([one, one, CompactionReport(skipped=("k=a: changed",))])
    assert (total.partitions, total.files_before, total.files_after, total.skipped) == (
        2,
        10,
        2,
        ("k=a: changed",),
    )
    assert "10 files became 2 in 2 partitions" in str(total)
