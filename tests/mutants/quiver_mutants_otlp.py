"""Deliberate bugs on the way between OTLP and Arrow; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["OTLP_MUTANTS"]

DECODE = "tests/unit/otlp/test_decode.py"
ENCODE = "tests/unit/otlp/test_encode.py"
JSON_FORM = "tests/unit/otlp/test_json_form.py"
ITEM_CAP = "tests/unit/otlp/test_item_cap.py"
VIEWS = "tests/unit/otlp/test_views.py"

OTLP_MUTANTS = (
    Mutant(
        name="an explicit zero is taken for an unset value",
        where="otlp:any_values",
        old="        elif _has(leaf):\n",
        new="        elif _has(leaf) and leaf.drop_null().to_pylist() != [False]:\n",
        test=f"{DECODE}::test_an_explicit_zero_is_not_an_unset_value",
    ),
    Mutant(
        name="native decoding is believed where protobuf refuses",
        where="otlp:decode",
        old="    request = parse(data, signal)\n",
        new=(
            '    return Decoded(proto_to_arrow(data, signal), 0, 0, "")\n    request = parse(data, signal)\n'
        ),
        test=f"{DECODE}::test_values_nested_deeper_than_the_protocol_reads_are_invalid_input",
    ),
    Mutant(
        name="ids of a wrong length are kept",
        where="otlp:id_fault",
        old="    if not value or len(value) == length:\n",
        new="    if len(value) != length + 1:\n",
        test=f"{DECODE}::test_points_with_a_wrong_id_in_an_exemplar_are_refused",
    ),
    Mutant(
        name="a missing resource becomes an empty one",
        where="otlp:_context",
        old='attributes(resource.field("attributes"), no_resource)',
        new='attributes(resource.field("attributes"))',
        test=f"{DECODE}::test_a_time_after_2262_survives_a_round_trip",
    ),
    Mutant(
        name="points are ordered by their type",
        where="otlp:points",
        old='    order = np.argsort(metric_of_row, kind="stable")\n',
        new="    order = np.arange(len(metric_of_row))\n",
        test=f"{DECODE}::test_metrics_have_a_row_for_every_point",
    ),
    Mutant(
        name="a resource is repeated without a bound",
        where="otlp:Context._check_size",
        old="    if repeated > REPEATED_BYTES_MAX:\n",
        new="    if repeated > REPEATED_BYTES_MAX << 20:\n",
        test=f"{DECODE}::test_a_resource_repeated_beyond_a_bundle_is_refused_before_it_is_built",
    ),
    Mutant(
        name="empty items are counted after they are parsed",
        where="otlp:parse",
        old="    check_item_count(data, signal)\n",
        new="",
        test=f"{ITEM_CAP}::test_a_request_of_nothing_but_empty_items_is_refused_unparsed",
    ),
    Mutant(
        name="hexadecimal ids are read as base64",
        where="otlp:from_json",
        old="        _map_ids(tree, _hex_to_base64)\n",
        new="",
        test=f"{JSON_FORM}::test_ids_are_hexadecimal_in_any_case",
    ),
    Mutant(
        name="rows of two resources share the first",
        where="otlp:_same_lists",
        old="        equal[row_of[~equal_children]] = False\n",
        new="        equal[row_of[equal_children & ~equal_children]] = False\n",
        test=f"{ENCODE}::test_changes_are_found_row_by_row_even_in_a_slice",
    ),
    Mutant(
        name="a count that does not fit wraps around",
        where="otlp:_plain",
        old="pc.min_element_wise(column, most, skip_nulls=False).cast(pa.int64())",
        new="column.cast(pa.int64(), safe=False)",
        test=f"{VIEWS}::test_a_count_beyond_int64_becomes_its_largest_value",
    ),
)
