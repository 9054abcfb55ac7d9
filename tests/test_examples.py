"""The examples, each through real HTTP against a mock trainer, and the dataset that comes with them."""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession
from cases import needs
from conftest import Serve
from hypothesis import given, settings
from hypothesis import strategies as st
from served import listening

from rollout.cli import main
from rollout.examples import calculator, embedding, multi_tool, sync_tools
from rollout.examples.dataset import BUNDLED, DatasetError, PlannedCall, Row, load_rows
from rollout.schemas import RolloutResponse
from rollout.testing import (
    MockTrainer,
    ScriptedLLM,
    drive,
    make_request,
    make_tool_call,
    run_agent,
    text,
    tool_calls,
)

EXAMPLES = ("calculator", "embedding", "multi_tool", "sync_tools")


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_valid(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["validate", f"rollout.examples.{example}:agent"])

    assert code == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_says_how_to_run_it(example: str) -> None:
    module = __import__(f"rollout.examples.{example}", fromlist=["agent"])

    assert "python -m rollout" in (module.__doc__ or "")


# ---------------------------------------------------------------- calculator


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        pytest.param("That makes 42.", 42, 1, id="a-number-at-the-end-of-a-sentence"),
        pytest.param("6 times 7 is 42", 6, 0, id="the-last-number-counts"),
        pytest.param("It is 1,234.5", 1234.5, 1, id="thousands"),
        pytest.param("It is \u22125", -5, 1, id="a-typographic-minus"),
        pytest.param("about 1.5e-3", 0.0015, 1, id="an-exponent"),
        pytest.param("it is .5", "0.5", 1, id="no-leading-zero"),
        pytest.param("18", "#### 18", 1, id="an-expected-text-with-a-number"),
        pytest.param("30000000.000001", 30_000_000, 1, id="rounding"),
        pytest.param("I do not know.", 42, 0, id="no-number"),
        pytest.param("42", None, None, id="nothing-expected"),
    ],
)
async def test_calculator_rewards_the_right_number(answer: str, expected: Any, reward: float | None) -> None:
    response = await run_agent(calculator.agent, answers=[answer], metadata={"answer": expected})

    assert response.status == "COMPLETED"
    assert response.reward == reward


async def test_calculator_names_an_expectation_that_is_no_number() -> None:
    response = await run_agent(calculator.agent, answers=["42"], metadata={"answer": "many"})

    assert response.status == "ERROR"
    assert "metadata.answer holds no number" in str(response.error_message)


# ---------------------------------------------------------------- multi_tool

HAMBURG = {"city": "Hamburg", "country": "DE"}


async def test_parcel_desk_quotes_nested_arguments_and_ends_with_the_booking(
    serve: Serve, trainer: MockTrainer
) -> None:
    server = await serve(multi_tool.agent)
    parcels = [{"weight": 2.5, "contents": "tea"}, {"weight": 1}]
    booking = {"recipient": {"name": "Ada"}, "total_cents": 2440}
    trainer.on_chat(
        [
            tool_calls([("quote", {"parcels": parcels, "to": HAMBURG, "speed": "express"})]),
            tool_calls([("book", booking)]),
        ]
    )

    response = await drive(server.session, make_request(metadata={"expected_cents": 2440}), trainer=trainer)

    assert trainer.chats()[1].json["messages"][-1]["content"] == '{"cents":2440,"days":1}'
    assert (response["finish_reason"], response["reward"]) == ("booked", 1)
    assert response["extra_fields"]["booking"] == booking


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        pytest.param({"parcels": [], "to": HAMBURG}, "parcels", id="empty-list"),
        pytest.param({"parcels": [{"weight": 31}], "to": HAMBURG}, "parcels", id="too-heavy"),
        pytest.param({"parcels": [{"weight": 1}], "to": {**HAMBURG, "country": "Germany"}}, "country", id="pattern"),
        pytest.param({"parcels": [{"weight": 1}], "to": HAMBURG, "speed": "fast"}, "speed", id="not-a-choice"),
    ],
)
async def test_parcel_desk_tells_the_model_which_argument_is_wrong(arguments: dict[str, Any], problem: str) -> None:
    llm = ScriptedLLM([tool_calls([("quote", arguments)]), text("I give up.")])

    response = await run_agent(multi_tool.agent, answers=llm)

    content = llm.calls[1].messages[-1]["content"]
    assert content.startswith("Error: ")
    assert problem in content
    assert response.reward == 0


