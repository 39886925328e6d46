"""`ptrain`: choose the command, and turn what it raises into one message and an exit code.

0: done. 2: the user's mistake. 1: the run failed. 130 and 143: stopped by SIGINT or SIGTERM, state saved.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from keyword import iskeyword

from engine.contracts import EngineError, RunFailed
from engine.launch.environment import RankEnvironment
from engine.launch.outcome import STOPPED, STOPPED_EARLY, PeerLost, leave_message

COMMANDS = {
    "train": "train a model as a config says; the command when none is named",
    "plan": "print what a config means for a number of ranks",
    "validate": "check a config: every problem at once",
    "explain": "tell what each key of a config does in this run",
    "diff": "tell what two configs do differently",
    "init": "write a first config for a model and some GPUs",
    "export": "write the weights in a checkpoint to safetensors",
    "import": "read a checkpoint that DeepSpeed wrote",
    "verify-resume": "prove that a run that stops and resumes is equal to the bit",
    "analyze": "measure the difficulty of every training sample, for a curriculum",
    "plot-schedule": "draw learning rate, batch and difficulty over the steps of a run",
    "lr-range": "train with a rising learning rate, and suggest a range",
    "schema": "print the JSON schema, for completion in editors",
}
"""Every command, with the line that `ptrain --help` shows."""

SUCCESS, FAILURE, MISTAKE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run `argv` (default: the process's arguments). The first word names the command; without one it is `train`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = _guarded(_dispatch, arguments)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # A closed pipe (`ptrain plan | head`) is no failure; keep the interpreter from flushing once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        # A process group whose peers may be gone can hang in its destructor, and gloo's threads now and then abort the
        # interpreter's teardown ("terminate called without an active exception") when all is done and written.
        logging.shutdown()
        os._exit(code)
    return code


def _dispatch(arguments: Sequence[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help", "help"):
        print(overview(), file=sys.stdout if arguments else sys.stderr)
        return SUCCESS if arguments else MISTAKE
    if not first.startswith("-") and first not in COMMANDS:
        raise EngineError(_no_such_command(first))
    name, rest = (first, arguments[1:]) if first in COMMANDS else ("train", arguments)
    run: Callable[[Sequence[str]], int] = import_module(f"engine.cli.{module_of(name)}").run
    return run(rest)


def module_of(command: str) -> str:
    """The file of a command: its name, where Python allows that."""
    return f"{command}_checkpoint" if iskeyword(command) else command.replace("-", "_")


def overview() -> str:
    """What `ptrain --help` prints."""
    width = max(map(len, COMMANDS))
    commands = [f"  {name:<{width}}  {line}" for name, line in COMMANDS.items()]
    return "\n".join(
        [
            "usage: ptrain --config FILE [options]",
            "       ptrain COMMAND ...",
            "",
            "A JSON file in DeepSpeed's format drives the training of your own PyTorch model.",
            "",
            "commands:",
            *commands,
            "",
            "ptrain COMMAND --help tells the options of a command. Exit codes: 0 done; 2 a mistake in",
            "what was given; 1 the run failed (diff: they differ); 130, 143 stopped by a signal.",
        ]
    )


def _no_such_command(word: str) -> str:
    if word.endswith(".json"):
        return f"{word} is no command; to train, write ptrain --config {word}"
    from engine.config.suggest import nearest

    near = nearest(word, COMMANDS)
    meant = f"; did you mean {near}?" if near else ""
    return f"there is no command {word}{meant} (commands: {', '.join(COMMANDS)})"


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
