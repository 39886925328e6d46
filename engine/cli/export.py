"""`ptrain export`: the weights in a checkpoint as safetensors that plain PyTorch and Hugging Face load."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cli.options import Parser

DTYPES = ("fp32", "bf16", "fp16", "stored")


def run(argv: Sequence[str]) -> int:
    parser = Parser("ptrain export", "Write the weights in a checkpoint to one file, or to shards with an index.")
    parser.add_argument(
        "checkpoint", metavar="CKPT", help="a checkpoint's folder, a folder of checkpoints, or a run's output"
    )
    parser.add_argument(
        "--to", required=True, metavar="FILE", help="the .safetensors file, or a folder that gets model.safetensors"
    )
    parser.add_argument("--tag", help="which checkpoint of the folder (default: the one that latest names)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="of floating parameters (default fp32; stored: as they are)"
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="larger exports become shards (default 5GB)"
    )
    parser.add_argument("--exclude-frozen", action="store_true", help="leave out parameters that were not trained")
    parser.add_argument("--no-verify", action="store_true", help="do not hash the checkpoint's files first")
    arguments = parser.parse_args(argv)

    from engine.checkpoint import export

    files = export(
        arguments.checkpoint,
        arguments.to,
        tag=arguments.tag,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        exclude_frozen=arguments.exclude_frozen,
        verify=not arguments.no_verify,
    )
    for file in files:
        print(f"{file}: {file.stat().st_size:,} bytes")
    return 0