async def test_parcel_desk_prices_a_standard_shipment_abroad_with_duty() -> None:
    to = {"city": "Oslo", "country": "NO"}
    calls = [
        ("quote", {"parcels": [{"weight": 1}], "to": to}),
        ("customs_duty", {"value_cents": 20_000}),
        ("customs_duty", {"value_cents": 9_000}),
    ]
    llm = ScriptedLLM([tool_calls(calls), text("Done.")])

    await run_agent(multi_tool.agent, answers=llm, metadata={"abroad": True})

    assert [message["content"] for message in llm.calls[1].messages[-3:]] == ['{"cents":520,"days":5}', "3800", "0"]


@pytest.mark.parametrize(
    ("metadata", "names"),
    [({}, ["quote", "book"]), ({"abroad": True}, ["quote", "customs_duty", "book"])],
    ids=["at-home", "abroad"],
)
async def test_parcel_desk_offers_the_tools_of_the_request(
    serve: Serve, metadata: dict[str, Any], names: list[str]
) -> None:
    server = await serve(multi_tool.agent)

    answer = await server.post_init(metadata=metadata)

    tools = answer.json["tools"]
    assert [tool["function"]["name"] for tool in tools] == names
    assert tools[-1] == multi_tool.BOOK


async def test_parcel_desk_rejects_metadata_that_cannot_be_meant(serve: Serve) -> None:
    server = await serve(multi_tool.agent)

    answer = await server.post_init(metadata={"abroad": "yes"})

    assert (answer.status, answer.json["code"]) == (422, "request_rejected")


@pytest.mark.parametrize(
    ("calls", "reward", "finish_reason"),
    [
        pytest.param([make_tool_call("book", {"total_cents": 1})], 0, "booked", id="wrong-price"),
        pytest.param([make_tool_call("book", '{"total_cents": 5')], 0, "booked", id="malformed"),
        pytest.param(
            [make_tool_call("quote", "{"), make_tool_call("book", {"total_cents": 5})], 1, "booked", id="second-call"
        ),
    ],
)
async def test_parcel_desk_judges_the_booking(calls: list[Any], reward: float, finish_reason: str) -> None:
    response = await run_agent(multi_tool.agent, answers=[tool_calls(calls)], metadata={"expected_cents": 5})

    assert (response.reward, response.finish_reason) == (reward, finish_reason)


# ---------------------------------------------------------------- sync_tools


async def _asked(*calls: tuple[str, Any]) -> list[str]:
    """What the librarian's tools answer to these calls of one turn."""
    llm = ScriptedLLM([tool_calls(calls), text("Thanks.")])
    await run_agent(sync_tools.agent, answers=llm)
    return [message["content"] for message in llm.calls[1].messages if message["role"] == "tool"]


async def test_librarian_answers_from_the_database(serve: Serve, trainer: MockTrainer) -> None:
    server = await serve(sync_tools.agent)
    longest = "SELECT reader, max(days) AS days FROM loan"
    pages = "SELECT sum(pages) AS pages FROM book"
    trainer.on_chat(
        [
            tool_calls([("tables", {})]),
            tool_calls([("query", {"sql": longest}), ("query", {"sql": pages})]),
            text("It was Ben."),
        ]
    )

    response = await drive(server.session, make_request(metadata={"answer": "Ben"}), trainer=trainer)

    assert response["reward"] == 1
    assert response["metrics"]["num_tool_calls"] == 3
    contents = [message["content"] for message in response["final_messages"] if message["role"] == "tool"]
    assert contents[0] == sync_tools.TABLES
    assert contents[1:] == ['[{"reader":"Ben","days":30}]', '[{"pages":990}]']


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM loan",
        "ATTACH DATABASE 'stolen.db' AS stolen",
        "PRAGMA temp_store_directory = 'x'",
        "SELECT * FROM nowhere",
        "SELECT 1; SELECT 2",
        "SELECT zeroblob(1000000000)",
    ],
)
async def test_librarian_reads_only_and_tells_the_model_why_not(sql: str) -> None:
    (content,) = await _asked(("query", {"sql": sql}))

    assert content.startswith("Error: SQLite says: ")


async def test_librarian_gives_up_a_query_without_end() -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"

    contents = await _asked(("query", {"sql": endless}), ("query", {"sql": "SELECT 1 AS one"}))

    assert contents == ["Error: SQLite says: interrupted", '[{"one":1}]']


async def test_librarian_returns_fifty_rows_at_most() -> None:
    many = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 99) SELECT x FROM n"

    (content,) = await _asked(("query", {"sql": many}))

    assert len(msgspec.json.decode(content)) == 50


# ---------------------------------------------------------------- embedding


