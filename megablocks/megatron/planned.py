"""Parse and validate a driver's command line for GPUs that this machine need not have."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import warnings
from collections.abc import Sequence
from unittest import mock

from megablocks.config import ConfigError
from megablocks.data.indexed import DataError


def parse(argv: Sequence[str], gpus: int) -> argparse.Namespace:
    """The validated arguments of `megablocks.megatron.pretrain_gpt` on rank 0 of a run on this many GPUs.

    Nothing is started, read or written, except the manifest of `--data-prefix`. Raises ConfigError with the driver's
    line if a flag is refused.
    """
    if {"-h", "--help"} & set(argv):
        raise ConfigError("--help: for the driver's flags, run python -m megablocks.megatron.pretrain_gpt --help")
    in_samples = any(word.split("=")[0] == "--train-samples" for word in argv)
    unsaid = ["--lr", "1e-4"] if in_samples else ["--lr", "1e-4", "--train-iters", "1000"]  # a plan need not know them
    of_rank_0 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(min(gpus, 8))}
    parsed: list[argparse.Namespace] = []
    with (
        warnings.catch_warnings(action="ignore"),  # of packages that are missing here
        mock.patch.dict(os.environ, of_rank_0),  # it also removes what the parser adds to the environment
        contextlib.redirect_stdout(io.StringIO()),
    ):
        from megatron.training.arguments import add_megatron_arguments, validate_args

        from megablocks.megatron import arguments, failures

        try:
            theirs = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
            args = arguments.add_arguments(theirs, parsed).parse_args([*unsaid, *argv])
            args.rank, args.world_size = 0, gpus
            args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
            if "(no GPU)" in str(args.megablocks_automatic.get("megablocks_fused_loss")):
                args.megablocks_fused_loss = True  # off on this machine only
            with (  # the validation reads the GPU's generation; this answers Hopper
                mock.patch("megatron.training.arguments.get_device_arch_version", lambda: 9),
                mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
            ):
                validate_args(args, {})
        except DataError as error:
            raise ConfigError(f"{error}, or give --vocab-size instead of --data-prefix") from error
        except (Exception, SystemExit) as error:
            raise ConfigError(failures.explain(error, parsed[0] if parsed else None)) from error
    return args
