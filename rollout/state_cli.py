"""`python -m rollout state PATH`: what a state file holds, while no service has it open."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout.errors import StoreError
from rollout.logs import counted
from rollout.schemas import Phase, RolloutState
from rollout.server.states import state_of
from rollout.settings import load_settings
from rollout.state.sqlite_reader import StateReader, Summary, redeliver
from rollout.state.store import Record
from rollout.wire import JSON

HELP = "look into a state file (SERVER_STATE_URL=sqlite:///...) while no service has it open"

_EPILOG = """\
examples:
  python -m rollout state state.db                          counts, size, the oldest result that is not delivered
  python -m rollout state state.db list --undelivered       results that have not reached their trainer, and of these
  python -m rollout state state.db list --owed              only those that are still tried
  python -m rollout state state.db show ID                  all that is known of one rollout
  python -m rollout state state.db export > results.jsonl   the results, one a line
  python -m rollout state state.db redeliver --all          the next service delivers what was given up"""

_LISTED = 100
_COLUMNS = ("rollout_id", "phase", "status", "finish_reason", "run", "delivery_attempts", "created_at", "finished_at")
_SECRETS = ("api_key", "llm_api_key")
_HIDDEN = "***"
_UNFINISHED = "unfinished"
_PHASES: dict[str, str] = {
    Phase.QUEUED: _UNFINISHED,
    Phase.RUNNING: _UNFINISHED,
    Phase.DELIVERING: "owed",
    Phase.UNDELIVERED: "given up",
}
"""What people are shown for a phase; JSON has the words of the protocol."""


def add_state(parser: argparse.ArgumentParser) -> None:
    """Options and actions of the command."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("path", type=_path, metavar="PATH", help="the file, or its URL: sqlite:///...")
    _add_common(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    listed = _add_action(actions, "list", "the records, oldest first")
    only = listed.add_mutually_exclusive_group()
    only.add_argument(
        "--undelivered", action="store_true", help="only results that have not reached their trainer: owed or given up"
    )
    only.add_argument("--owed", action="store_true", help="only those of them that are still tried")
    listed.add_argument(
        "--limit", type=_count, default=_LISTED, metavar="N", help=f"how many at most, 0: all (default: {_LISTED})"
    )
    _add_action(actions, "show", "all that is known of one rollout; keys are hidden").add_argument("id", metavar="ID")
    export = _add_action(actions, "export", "the terminal results as JSON lines")
    export.add_argument("--undelivered", action="store_true", help="only those that have not reached their trainer")
    again = _add_action(actions, "redeliver", "mark results that were given up as due: the next service delivers them")
    which = again.add_mutually_exclusive_group(required=True)
    which.add_argument("ids", nargs="*", default=[], metavar="ID")
    which.add_argument("--all", action="store_true", help="all that were given up")


def _add_action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text}.")
    _add_common(action)
    return action


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Options that may stand before and after the action, so they have no default that one could put over the other."""
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=argparse.SUPPRESS,
        metavar="SECONDS",
        help="how long to wait for a service that has the file open (default: 0)",
    )


def _path(text: str) -> Path:
    return Path(text.removeprefix("sqlite:///"))


def _seconds(text: str) -> float:
    value = float(text) if text.replace(".", "", 1).isdecimal() else -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to 86400")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return int(text)


def run_state(options: argparse.Namespace) -> int:
    """Carry the command out; the exit code. Raises `StoreError` for a file that cannot be read."""
    actions: dict[str | None, Callable[[argparse.Namespace], int]] = {
        None: _summarize,
        "list": _list,
        "show": _show,
        "export": _export,
        "redeliver": _redeliver,
    }
    return actions[options.action](options)


def _reader(options: argparse.Namespace) -> StateReader:
    return StateReader(options.path, wait_seconds=getattr(options, "wait", 0.0))


def _wants_json(options: argparse.Namespace) -> bool:
    return getattr(options, "json", False)


# ---------------------------------------------------------------- actions


def _summarize(options: argparse.Namespace) -> int:
    with _reader(options) as reader:
        summary = reader.summary()
    if _wants_json(options):
        _print_json(_summary_as_json(summary))
        return 0
    print(f"{counted(summary.records, 'record')}, {counted(summary.size_bytes, 'byte')}")
    for name, count in _counts(summary.by_phase).items():
        print(f"  {name:<31} {count}")
    oldest = summary.oldest_undelivered
    if oldest is not None:
        state, kind = _state(oldest), "owed" if oldest.phase is Phase.DELIVERING else "given up"
        attempts = counted(oldest.attempts, "attempt")
        line = f"oldest {kind}: {state.rollout_id}, ended {state.finished_at}, {attempts}"
        print(_clean(line + (f", last: {state.last_delivery_error}" if state.last_delivery_error else "")))
    return 0


def _counts(by_phase: dict[str, int]) -> dict[str, int]:
    """Records by what is to be done about them. Starts are not written, so a file cannot tell queued from running."""
    return {
        f"{_UNFINISHED} (queued or running)": by_phase[Phase.QUEUED] + by_phase[Phase.RUNNING],
        "owed (delivery goes on)": by_phase[Phase.DELIVERING],
        "given up": by_phase[Phase.UNDELIVERED],
        "delivered": by_phase[Phase.DELIVERED],
    }


def _summary_as_json(summary: Summary) -> JSON:
    oldest = summary.oldest_undelivered
    return {
        **msgspec.to_builtins(msgspec.structs.replace(summary, oldest_undelivered=None)),
        "oldest_undelivered": None if oldest is None else _state(oldest),
    }


def _list(options: argparse.Namespace) -> int:
    with _reader(options) as reader:
        found = reader.records(undelivered=options.undelivered or options.owed)
        wanted = (record for record in found if not options.owed or record.phase is Phase.DELIVERING)
        states = [_state(record) for record in itertools.islice(wanted, options.limit or None)]
    if _wants_json(options):
        _print_json(states)
        return 0
    cells = [[_cell(_shown(column, getattr(state, column))) for column in _COLUMNS] for state in states]
    _print_table([[column.removesuffix("_at").removeprefix("rollout_") for column in _COLUMNS], *cells])
    if options.limit and len(states) == options.limit:
        print(f"... the first {options.limit}; more with --limit", file=sys.stderr)
    return 0


def _show(options: argparse.Namespace) -> int:
    with _reader(options) as reader:
        record = reader.get(options.id)
    if record is None:
        raise StoreError(f"{options.path} knows no rollout {options.id!r}")
    shown = _record_as_json(record)
    if _wants_json(options):
        _print_json(shown)
        return 0
    rows = [(name, _shown(name, value)) for name, value in shown.items() if value is not None]
    _print_table([[name, value if isinstance(value, str) else _json(value)] for name, value in rows])
    return 0


def _export(options: argparse.Namespace) -> int:
    with _reader(options) as reader:
        for record in reader.records(undelivered=options.undelivered):
            if record.result is not None and record.result_held:
                sys.stdout.write(record.result.decode() + "\n")
    return 0


def _redeliver(options: argparse.Namespace) -> int:
    horizon = load_settings().settings.server.delivery_horizon_seconds
    due = redeliver(
        options.path,
        None if options.all else list(dict.fromkeys(options.ids)),
        give_up_at=time.time() + horizon,
        wait_seconds=getattr(options, "wait", 0.0),
    )
    missed = [rollout_id for rollout_id in dict.fromkeys(options.ids) if rollout_id not in due]
    if _wants_json(options):
        _print_json({"due": due, "not_given_up": missed})
    else:
        print(_redelivery(options, due))
        for rollout_id in missed:
            print(_clean(f"  not one that was given up: {rollout_id}"), file=sys.stderr)
    return 1 if missed else 0


def _redelivery(options: argparse.Namespace, due: list[str]) -> str:
    """What came of it, as a sentence."""
    if due or not options.all:
        verb, whom = ("is", "it") if len(due) == 1 else ("are", "them")
        return f"{counted(len(due), 'result')} {verb} due again: the next service on this file delivers {whom}"
    with _reader(options) as reader:
        owed = reader.summary().by_phase[Phase.DELIVERING]
    return f"nothing was given up; {owed} {'is' if owed == 1 else 'are'} still being delivered"


# ---------------------------------------------------------------- how it is shown


def _state(record: Record) -> RolloutState:
    return state_of(record, record.turn)


def _record_as_json(record: Record) -> dict[str, JSON]:
    """Everything but the keys of other people's services."""
    callback = record.callback
    return {
        **msgspec.to_builtins(_state(record)),
        "idempotency_key": record.key if record.key != record.rollout_id else None,
        "callback_url": None if callback is None else callback.url,
        "request": None if record.request is None else _without_secrets(record.request),
        "checkpoint": None if record.checkpoint is None else msgspec.json.decode(record.checkpoint),
        "tools": msgspec.json.decode(record.tools),
        "result": None if record.result is None else msgspec.json.decode(record.result),
        "result_held": None if record.result is None else record.result_held,
    }


def _without_secrets(request: Any) -> dict[str, JSON]:
    fields: dict[str, JSON] = msgspec.json.decode(msgspec.json.encode(request))
    return {
        name: _HIDDEN if name in _SECRETS and value is not None else value
        for name, value in fields.items()
        if value is not None
    }


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _shown(column: str, value: Any) -> Any:
    return _PHASES.get(value, value) if column == "phase" else value


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _print_table(rows: Iterable[Sequence[str]]) -> None:
    lines = [[_clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _clean(text: str) -> str:
    """Without what would move the cursor or colour the screen: ids and errors come from outside."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
