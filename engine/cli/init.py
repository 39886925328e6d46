"""`ptrain init`: a first config, chosen by the plan's estimates, with comments that say why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.cli.options import Parser, positive
from engine.contracts import EngineError

if TYPE_CHECKING:
    from engine.plan.propose import Precision

QUESTIONS = {
    "model_size": "How many parameters has the model (e.g. 125m, 1.3b)? ",
    "gpus": "On how many GPUs (0: on the CPU)? ",
    "memory": "How much memory has each GPU (e.g. 24GB, 80GB)? ",
}
FLAGS = {"model_size": "--model-size", "gpus": "--gpus", "memory": "--memory"}


def run(argv: Sequence[str]) -> int:
    """Writes the file, which is checked first. Raises EngineError for what cannot be understood or does not fit."""
    arguments = _parse(argv)
    output = Path(arguments.output)
    to_stdout = arguments.output == "-"
    if not to_stdout and output.exists() and not arguments.force:
        raise EngineError(f"{output} exists; choose another --output, or pass --force to replace it")

    from engine.plan import validate
    from engine.plan.propose import Wish, propose
    from engine.plan.propose_text import render
    from engine.plan.sizes import parse_bytes, parse_count

    size = _answer(arguments, "model_size", parse_count)
    gpus = _answer(arguments, "gpus", _gpus)
    memory = None if gpus == 0 else _answer(arguments, "memory", parse_bytes)
    precision: Precision = arguments.precision or ("fp32" if gpus == 0 else "bf16")
    wish = Wish(size, gpus, memory, arguments.sequence_length, arguments.steps, precision)
    choice = propose(wish)
    judged = validate(choice.config, wish.ranks)
    if judged.kind != "valid":
        raise EngineError(f"the proposed config is not valid:\n{judged.render()}")
    text = render(wish, choice)
    if to_stdout:
        print(text, end="")
        return 0
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("w" if arguments.force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise EngineError(f"--output: {output} cannot be written: {error.strerror or error}") from error
    print(f"written to {output}; ptrain explain {output} --world {wish.ranks} tells what each key does")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "ptrain init",
        "Write a small commented config: stage, precision and batch are chosen by estimates of memory and traffic. "
        "On a terminal, what is not given is asked for.",
    )
    parser.add_argument("--model-size", metavar="N", help="parameters, e.g. 125m or 1.3b")
    parser.add_argument("--gpus", metavar="N", help="GPUs in all; 0: a CPU")
    parser.add_argument("--memory", metavar="SIZE", help="memory of one GPU, e.g. 24GB or 80GiB")
    parser.add_argument("--precision", choices=["bf16", "fp16", "fp32"], help="default: bf16, on a CPU fp32")
    parser.add_argument(
        "--sequence-length", type=positive, default=2048, metavar="N", help="tokens in a sequence (default 2048)"
    )
    parser.add_argument("--steps", type=positive, default=10_000, metavar="N", help="updates (default 10000)")
    parser.add_argument(
        "--output", default="ds_config.json", metavar="FILE", help="default: ds_config.json; - prints it"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    return parser.parse_args(argv)


def _answer(arguments: argparse.Namespace, name: str, read: Callable[[str], int]) -> int:
    """What the flag says; without it what the user types, asked again until it can be read."""
    given = getattr(arguments, name)
    if given is not None:
        return read(given)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        missing = [FLAGS[key] for key in FLAGS if getattr(arguments, key) is None]
        missing = [flag for flag in missing if flag != "--memory" or arguments.gpus != "0"]
        raise EngineError(
            f"{', '.join(missing)} missing, and there is no terminal to ask on; "
            "for example: ptrain init --model-size 1.3b --gpus 8 --memory 80GB"
        )
    while True:
        try:
            return read(input(QUESTIONS[name]))
        except EOFError:
            raise EngineError(f"no answer; pass {FLAGS[name]}") from None
        except EngineError as error:
            print(error)


def _gpus(text: str) -> int:
    if not text.strip().isdigit():
        raise EngineError(f"{text!r} is not a number of GPUs")
    return int(text)
