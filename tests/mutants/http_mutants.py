"""Deliberate bugs in the HTTP transport; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["HTTP_MUTANTS"]

FLOODS = "tests/unit/http/test_http_floods.py"
SESSIONS = "tests/unit/console/test_sessions.py"
SITES = "tests/unit/http/test_sites.py"


HTTP_MUTANTS = (
    Mutant(
        name="fragments of a message cost only their bytes",
        where="servers:Framing.receive",
        old="        self._pieces_bytes += len(frame.data) + PIECE_BYTES\n",
        new="        self._pieces_bytes += len(frame.data)\n",
        test="tests/unit/servers/topics/test_websocket.py::test_each_fragment_counts_with_its_overhead",
    ),
    Mutant(
        name="messages of a websocket have no limits of depth and numbers",
        where="servers:read_command",
        old="    if problem is not None:\n",
        new="    if False:\n",
        test="tests/unit/servers/topics/test_websocket.py"
        "::test_a_message_of_128_levels_is_read_and_one_of_129_is_refused",
    ),
    Mutant(
        name="small bodies of http 2 do not count",
        where="http:H2Connection._take_body",
        old="        self._hold(stream, held_bytes)\n",
        new="        pass\n",
        test=f"{FLOODS}::test_small_http_2_bodies_count_from_their_first_byte_until_released",
    ),
    Mutant(
        name="small bodies of http 1 do not count",
        where="http:H1Connection.on_body",
        old="    self._hold(len(body) + _PIECE_BYTES)\n",
        new="",
        test=f"{FLOODS}::test_small_http_1_bodies_and_partial_heads_count_from_their_first_byte",
    ),
    Mutant(
        name="the decoder of http 2 has the library's cap",
        where="http:_new_state_machine",
        old="    machine.decoder.max_header_list_size = limits.head_bytes_max\n",
        new="",
        test=f"{FLOODS}::test_a_header_list_above_its_cap_ends_the_connection_while_it_is_decoded",
    ),
    Mutant(
        name="frames that bring nothing are free",
        where="http:H2Connection._read",
        old="    self._idle_frames += turn.idle\n",
        new="",
        test=f"{FLOODS}::test_a_flood_of_idle_frames_ends_the_connection",
    ),
    Mutant(
        name="every setting of a client is kept",
        where="http:_PeerSettings.__setitem__",
        old="    if key not in _SETTINGS:\n        return\n",
        new="",
        test=f"{FLOODS}::test_settings_that_the_server_does_not_know_are_not_kept",
    ),
    Mutant(
        name="a client sets the length of the encoder's table",
        where="http:_PeerSettings.__setitem__",
        old="        value = min(value, _ENCODER_TABLE_BYTES)\n",
        new="        pass\n",
        test=f"{FLOODS}::test_a_client_cannot_grow_the_table_of_sent_headers",
    ),
    Mutant(
        name="one read of frames is one turn",
        where="http:H2Connection._read",
        old="    turn = next_turn(data, _TURN_WORK)\n",
        new="    turn = next_turn(data, 1_000_000)\n",
        test=f"{FLOODS}::test_a_flood_does_not_starve_other_connections",
    ),
    Mutant(
        name="a long head is as much work as a short one",
        where="http:next_turn",
        old="        work += length // _HEAD_BYTES_PER_WORK if is_head else 0\n",
        new="",
        test=f"{FLOODS}::test_a_turn_counts_the_bytes_of_a_head",
    ),
    Mutant(
        name="a head may set any number of table sizes",
        where="http:_new_state_machine",
        old="    machine.decoder = _HeadDecoder()\n",
        new="",
        test=f"{FLOODS}::test_too_many_table_size_updates_in_a_head_end_the_connection",
    ),
    Mutant(
        name="pieces that a window cuts are free",
        where="http:H2Connection._send",
        old="        self._idle_frames += is_cut - len(piece) // _IDLE_BYTES\n",
        new="        self._idle_frames -= len(piece) // _IDLE_BYTES\n",
        test=f"{FLOODS}::test_initial_window_updates_by_one_byte_are_a_flood",
    ),
    Mutant(
        name="a window of many streams costs as one frame",
        where="http:H2Connection._take_settings",
        old="        self._idle_frames += len(self._streams) // _STREAMS_PER_FRAME\n",
        new="        pass\n",
        test=f"{FLOODS}::test_an_initial_window_change_costs_in_proportion_to_open_streams",
    ),
    Mutant(
        name="a window of one stream makes all of them look at theirs",
        where="http:H2Connection._make_sendable",
        old="    if stream is not None and stream.outbox:\n        self._sendable[stream.id] = stream\n",
        new="    self._sendable = {number: one for number, one in self._streams.items() if one.outbox}\n",
        test=f"{FLOODS}::test_a_frame_costs_nothing_for_streams_with_closed_windows",
    ),
    Mutant(
        name="the head is read again without close",
        where="http:H1Connection._head_without_upgrade",
        old="    if options:\n",
        new="    if not options:\n",
        test=f"{FLOODS}::test_an_ignored_upgrade_keeps_the_other_connection_options",
    ),
    Mutant(
        name="a client of http 1.0 may change the protocol",
        where="http:H1Connection._head_without_upgrade",
        old='    self._upgrade_headers = upgrade_headers if version != b"1.0" else {}\n',
        new="    self._upgrade_headers = upgrade_headers\n",
        test=f"{FLOODS}::test_a_client_of_http_1_0_cannot_change_the_protocol",
    ),
    Mutant(
        name="a target's own name is not looked at",
        where="http:Sites.host_refusal",
        old='    if refusal is None and not request.path.startswith(b"/"):\n',
        new="    if False:\n",
        test=f"{SITES}::test_the_name_in_a_target_counts_as_well_as_host",
    ),
    Mutant(
        name="any name reaches a server without keys",
        where="http:Sites._name_refusal",
        old="    if not self._is_reached_as(name):\n",
        new="    if not name:\n",
        test=f"{SITES}::test_a_page_of_another_site_cannot_use_topics_without_keys",
    ),
    Mutant(
        name="any page uses a server without keys",
        where="http:Sites._is_own",
        old='    place = origin.partition(b"://")[2].lower()\n',
        new="    place = host.lower()\n",
        test=f"{SITES}::test_a_page_of_another_site_cannot_use_topics_without_keys",
    ),
    Mutant(
        name="damaged sessions of the console are not reported",
        where="console:_remembered",
        old="        _LOG.warning(",
        new="        _LOG.debug(",
        test=f"{SESSIONS}::test_a_foreign_sessions_file_gives_no_access_and_is_reported",
    ),
)
