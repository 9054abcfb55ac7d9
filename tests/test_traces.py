"""Traces of rollouts on disk: apart, private, without keys, and never in the way."""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout.errors import SettingsError
from rollout.requests import parse_init
from rollout.traces import TraceWriter, file_name


def events_of(directory: Path, rollout_id: str) -> list[dict[str, Any]]:
    """The events in the rollout's file."""
    return [json.loads(line) for line in (directory / file_name(rollout_id)).read_bytes().split(b"\n")[:-1]]


async def written(directory: Path, **data: object) -> dict[str, Any]:
    """How one event with the data comes back."""
    async with TraceWriter(directory) as writer:
        writer.open_trace("r1").write("chat", **data)
    (event,) = events_of(directory, "r1")
    return event


# ---------------------------------------------------------------- names


@given(st.text(st.characters(exclude_categories=[]), min_size=1, max_size=256))
@example("../../etc/passwd")
@example("..")
@example("a/b\x00c")
def test_no_id_becomes_a_path(rollout_id: str) -> None:
    name = file_name(rollout_id)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}-[0-9a-f]{16}\.jsonl", name)


@given(st.sets(st.text(min_size=1), min_size=2, max_size=20))
def test_two_ids_never_share_a_file(ids: set[str]) -> None:
    assert len({file_name(i).lower() for i in ids}) == len(ids)


def test_name_is_readable_and_stays_the_same() -> None:
    assert file_name("train-17/0042") == "train-17_0042-a95d07a93eeb89e8.jsonl"


# ---------------------------------------------------------------- events


async def test_events_are_appended_in_order_to_the_file_of_their_rollout(tmp_path: Path) -> None:
    async with TraceWriter(tmp_path) as writer:
        one, two = writer.open_trace("one"), writer.open_trace("two")
        for turn in range(20):
            one.write("chat", turn=turn)
            two.write("tool", name="add", turn=turn)
    assert [event["turn"] for event in events_of(tmp_path, "one")] == list(range(20))
    assert {event["event"] for event in events_of(tmp_path, "two")} == {"tool"}


async def test_event_carries_the_time_in_utc(tmp_path: Path) -> None:
    event = await written(tmp_path)
    at = datetime.datetime.fromisoformat(event["at"])
    assert abs(datetime.datetime.now(datetime.UTC) - at) < datetime.timedelta(minutes=1)
    assert event["at"].endswith("Z")
    assert list(event) == ["at", "event"]


async def test_second_run_continues_the_file(tmp_path: Path) -> None:
    for event in ("first", "second"):
        async with TraceWriter(tmp_path) as writer:
            writer.open_trace("r1").write(event)
    assert [event["event"] for event in events_of(tmp_path, "r1")] == ["first", "second"]


async def test_object_that_changes_afterwards_is_written_as_it_was(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with TraceWriter(tmp_path) as writer:
        writer.open_trace("r1").write("chat", messages=messages)
        messages.clear()
    assert events_of(tmp_path, "r1")[0]["messages"] == [{"role": "user", "content": "hi"}]


async def test_keys_are_removed_wherever_they_lie(tmp_path: Path) -> None:
    body = b'{"rollout_id":"r1","server_url":"http://h","messages":[],"completion_params":{},"api_key":"sk-1","llm_api_key":"sk-2"}'
    event = await written(
        tmp_path,
        api_key="sk-3",
        request=parse_init(body, 1000),
        deep=[{"x": {"llm_api_key": "sk-4", "kept": 1}}],
        raw=msgspec.Raw(b'{"api\\u005fkey": "sk-5"}'),
    )
    assert "sk-" not in json.dumps(event)
    assert event["deep"] == [{"x": {"kept": 1}}]
    assert event["request"]["rollout_id"] == "r1"


async def test_json_text_with_white_space_stays_on_one_line(tmp_path: Path) -> None:
    event = await written(tmp_path, body=msgspec.Raw(b'{\r\n  "a": [1,\n 2]\r}'), text="a\nb\r")
    assert (event["body"], event["text"]) == ({"a": [1, 2]}, "a\nb\r")


async def test_what_json_cannot_hold_is_named(tmp_path: Path) -> None:
    event = await written(tmp_path, reward=float("nan"), thing=object())
    assert event["reward"] is None
    assert len(event["problems"]) == 2


async def test_broken_json_text_costs_its_event_and_no_more(tmp_path: Path) -> None:
    event = await written(tmp_path, body=msgspec.Raw(b"{\n oops \\u0041"))
    assert event["event"] == "chat"
    assert event["problems"] == ["JSON text in this event is broken"]


async def test_closed_trace_takes_no_more_events(tmp_path: Path) -> None:
    async with TraceWriter(tmp_path) as writer:
        trace = writer.open_trace("r1")
        trace.write("finished")
        trace.close()
        trace.close()
        trace.write("late")
    assert [event["event"] for event in events_of(tmp_path, "r1")] == ["finished"]


# ---------------------------------------------------------------- the disk


async def test_directory_and_files_are_for_their_owner_only(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "traces"
    await written(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / file_name("r1")).stat().st_mode) == 0o600


async def test_leaving_flushes_and_ends_the_thread(tmp_path: Path) -> None:
    async with TraceWriter(tmp_path) as writer:
        trace = writer.open_trace("r1")
        for _ in range(500):
            trace.write("chat", text="x" * 100)
    trace.write("after the end")
    assert len(events_of(tmp_path, "r1")) == 500
    assert "rollout-traces" not in {thread.name for thread in threading.enumerate()}


async def test_failures_are_logged_once_and_harm_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with TraceWriter(tmp_path / "traces") as writer:
        (tmp_path / "traces").rmdir()
        for rollout_id in ("a", "b", "c"):
            writer.open_trace(rollout_id).write("chat")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert str(tmp_path / "traces") in caplog.text


async def test_a_directory_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SettingsError, match=r"SERVER_DEBUG_DIR: '.*file' cannot be made: File exists"):
        async with TraceWriter(tmp_path / "file"):
            pass


async def test_link_in_place_of_a_file_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / file_name("r1")).symlink_to(target)
    async with TraceWriter(tmp_path) as writer:
        writer.open_trace("r1").write("chat")
        writer.open_trace("r2").write("chat")
    assert target.read_text() == "precious"
    assert len(events_of(tmp_path, "r2")) == 1
    assert "lost" in caplog.text


async def test_backlog_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = TraceWriter(tmp_path, max_backlog_bytes=1000)
    trace = writer.open_trace("r1")
    for turn in range(100):  # nothing is written before the writer is entered
        trace.write("chat", turn=turn, text="x" * 400)
    async with writer:
        pass
    assert [event["turn"] for event in events_of(tmp_path, "r1")] == [0, 1, 2]
    assert [record.getMessage() for record in caplog.records if "too slow" in record.getMessage()] != []
    assert len(caplog.records) == 1


async def test_disk_that_hangs_does_not_hold_up_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = tmp_path / file_name("r1")
    os.mkfifo(pipe)  # opening it for writing blocks until somebody reads
    with caplog.at_level(logging.WARNING):
        async with TraceWriter(tmp_path, stop_timeout_seconds=0.05) as writer:
            writer.open_trace("r1").write("chat")
    assert "incomplete" in caplog.text
    assert b"chat" in pipe.read_bytes()