async def test_embedded_services_serve_beside_the_routes_of_their_host(trainer: MockTrainer) -> None:
    trainer.on_chat("The answer is 4.")
    async with listening(embedding.make_app()) as url, ClientSession(url) as session:
        for prefix in ("/calculator", "/librarian"):
            request = make_request(metadata={"answer": 4})
            response = await drive(url + prefix, request, trainer=trainer)
            assert response["reward"] == 1
        async with session.get("/") as answer:
            index = await answer.json()
        async with session.get("/librarian/v1/rollout/status") as answer:
            status = await answer.json()

    assert {prefix: agent["agent_loop"] for prefix, agent in index["agents"].items()} == {
        "/calculator": "calculator",
        "/librarian": "librarian",
    }
    assert status["agent"] == "librarian"


class _InterruptedOutput(io.StringIO):
    """Whoever writes the first line gets a Ctrl-C."""

    def write(self, text: str) -> int:
        if not self.getvalue():
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_embedding_serves_until_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    out = _InterruptedOutput()
    monkeypatch.setattr(sys, "stdout", out)

    embedding.main(port=0)

    assert "Running on http://127.0.0.1:" in out.getvalue()


# ---------------------------------------------------------------- the dataset


def _player(row: Row) -> Callable[..., Any]:
    """The scripted model as a function for ScriptedLLM."""

    def play(messages: list[dict[str, Any]], params: dict[str, Any]) -> Any:
        move = row.next_move(messages)
        return tool_calls([(call.name, call.arguments) for call in move.calls]) if move.calls else text(move.text)

    return play


def test_dataset_has_fifty_different_rows() -> None:
    rows = load_rows()

    assert len(rows) == 50
    assert len({row.id for row in rows}) == 50
    assert len({row.messages[-1]["content"] for row in rows}) == 50
    assert all([message["role"] for message in row.messages] == ["system", "user"] for row in rows)


def test_dataset_plans_one_to_four_calls_and_some_that_fail() -> None:
    calls = [[call for turn in row.plan for call in turn] for row in load_rows()]

    names = {call.name for planned in calls for call in planned}
    assert {len(planned) for planned in calls} == {1, 2, 3, 4}
    assert {"add", "subtract", "multiply", "divide", "substract", "power"} == names
    assert sum(isinstance(call.arguments, str) for planned in calls for call in planned) == 2


def _tool_messages(response: RolloutResponse) -> list[dict[str, Any]]:
    return [message for message in response.final_messages if message["role"] == "tool"]


async def test_every_answer_of_the_dataset_is_reached_through_real_tools() -> None:
    failures = 0
    for row in load_rows():
        llm = ScriptedLLM([_player(row)], repeat_last=True)

        response = await run_agent(calculator.agent, row.messages, llm, metadata=row.metadata)

        assert response.reward == 1, (row.id, response.final_messages[-1])
        failures += any(message["content"].startswith("Error: ") for message in _tool_messages(response))
        assert "{" not in response.final_messages[-1]["content"]
    assert 5 <= failures <= 10


def _made(reply: str, *turns: list[PlannedCall]) -> Row:
    return Row(id="r", messages=[{"role": "user", "content": "q"}], plan=list(turns), reply=reply)


def _history(*results: str) -> list[dict[str, Any]]:
    answered = [{"role": "tool", "content": result} for result in results]
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}, *answered]


@pytest.mark.parametrize(
    ("result", "said"),
    [("7.0", "7"), ("0.30000000000000004", "0.3"), ("-0.0000001", "-0"), ("100", "100"), ("Error: no", "Error: no")],
)
def test_reply_shows_results_as_a_person_would_write_them(result: str, said: str) -> None:
    row = _made("<{1}>", [PlannedCall(name="add", arguments={})])

    assert row.next_move(_history(result)).text == f"<{said}>"


def test_references_without_a_result_stay_as_they_are() -> None:
    row = _made("{0} {2} {x}", [], [PlannedCall(name="add", arguments={"a": "{2}", "b": "{1}", "c": "see {1}"})])

    (call,) = row.next_move(_history("Error: no")).calls

    assert call.arguments == {"a": "{2}", "b": "Error: no", "c": "see {1}"}
    assert row.next_move([*_history("5"), {"role": "assistant"}]).text == "{0} {2} {x}"


_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "odd"]), "content": st.none() | st.text(max_size=8)}
    ),
    max_size=6,
)
_arguments = st.text(max_size=5) | st.dictionaries(
    st.text(max_size=3), st.integers() | st.sampled_from(["{1}", "{2}", "{999}"]), max_size=3
)
_plans = st.lists(
    st.lists(st.builds(PlannedCall, name=st.text(max_size=5), arguments=_arguments), max_size=2), max_size=3
)


@given(plan=_plans, reply=st.text(max_size=10), history=_messages)
@settings(max_examples=50, deadline=None)
def test_scripted_model_has_a_move_for_any_history(plan: Any, reply: str, history: list[dict[str, Any]]) -> None:
    row = Row(id="r", messages=[{"role": "user", "content": "q"}], plan=plan, reply=reply)

    move = row.next_move(history)

    assert move.calls == [] or move.text == ""


