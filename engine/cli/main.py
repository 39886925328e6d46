"""`ptrain`: choose the command, and turn what it raises into one message and an exit code.

0: done. 2: the user's mistake. 1: the run failed. 130 and 143: stopped by SIGINT or SIGTERM, state saved.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from keyword import iskeyword

from engine.contracts import EngineError, RunFailed
from engine.launch.environment import RankEnvironment
from engine.launch.outcome import STOPPED, STOPPED_EARLY, PeerLost, leave_message

COMMANDS = ("train", "plan", "validate", "schema", "export", "import", "verify-resume")

SUCCESS, FAILURE, MISTAKE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run `argv` (default: the process's arguments). The first word names the command; without one it is `train`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "train"
    module = f"{name}_checkpoint" if iskeyword(name) else name.replace("-", "_")
    run: Callable[[Sequence[str]], int] = import_module(f"engine.cli.{module}").run
    code = _guarded(run, arguments)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # A closed pipe (`ptrain plan | head`) is no failure; keep the interpreter from flushing once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code not in (SUCCESS, *STOPPED) and int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        # A process group whose peers may be gone can hang in its destructor.
        os._exit(code)
    return code


def _guarded(run: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    try:
        return run(arguments)
    except RunFailed as error:
        tell(str(error), is_consequence=isinstance(error, PeerLost))
        return FAILURE
    except EngineError as error:
        tell(str(error))
        return MISTAKE
    except BrokenPipeError:
        return SUCCESS
    except KeyboardInterrupt:
        # Training has a handler of its own: this came before it.
        tell(STOPPED_EARLY.format("SIGINT"))
        return STOPPED[0]
    except Exception:
        # Not foreseen, or raised by the user's model: the traceback is the message.
        tell(traceback.format_exc().rstrip())
        return FAILURE


def tell(message: str, is_consequence: bool = False) -> None:
    """Print a failure once: a launched rank hands it to its launcher, which compares the ranks' messages."""
    try:
        environment = RankEnvironment.read()
    except EngineError:
        environment = RankEnvironment()
    if leave_message(environment.rank, message, is_consequence):
        return
    where = f"rank {environment.rank}: " if environment.world_size > 1 else ""
    print(f"ptrain: {where}{message}", file=sys.stderr)
