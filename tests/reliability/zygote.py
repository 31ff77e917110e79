"""A process that has imported Megatron and the driver, and forks a process for each rank that it is asked for.

Starting Python, torch and Megatron takes ten seconds; a fork takes milliseconds. The ranks run the driver's own
`main()` in a main thread, so signals, exit codes and output are those of a real launch. Requests and answers are JSON
lines on stdin and stdout: {"spawn": {argv, env, out, faults}} → {"pid"}, {"poll": pid} → {"code": null or int}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback


def preload() -> None:
    from megablocks.megatron import cpu

    cpu.install()
    import argparse

    import matplotlib.backends.backend_agg  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import megatron.core.tokenizers.text  # noqa: F401
    import megatron.training.training  # noqa: F401
    import quick_flags
    import torch.distributed.checkpoint  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    from megatron.training.arguments import add_megatron_arguments

    from megablocks.megatron import arguments, data, gpt, guards, moe_layer, optimizer_state, reporting  # noqa: F401

    quick_flags.remember_help()
    add_megatron_arguments(argparse.ArgumentParser())


def run_rank(request: dict) -> int:
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(request["env"])
    sys.argv = ["pretrain_gpt", *request["argv"]]
    sys.orig_argv[:] = sys.argv
    try:
        import faults

        from megablocks.megatron import pretrain_gpt

        for name, kwargs in request["faults"]:
            getattr(faults, name)(**kwargs)
        return pretrain_gpt.main()
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def serve() -> None:
    commands, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    preload()
    gc.freeze()  # no rank's collection looks at the modules' objects
    codes: dict[int, int] = {}
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in commands:
        command = json.loads(line)
        if "spawn" in command:
            pid = os.fork()
            if pid == 0:
                commands.close()
                answers.close()
                os._exit(run_rank(command["spawn"]))
            codes.pop(pid, None)  # of an earlier rank: in a long test session the system uses a number again
            answer: dict = {"pid": pid}
        else:
            pid = command["poll"]
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            answer = {"code": codes.get(pid)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
