"""Deliberate bugs in how Spark's Java and other child processes are watched; see `mutants.py`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["SPARK_MUTANTS"]

ENDING = "tests/unit/spark/session/test_java_ending.py"
START = "tests/process/test_java_start.py"
SUPERVISOR = "tests/unit/cli/test_run_supervisor.py"
LINES = "tests/unit/up/test_log.py"
FLEET = "tests/unit/up/test_fleet.py"
KILLED = "tests/unit/cli/test_killed_processes.py"

SPARK_MUTANTS = (
    Mutant(
        name="a Java that was killed means wrong settings",
        where="spark:not_ready",
        old="    if ending is not None and ending.signal is not None:\n",
        new="    if ending is not None and ending.signal is not None and words == []:\n",
        test=f"{ENDING}::test_a_killed_java_is_a_temporary_fault",
    ),
    Mutant(
        name="a signal that Java has caught is an exit code",
        where="spark:Ending.signal",
        old="else self.returncode - _SHELL\n",
        new="else 0\n",
        test=f"{ENDING}::test_an_exit_status_gives_the_signal",
    ),
    Mutant(
        name="a Java that said nothing means wrong settings",
        where="spark:not_ready",
        old="    if not reason:\n",
        new="    if words == []:\n",
        test=f"{ENDING}::test_a_java_that_exited_is_judged_by_its_output",
    ),
    Mutant(
        name="the exit status of a Java that PySpark has started is not looked for",
        where="spark:explain",
        old="not_ready(ending_in(link), None)",
        new="not_ready(None, None)",
        test=f"{ENDING}::test_a_java_that_another_session_has_started_is_explained_by_its_status",
    ),
    Mutant(
        name="what Java printed is not waited for",
        where="spark:_ErrorOutput.last",
        old="    self._thread.join(_LAST_WORDS_S)\n    return list(self._kept)\n",
        new="    return list(self._kept)[:0]\n",
        test=f"{START}::test_how_java_ended_decides_whether_to_try_again",
    ),
    Mutant(
        name="an error that came with the end of Java hides that end",
        where="cli:Supervisor._why_lost",
        old="        return known if has_words else lost(ending)\n",
        new="        return known or lost(ending)\n",
        test=f"{SUPERVISOR}::test_the_end_of_java_is_the_cause_of_any_other_failure",
    ),
    Mutant(
        name="the noise of two workers at once is an error",
        where="up:SparkTraceFilter.hear",
        old="    if line == _OPENING:\n        self._open += 1\n",
        new="    if line == _OPENING and not self._open:\n        self._open += 1\n",
        test=f"{LINES}::test_interleaved_harmless_tracebacks_of_several_workers_are_debug",
    ),
    Mutant(
        name="noise is an error if its worker pauses",
        where="up:LogFilter.overdue",
        old="now_s - self._heard_s >= HELD_MAX_S",
        new="now_s > self._heard_s",
        test=f"{LINES}::test_a_worker_that_pauses_within_its_traceback_is_still_harmless",
    ),
    Mutant(
        name="a part that was killed keeps an earlier line as its last error",
        where="up:Runner._on_failure",
        old=" or (how.signal is not None and not self._hung)",
        new="",
        test=f"{FLEET}::test_a_part_that_was_killed_has_that_as_its_last_error",
    ),
    Mutant(
        name="a trace after the reason of a failure is the last error",
        where="up:Runner._is_news",
        old="line.is_verdict or not self._has_verdict or",
        new="line.is_verdict or self._has_verdict or not self._has_verdict or",
        test=f"{FLEET}::test_a_traceback_after_the_reason_of_a_failure_is_not_the_last_error",
    ),
    Mutant(
        name="a core that is killed while it starts ends all",
        where="cli:CoreProcess.check",
        old="        return ended.code ",
        new="        return ended.code or 1 ",
        test=f"{KILLED}::test_a_core_that_is_killed_during_its_start_is_restarted",
    ),
    Mutant(
        name="a redrive that was killed shows what it printed before",
        where="console:why_failed",
        old="    if code < 0:\n",
        new="    if code < 0 and not outcome.errors:\n",
        test="tests/unit/console/test_redrive_ending.py::test_a_redrive_that_was_killed_has_that_as_its_error",
    ),
    Mutant(
        name="a Java that was killed while it listed its modules is unsuitable",
        where="spark:find_java",
        old="        troubled |= bool(release.trouble)\n",
        new="",
        test="tests/spark/test_java.py::"
        "test_a_java_that_is_killed_while_it_lists_its_modules_is_a_temporary_fault",
    ),
    Mutant(
        name="a process that has ended is signalled by its reused number",
        where="child_process:ChildProcess.kill",
        old="        if self._exit is None:\n",
        new="        if self._process:\n",
        test="tests/unit/foundation/test_child_process.py::"
        "test_a_process_that_has_ended_is_never_signalled_again",
    ),
    Mutant(
        name="the demo calls a signal an exit code",
        where="cli:failure_of",
        old="{ended.reason}",
        new="ended with code {ended.code}",
        test=f"{KILLED}::test_the_demo_reports_which_signal_killed_a_process",
    ),
)
