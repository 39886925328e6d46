"""`ptrain import`: a DeepSpeed checkpoint becomes one that `--resume` goes on with."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cli.options import Parser


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "ptrain import",
        "Read a checkpoint that DeepSpeed wrote (ZeRO stages 0 to 3) and save it in this engine's format. Needs no "
        "DeepSpeed; nothing in the files is executed.",
    )
    parser.add_argument("checkpoint", metavar="CKPT_DIR", help="the folder that has the file latest, or one tag's")
    parser.add_argument("--to", required=True, metavar="DIR", help="a folder of checkpoints; gets the same tag")
    parser.add_argument("--tag", help="which checkpoint (default: the one that latest names)")
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer's state out")
    arguments = parser.parse_args(argv)

    from engine.checkpoint.deepspeed import import_checkpoint

    path, notes = import_checkpoint(
        arguments.checkpoint, arguments.to, tag=arguments.tag, weights_only=arguments.weights_only
    )
    for note in notes:
        print(f"note: {note}")
    print(f"imported into {path}; go on with --resume {path}")
    return 0
