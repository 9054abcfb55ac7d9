"""From `module:attribute` to the agent loop it names, or to a text that says what to fix."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rollout.agent.loop import RolloutAgentLoop
from rollout.errors import AgentLoadError

_NOT_THE_USERS = (str(Path(__file__).parents[1]) + os.sep, importlib.__file__, "<")
"""How the files of frames begin that are not the user's: this package, and what imports modules."""
_LACKS_RUN = re.compile(r"abstract class .*\brun\b")
_EXAMPLE = "for example `my_agent:agent` for the variable `agent` in my_agent.py"


def load_agent(spec: str) -> RolloutAgentLoop:
    """The agent loop that `module:attribute` names; the attribute may be dotted. Raises `AgentLoadError` otherwise.

    The working directory becomes importable, and stays so for what the agent imports later. Any object with a `name`,
    `get_tools()` and `run()` is an agent loop.
    """
    module_name, attribute = _split(spec)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import(module_name)
    value = _find(module, attribute)
    if isinstance(value, type):
        raise AgentLoadError(_class_given(module, attribute, value))
    missing = missing_agent_parts(value)
    if missing:
        raise AgentLoadError(
            f"{module_name}:{attribute} is of type {type(value).__name__}, not an agent loop: "
            f"it lacks {' and '.join(missing)}{_agents_here(module)}"
        )
    return cast("RolloutAgentLoop", value)


def missing_agent_parts(value: object) -> list[str]:
    """What the value lacks to be used as an agent loop; nothing for an agent loop. Never raises."""
    name = _peek(value, "name")
    missing = [] if isinstance(name, str) and name.strip() else ["a `name`"]
    return missing + [f"`{method}()`" for method in ("get_tools", "run") if not callable(_peek(value, method))]


def _peek(value: object, attribute: str) -> Any:
    try:
        return getattr(value, attribute, None)
    except Exception:
        return None


def _split(spec: str) -> tuple[str, str]:
    text = spec.strip()
    module_name, colon, attribute = text.partition(":")
    path = module_name.removesuffix(".py").replace("\\", "/").removeprefix("./")
    if module_name.endswith(".py") or path != module_name or "/" in path:
        fixed = f"{path.strip('/').replace('/', '.')}:{attribute or 'agent'}"
        raise AgentLoadError(
            f"{text!r} names a file; name the module as an import would: {fixed!r}, "
            "in the folder from where that import works"
        )
    if not colon:
        raise AgentLoadError(f"{text!r} has no colon; write module:attribute, {_EXAMPLE}")
    if ":" in attribute:
        raise AgentLoadError(f"{text!r} has more than one colon; write module:attribute, {_EXAMPLE}")
    if not module_name or not all(module_name.split(".")):
        raise AgentLoadError(f"{text!r} names no module before the colon; write module:attribute, {_EXAMPLE}")
    if not all(part.isidentifier() for part in attribute.split(".")):
        raise AgentLoadError(f"{text!r} names no attribute after the colon; write module:attribute, {_EXAMPLE}")
    return module_name, attribute


def _import(module_name: str) -> ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        missing = exc.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise AgentLoadError(_import_failed(module_name, exc)) from exc
        raise AgentLoadError(_not_found(module_name, missing)) from None
    except (Exception, SystemExit) as exc:
        raise AgentLoadError(_import_failed(module_name, exc)) from exc


def _not_found(module_name: str, missing: str) -> str:
    searched = "\n".join(f"  {path or os.getcwd()}" for path in sys.path)
    which = f"module {module_name!r}" + (f" (no {missing!r})" if missing != module_name else "")
    return (
        f"{which} was not found; start the service in the folder that holds it, install it, or set PYTHONPATH. "
        f"Searched in:\n{searched}"
    )


def _import_failed(module_name: str, exc: BaseException) -> str:
    """What went wrong inside the module, and where in the user's files."""
    if isinstance(exc, SyntaxError) and exc.filename:
        place = f"{exc.filename}, line {exc.lineno}"
    else:
        frames = traceback.extract_tb(exc.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)] or frames
        place = f"{own[-1].filename}, line {own[-1].lineno}"
    text = exc.msg if isinstance(exc, SyntaxError) else str(exc)
    if isinstance(exc, TypeError) and _LACKS_RUN.search(text):
        text += "; write `async def run(self, ctx)`"
    what = f"{type(exc).__name__}: {text}" if text else type(exc).__name__
    return f"module {module_name!r} was found, but importing it raised {what} ({place})"


def _find(module: ModuleType, attribute: str) -> Any:
    value: Any = module
    walked = module.__name__
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise AgentLoadError(_no_attribute(module, value, walked, part)) from None
        except Exception as exc:
            raise AgentLoadError(f"reading {part!r} of {walked} raised {type(exc).__name__}: {exc}") from exc
        walked = f"{walked}.{part}"
    return value


def _no_attribute(module: ModuleType, owner: object, walked: str, part: str) -> str:
    near = difflib.get_close_matches(part, [name for name in dir(owner) if not name.startswith("__")], 3)
    hint = f" (did you mean {' or '.join(repr(name) for name in near)}?)" if near else ""
    return f"{walked} has no attribute {part!r}{hint}{_agents_here(module)}"


def _agents_here(module: ModuleType) -> str:
    """What in the module looks like an agent loop, as the end of a sentence."""
    instances = [name for name, value in vars(module).items() if _is_instance(value)]
    if instances:
        return f". Agent loops in {module.__name__}: {', '.join(sorted(instances))}"
    classes = [name for name, value in vars(module).items() if _is_agent_class(value)]
    if not classes:
        return ""
    return f". {module.__name__} has the class {classes[0]}, but no instance: add `agent = {classes[0]}()`"


def _is_instance(value: object) -> bool:
    return not isinstance(value, (type, ModuleType)) and not missing_agent_parts(value)


def _is_agent_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, RolloutAgentLoop) and value is not RolloutAgentLoop


def _class_given(module: ModuleType, attribute: str, value: type) -> str:
    given = f"{module.__name__}:{attribute}"
    if not _is_agent_class(value) and not callable(_peek(value, "run")):
        return f"{given} is the class {value.__name__}, not an agent loop{_agents_here(module)}"
    instances = sorted(name for name, other in vars(module).items() if isinstance(other, value))
    if instances:
        return f"{given} is a class, and an instance is needed: name `{module.__name__}:{instances[0]}`"
    return (
        f"{given} is a class, and an instance is needed: add `agent = {attribute}()` to {module.__name__} "
        f"and name `{module.__name__}:agent`"
    )
