"""The command line: `python -m rollout`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from rollout._version import __version__
from rollout.errors import AgentLoadError, RequestError, RolloutError, SettingsError
from rollout.logs import configure_logging
from rollout.requests import parse_init
from rollout.schemas import RolloutRequest, get_max_metadata_size_bytes
from rollout.setting_spec import PREFIX
from rollout.settings import describe, load_settings
from rollout.state_cli import HELP, add_state, run_state
from rollout.wire import encode

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

_DESCRIPTION = """\
The server between an RL trainer and its LLM agents: it accepts rollouts, runs your agent loop for each,
asks the trainer for every LLM turn, and reports exactly one terminal result."""

_EPILOG = """\
examples:
  python -m rollout demo                         see it work: 50 rollouts against a mock trainer
  python -m rollout                              serve the built-in calculator agent on 127.0.0.1:9000
  python -m rollout serve my_agent:agent         serve the `agent` in my_agent.py
  python -m rollout validate my_agent:agent      check an agent before you serve it
  python -m rollout state state.db               what a state file holds
  python -m rollout settings                     every setting, its value and where it came from

Settings come from OSMOSIS_ROLLOUT_... variables and from .env in the working directory; options win over both."""


class UsageError(RolloutError):
    """An argument names something that cannot be used."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options; `--help` is made from it."""
    parser = _Parser(
        prog="python -m rollout",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rollout {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=_Parser)
    _add_serve(commands.add_parser("serve", help="serve an agent (the default command)", description=serve_help()))
    validate = commands.add_parser("validate", help="check an agent and show its tools as the trainer will get them")
    validate.add_argument("agent", metavar="MODULE:ATTRIBUTE")
    validate.add_argument("--json", action="store_true", help="print the findings as JSON")
    validate.add_argument(
        "--request",
        type=Path,
        metavar="FILE",
        help="a RolloutRequest as JSON, for a get_tools() that needs one (default: an empty request)",
    )
    settings = commands.add_parser("settings", help="print every setting: its value and where it came from")
    settings.add_argument("--json", action="store_true", help="print them as JSON")
    demo = commands.add_parser("demo", help="serve the calculator agent and drive it through the bundled dataset")
    demo.add_argument(
        "--rows",
        type=_positive,
        default=None,
        metavar="N",
        help="how many rollouts; beyond the 50 rows of the dataset it begins anew (default: 50)",
    )
    demo.add_argument("--concurrency", type=_positive, default=16, metavar="N", help="rollouts at a time (default: 16)")
    demo.add_argument("--json", action="store_true", help="print the results as JSON lines, without progress")
    add_state(commands.add_parser("state", help=HELP, description=f"{HELP[0].upper()}{HELP[1:]}."))
    return parser


def serve_help() -> str:
    """What `serve --help` begins with."""
    return (
        "Serve an agent until SIGTERM or Ctrl-C; then running rollouts get their grace and all results are delivered."
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "agent",
        nargs="?",
        metavar="MODULE:ATTRIBUTE",
        help="the agent (default: SERVER_AGENT, else the calculator example)",
    )
    parser.add_argument("--host", help="address to listen on (SERVER_HOST)")
    parser.add_argument("--port", type=_port, help="port to listen on, 0 for a free one (SERVER_PORT)")
    parser.add_argument(
        "--loop",
        choices=("asyncio", "uvloop", "auto"),
        default="asyncio",
        help="event loop; auto takes uvloop if it is installed (default: asyncio)",
    )
    parser.add_argument(
        "--gc",
        choices=("tuned", "python", "off"),
        default="tuned",
        help="garbage collector: tuned for many live rollouts, as Python sets it, or off (default: tuned)",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default: info"
    )


def _port(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return value


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. 0 good, 1 the thing asked for failed, 2 it was asked for in a wrong way."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = build_parser().parse_args(_with_command(given))
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "serve": _serve,
        "validate": _validate,
        "settings": _settings,
        "demo": _demo,
        "state": run_state,
    }
    try:
        code = commands[options.command](options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `... | head` has seen enough; nor may the flush at the exit find the pipe closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except SettingsError as exc:
        return _complain(f"the settings are wrong:\n{exc}", EXIT_USAGE)
    except (AgentLoadError, UsageError) as exc:
        return _complain(str(exc), EXIT_USAGE)
    except RolloutError as exc:
        return _complain(str(exc), EXIT_FAILED)
    except KeyboardInterrupt:
        return 130


def _with_command(given: list[str]) -> list[str]:
    """`rollout`, `rollout my_agent:agent` and `rollout --port 1` mean `rollout serve ...`."""
    if given and given[0] in ("-h", "--help", "--version"):
        return given
    if not given or given[0].startswith("-") or ":" in given[0]:
        return ["serve", *given]
    return given


def _complain(text: str, code: int) -> int:
    print(f"rollout: {text}", file=sys.stderr)
    return code


# ---------------------------------------------------------------- serve


def _serve(options: argparse.Namespace) -> int:
    configure_logging(options.log_format, options.log_level)
    settings = load_settings().settings
    from rollout.agent.loading import load_agent
    from rollout.process import serve_agent_loop
    from rollout.server.app import override

    settings = override(settings, agent=options.agent, host=options.host, port=options.port)
    serve_agent_loop(load_agent(settings.server.agent), settings, loop=options.loop, gc=options.gc)
    return EXIT_OK


# ---------------------------------------------------------------- validate, settings, demo


def _validate(options: argparse.Namespace) -> int:
    from rollout.agent.loading import load_agent
    from rollout.agent.validator import validate_agent_loop

    request = None if options.request is None else _request_in(options.request)
    result = validate_agent_loop(load_agent(options.agent), request)
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        print(result)
        print("\nTools as the trainer will get them:")
        print(msgspec.json.format(encode(result.tools)[0], indent=2).decode())
    return EXIT_OK if result.valid else EXIT_FAILED


def _request_in(path: Path) -> RolloutRequest:
    """The RolloutRequest in a file, checked as `/init` checks it."""
    try:
        return parse_init(path.read_bytes(), get_max_metadata_size_bytes()).view()
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}") from None
    except RequestError as exc:
        raise UsageError(f"{path} holds no RolloutRequest: {exc}") from None


def _settings(options: argparse.Namespace) -> int:
    loaded = load_settings()
    rows = describe(loaded.settings, loaded.sources)
    if options.json:
        print(json.dumps([msgspec.to_builtins(row) for row in rows], indent=2))
        return EXIT_OK
    headings = ("variable", "value", "source", "default", "bounds")  # the widest last: what a narrow terminal wraps
    table = [headings, *(tuple(str(getattr(row, name)) for name in headings) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(headings))]
    print(f"All variables begin with {PREFIX}")
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return EXIT_OK


def _demo(options: argparse.Namespace) -> int:
    configure_logging("text", "error")
    from rollout.demo import run_demo

    return run_demo(rows=options.rows, concurrency=options.concurrency, as_json=options.json)
