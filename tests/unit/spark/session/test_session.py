from __future__ import annotations

import sys

import pytest

from penstock.errors import Unsupported
from penstock.spark.session.session import check_spark


def test_a_missing_pyspark_is_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(Unsupported, match=r"PySpark is not installed; run `pip install 'penstock\[spark\]'`"):
        check_spark()