# ---------------------------------------------------------------- odd files

LINES = [
    b'{"id": "a", "messages": [{"role": "user", "content": "one \xe2\x80\xa8 two"}]}',
    b'{"id": "b", "messages": [{"role": "user", "content": "x"}], "extra": 1}',
]


def _write(folder: Path, data: bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\n".join(LINES), id="no-newline-at-the-end"),
        pytest.param(b"\n".join(LINES) + b"\n", id="newline-at-the-end"),
        pytest.param(b"\r\n".join(LINES) + b"\r\n", id="crlf"),
        pytest.param(codecs.BOM_UTF8 + b"\n".join(LINES), id="bom"),
        pytest.param(codecs.BOM_UTF8 + b"\r\n" + b"\r\n".join(LINES), id="bom-and-blank-line"),
        pytest.param(b"\n \t\n" + b"\n\n\r\n".join(LINES) + b"\n\n   \n", id="blank-lines"),
    ],
)
def test_rows_are_read_exactly(tmp_path: Path, data: bytes) -> None:
    rows = load_rows(_write(tmp_path, data))

    assert [row.id for row in rows] == ["a", "b"]
    assert rows[0].messages[0]["content"] == "one \u2028 two"


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_any_text_survives_the_file(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    written = [Row(id=str(n), messages=[{"role": "user", "content": text}]) for n, text in enumerate(texts)]
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, written)))

    assert load_rows(path) == written


def test_a_suffix_says_nothing(tmp_path: Path) -> None:
    assert len(load_rows(str(_write(tmp_path, LINES[0], "ROWS.JSONL")))) == 1


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(b"", "holds no rows", id="empty"),
        pytest.param(b"\xef\xbb\xbf\n\r\n  ", "holds no rows", id="blank"),
        pytest.param("\ufeff{}".encode("utf-16-le"), "UTF-16", id="utf-16-le"),
        pytest.param("\ufeff{}".encode("utf-16-be"), "UTF-16", id="utf-16-be"),
        pytest.param('{"id": 1}'.encode("utf-16-le"), "UTF-16", id="utf-16-without-bom"),
        pytest.param("\ufeff{}".encode("utf-32-le"), "UTF-32", id="utf-32"),
        pytest.param(b"\x1f\x8b\x08\x00", "gzip", id="gzip"),
        pytest.param(LINES[0] + b'\n{"id": "caf\xe9"}', "line 2: byte 12 is not UTF-8", id="latin-1"),
        pytest.param(LINES[0] + b'\n\n{"id": "c"', "line 3: ", id="cut-off"),
        pytest.param(LINES[0] + b"\n" + LINES[0], "line 2: the id 'a' is that of line 1", id="same-id"),
        pytest.param(b'{"id": "c"}', "line 1: Object missing required field `messages`", id="no-messages"),
        pytest.param(b'{"id": "c", "messages": []}', "line 1: ", id="empty-messages"),
        pytest.param(b'{"id": 7, "messages": [{}]}', "line 1: Expected `str`, got `int` - at `$.id`", id="wrong-type"),
        pytest.param(b"[" + LINES[0] + b"]", "line 1: Expected `object`, got `array`", id="json-array"),
        pytest.param(LINES[0] + b"\r" + LINES[1], "line 1: ", id="old-mac-line-ends"),
        pytest.param(b'{"id": "c", "x": ' + b"[" * 500 + b"]" * 500 + b"}", "line 1: ", id="deep"),
        pytest.param(b'{"id": "c", "messages": [{"x": NaN}]}', "line 1: ", id="nan"),
        pytest.param(b'{"id": "\\ud800", "messages": [{}]}', "line 1: ", id="lone-surrogate"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, data: bytes, said: str) -> None:
    path = _write(tmp_path, data)

    with pytest.raises(DatasetError) as caught:
        load_rows(path)

    assert said in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_folder_or_nothing_at_all_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be read: Is a directory"):
        load_rows(tmp_path)
    with pytest.raises(DatasetError, match="cannot be read: No such file or directory"):
        load_rows(tmp_path / "nothing.jsonl")


@pytest.mark.skipif(os.geteuid() == 0, reason=needs("a user that is not root"))
def test_a_file_without_permission_is_one_clear_error(tmp_path: Path) -> None:
    path = _write(tmp_path, LINES[0])
    path.chmod(0)

    with pytest.raises(DatasetError, match="cannot be read: Permission denied"):
        load_rows(path)


def test_the_bundled_dataset_is_plain_utf8_jsonl() -> None:
    data = BUNDLED.read_bytes()

    assert data.decode().count("\n") == 50
    assert data.endswith(b"}\n")
